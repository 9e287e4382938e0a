# SPDX-License-Identifier: Apache-2.0
"""Processes that stop together."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np

_MESSAGE_BYTES = 1024  # of a sentence that processes exchange


class Stop(Exception):
  """The run cannot go on, for the reason that its sentence gives.

  Every process raises it at the same point, so none waits for another.
  """


def agree(action: Callable[[], Any]) -> Any:
  """Returns `action()`; raises Stop on all processes if it fails on any.

  A disk that is full is one process's trouble, and the others would wait for
  that process in the next step. Collective, and quick beside a training step.

  Raises:
    Stop: `action` raised `OSError` or `ValueError` on some process; the
      sentence says why the first of these has failed.
  """
  result, message = None, b""
  try:
    result = action()
  except (OSError, ValueError) as error:
    message = f"{error}".encode()[:_MESSAGE_BYTES] or b"unknown"
  messages = [message]
  if jax.process_count() > 1:
    padded = np.frombuffer(message.ljust(_MESSAGE_BYTES, b"\0"), np.uint8)
    messages = [
      row.tobytes().rstrip(b"\0")
      for row in multihost_utils.process_allgather(padded)
    ]
  for message in messages:
    if message:
      raise Stop(message.decode(errors="replace"))
  return result


def first_does(action: Callable[[], Any]) -> None:
  """Runs `action` on the first process only; a failure stops them all."""
  agree(lambda: action() if jax.process_index() == 0 else None)
