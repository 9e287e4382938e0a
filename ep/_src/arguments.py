# SPDX-License-Identifier: Apache-2.0
"""Checks the numbers that users pass, and names the argument that is wrong."""

from __future__ import annotations

import numbers
import operator
from typing import Any

INT32_MAX = 2**31 - 1


def check(condition: bool, what: str, message: str) -> None:
  """Raises `ValueError` with a message that begins with `what`, or returns."""
  if not condition:
    raise ValueError(f"{what}: {message}")


def integer(what: str, name: str, value: Any) -> int:
  """Returns an argument that is an integer of any type as an `int`.

  Raises, with a message that begins with `what`:
    TypeError: it is no integer; neither is a bool.
    ValueError: it does not fit into 32 bits.
  """
  try:
    if isinstance(value, bool):
      raise TypeError
    result = operator.index(value)
  except TypeError:
    raise _wrong_type(what, name, value, "an integer") from None
  if abs(result) > INT32_MAX:
    raise ValueError(
      f"{what}: {name} = {result}, but it must be less than 2^31: tokens, rows"
      " and experts are counted in 32 bits."
    )
  return result


def seconds(what: str, name: str, value: Any) -> float:
  """Returns an argument that is a positive time, perhaps infinite.

  Raises, with a message that begins with `what`:
    TypeError: it is no number.
    ValueError: it is not positive, or NaN.
  """
  if isinstance(value, bool) or not isinstance(value, numbers.Real):
    raise _wrong_type(what, name, value, "a number of seconds")
  if not value > 0:  # as NaN is not
    raise ValueError(
      f"{what}: {name} = {value}, but it must be a positive number of seconds;"
      " math.inf waits without limit."
    )
  return float(value)


def function(what: str, name: str, value: Any) -> None:
  """Raises `TypeError` unless an argument is a function."""
  if not callable(value):
    raise TypeError(
      f"{what}: {name} = {value!r} is a {type(value).__name__}, but a function"
      " of an array is expected, such as jax.nn.silu or jax.nn.gelu."
    )


def _wrong_type(what: str, name: str, value: Any, expected: str) -> TypeError:
  return TypeError(
    f"{what}: {name} = {value!r} is a {type(value).__name__}, but {expected} is"
    " expected."
  )
