# SPDX-License-Identifier: Apache-2.0
"""Finds missing ranks of NCCL EP, which the watchdog's messages then name.

NCCL EP's kernels wait for peers, and XLA waits for the kernels. So a thread of
each rank polls the progress of the rank. After a while without progress, each
thread publishes the place of its rank periodically in JAX's key-value store,
because a rank may not know that peers wait. The thread of a waiting rank also
reads the published places, and gives the watchdog a sentence about them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import json
import math
import threading
from typing import Any, NamedTuple

import jax

from ep._src.base import compat
from ep._src.native import ffi

_NAMED = 8  # ranks in a message, at most


class Place(NamedTuple):
  """A rank's position in its sequence of ops; see the C++ `Watchdog::Place`."""

  num_ended: int
  has_begun: bool
  num_left: int
  still_s: float
  text: str


@dataclasses.dataclass
class Lookout:
  """A thread that publishes its rank's `Place`, and reads the peers' places."""

  group: str
  domain: int  # the number of the domain in the group
  rank: int  # this rank of the domain
  processes: list[int]  # the process of each rank
  timeout_s: float  # seconds without progress until the watchdog prints
  # Takes the sentence about other ranks. Returns the fields of the `Place` of
  # this rank. Raises `NativeError` when the group is closed.
  look: Callable[[str], Iterable[Any]]

  def __post_init__(self) -> None:
    self._is_stopped = threading.Event()
    self._thread = threading.Thread(target=self._run, daemon=True)
    if math.isfinite(self.timeout_s):  # otherwise the watchdog never prints
      self._thread.start()

  def stop(self) -> None:
    """Stops the thread; waits 1 s at most, because the store may not answer."""
    self._is_stopped.set()
    if self._thread.is_alive():
      self._thread.join(timeout=1)

  def _run(self) -> None:
    places = f"ep/place/{self.group}/{self.domain}"
    others = ""
    first: dict[int, Place] = {}  # first `Place` of each rank in this wait
    while not self._is_stopped.wait(self.timeout_s / 16):
      try:
        place = Place(*self.look(others))
      except ffi.NativeError:
        return
      others = ""
      if place.still_s < self.timeout_s / 4:
        first = {}
        continue
      try:
        key = f"{places}/{self.rank}"
        client = compat.distributed_client()
        client.key_value_set(key, json.dumps(place), allow_overwrite=True)
        if place.num_left and place.still_s > self.timeout_s / 2:
          now = _read(places) | {self.rank: place}
          first = now | first
          answers = {
            rank: place
            for rank, place in now.items()
            if rank == self.rank or place != first[rank]
          }
          others = describe(answers, self.processes)
      except jax.errors.JaxRuntimeError as e:
        others = f"Of the other ranks nothing is known: {e}."


def _read(folder: str) -> dict[int, Place]:
  """Returns the last place that each rank has published."""
  found = compat.distributed_client().key_value_dir_get(folder)
  return {
    int(key.rpartition("/")[2]): Place(*json.loads(text)) for key, text in found
  }


def describe(answers: Mapping[int, Place], processes: list[int]) -> str:
  """Returns a sentence about the missing ranks, for which other ranks wait.

  `answers` has the `Place` of each rank that answers, and `processes` the
  process of each rank. Ranks with the same answers get the same sentence.
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
