# SPDX-License-Identifier: Apache-2.0
"""Finds the ranks that a rank waits for, for the native watchdog.

The kernels of NCCL EP wait for their peers, and so does the program, in XLA. So
each rank has a thread that looks where the rank stands. After a while without
a change the thread publishes that, again and again, in JAX's key-value store: a
rank that others wait for need not know it. A rank that waits also reads what
its peers have published, and gives the watchdog a sentence for its message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import json
import math
import threading
from typing import NamedTuple

import jax

from ep._src.base import compat
from ep._src.native import ffi

_NAMED = 8  # ranks in a message, at most


class Place(NamedTuple):
  """Where a rank stands: `Watchdog::Place` of ep_ffi/backends/nccl."""

  num_ended: int
  has_begun: bool
  num_left: int
  still_s: float
  text: str


class Lookout:
  """A thread that publishes where a rank stands, and reads of the others."""

  def __init__(
    self,
    key: str,
    rank: int,
    processes: list[int],
    timeout_s: float,
    look: Callable[[str], Place],
  ):
    """Starts the thread.

    Args:
      key: the domain's, which only one live domain has.
      rank: this rank of the domain.
      processes: the process of each rank.
      timeout_s: after which the watchdog speaks.
      look: takes the sentence about the others, and returns where this rank
        stands. It raises `NativeError` when the group is closed.
    """
    self._key = key
    self._rank = rank
    self._processes = processes
    self._timeout_s = timeout_s
    self._look = look
    self._is_stopped = threading.Event()
    self._thread = threading.Thread(target=self._run, daemon=True)
    if math.isfinite(timeout_s):  # or else the watchdog never speaks
      self._thread.start()

  def stop(self) -> None:
    """Ends the thread, but does not wait for a store that does not answer."""
    self._is_stopped.set()
    if self._thread.is_alive():
      self._thread.join(timeout=1)

  def _run(self) -> None:
    others = ""
    first: dict[int, Place] = {}  # what was read first in this wait
    while not self._is_stopped.wait(self._timeout_s / 16):
      try:
        place = self._look(others)
      except ffi.NativeError:
        return
      others = ""
      if place.still_s < self._timeout_s / 4:
        first = {}
        continue
      try:
        self._publish(place)
        if place.num_left and place.still_s > self._timeout_s / 2:
          now = self._read() | {self._rank: place}
          first = now | first
          answers = {
            rank: place
            for rank, place in now.items()
            if rank == self._rank or place != first[rank]
          }
          others = describe(answers, self._processes)
      except jax.errors.JaxRuntimeError as e:
        others = f"Of the other ranks nothing is known: {e}."

  def _publish(self, place: Place) -> None:
    compat.distributed_client().key_value_set(
      f"{self._key}/{self._rank}", json.dumps(place), allow_overwrite=True
    )

  def _read(self) -> dict[int, Place]:
    """Returns what all ranks have published last."""
    found = compat.distributed_client().key_value_dir_get(self._key)
    return {
      int(key.rpartition("/")[2]): Place(*json.loads(value))
      for key, value in found
    }


def describe(answers: Mapping[int, Place], processes: list[int]) -> str:
  """Returns a sentence about the ranks that others wait for.

  It is the same on all ranks that have the same answers.

  Args:
    answers: where the ranks stand, by rank, without those that do not answer.
    processes: the process of each rank.
  """
  furthest = max(p.num_ended + p.has_begun for p in answers.values())
  missing = {
    rank: f"which has ended {place.num_ended} ops and {place.text}"
    for rank, place in answers.items()
    if not place.has_begun and place.num_ended < furthest
  }
  missing |= {
    rank: "which does not answer: it ended, is stopped or cannot run Python"
    for rank in range(len(processes))
    if rank not in answers
  }
  if missing:
    return f"Missing: {_list(missing, processes, ', ')}."
  texts = {rank: place.text for rank, place in answers.items()}
  if len({*texts.values()}) == 1:
    return "No rank is missing, so a kernel, a GPU or a link has failed."
  return (
    "No rank is missing, but they are in different ops, as if they ran"
    f" different programs: {_list(texts, processes, ' ')}."
  )


def _list(texts: Mapping[int, str], processes: list[int], joint: str) -> str:
  named = [
    f"rank {rank} (process {processes[rank]}){joint}{texts[rank]}"
    for rank in sorted(texts)[:_NAMED]
  ]
  if more := len(texts) - len(named):
    named.append(f"and {more} more")
  return "; ".join(named)
