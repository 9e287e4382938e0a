# SPDX-License-Identifier: Apache-2.0
"""Places the copies of experts on ranks."""

from __future__ import annotations

import heapq

import numpy as np

from ep._src.base import arguments

NAMES = ("linear", "balanced")


def place(
  placement: str | np.ndarray, loads: np.ndarray, num_copies: int, ep_size: int
) -> np.ndarray:
  """Returns int [V], the expert of each copy; V / P copies are on each rank.

  Both names give the next copy to the expert whose copies have most load, as
  DeepSeek's EPLB does. Then "linear" keeps the order of the experts, and
  "balanced" gives the copy with most load to the rank that has least and room.

  Args:
    placement: one of NAMES, or the array itself.
    loads: [E].
    num_copies: V, at least E and a multiple of P.
    ep_size: P.

  Raises:
    ValueError: the array does not fit, or lacks an expert.
  """
  if not isinstance(placement, str):
    experts = np.asarray(placement)
    arguments.check(
      experts.shape == (num_copies,)
      and experts.dtype.kind in "iu"
      and np.array_equal(np.unique(experts), np.arange(loads.size)),
      "ep.plan",
      f"a placement has shape {experts.shape}, but it must be integers"
      f" [{num_copies}], the expert of each copy of each rank in turn, with all"
      f" of 0..{loads.size - 1}.",
    )
    return experts
  arguments.check(
    placement in NAMES,
    "ep.plan",
    f"placement {placement!r} is not known; name one of {', '.join(NAMES)}, or"
    " pass the expert of each copy.",
  )
  number = np.ones(loads.size, int)
  most = [(-load, e) for e, load in enumerate(loads.tolist())]
  heapq.heapify(most)
  for _ in range(num_copies - loads.size):
    _, e = most[0]
    number[e] += 1
    heapq.heapreplace(most, (-float(loads[e]) / number[e], e))
  experts = np.arange(loads.size).repeat(number)
  if placement == "linear":
    return experts
  share = (loads / number)[experts]
  room = num_copies // ep_size
  ranks: list[list[int]] = [[] for _ in range(ep_size)]
  least = [(0.0, rank) for rank in range(ep_size)]
  for copy in (-share).argsort(kind="stable"):
    load, rank = heapq.heappop(least)
    ranks[rank].append(experts[copy])
    if len(ranks[rank]) < room:
      heapq.heappush(least, (load + share[copy], rank))
  return np.array(ranks).ravel()
