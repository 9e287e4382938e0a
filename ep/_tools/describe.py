# SPDX-License-Identifier: Apache-2.0
"""Shows the routing of a handle as a table."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

import jax
import numpy as np

from ep._src.base.layer import EpLayerConfig
from ep._src.ops.handle import check_handle, EpHandle

_MAX_EXPERT_LINES = 64  # with more experts, the table shows only ranks


@dataclasses.dataclass(frozen=True, eq=False)
class RoutingSummary:
  """The routing of a step on N ranks, made by `describe`. Prints as a table.

  All arrays are numpy's.

  Attributes:
    layer: the layer of the handle.
    ranks: int32 [N], the indices of these ranks among all R, in the order of
      the token axes; None for a handle of the local view, which does not store
      its rank.
    capacity: C, rows that a rank can receive.
    token_counts: int32 [N, L], tokens that each local expert receives.
    group_sizes: int32 [N, L], rows of each expert segment within the capacity,
      padding included.
    total_recv_tokens: int32 [N], rows wanted, with padding and dropped rows.
    dropped_counts: int32 [N, L], dropped tokens of each local expert.
  """

  layer: EpLayerConfig
  ranks: np.ndarray | None
  capacity: int
  token_counts: np.ndarray
  group_sizes: np.ndarray
  total_recv_tokens: np.ndarray
  dropped_counts: np.ndarray

  @property
  def slab_offsets(self) -> np.ndarray:
    """The first row of each expert segment, at most C: int32 [N, L]."""
    ends = self.group_sizes.cumsum(1, dtype=np.int32)
    starts: np.ndarray = ends - self.group_sizes
    return starts

  @property
  def experts(self) -> np.ndarray:
    """Expert ids of the ranks; of rank 0 if `ranks` is None: int32 [N, L].

    The numbers from E on are empty slots.
    """
    local = self.layer.group.num_local_experts
    ranks = np.zeros(1, np.int32) if self.ranks is None else self.ranks
    first = ranks % self.layer.group.ep_size * local
    return (first[:, None] + np.arange(local)).astype(np.int32)

  @property
  def dropped(self) -> np.ndarray:
    """Dropped tokens of each rank: int32 [N]."""
    dropped: np.ndarray = self.dropped_counts.sum(1, dtype=np.int32)
    return dropped

  def __repr__(self) -> str:
    layer = self.layer
    lines = [
      f'layer "{layer.name}": {layer.group.num_experts} experts,'
      f" {layer.group.num_local_experts} on each rank, top_k {layer.top_k},"
      f" capacity {self.capacity} rows, alignment {layer.alignment}"
    ]
    row = "{:>5} {:>7} {:>8} {:>8} {:>8} {:>8}".format
    lines.append(row(*"rank expert offset rows tokens dropped".split()))
    slabs = [self.experts, self.slab_offsets, self.group_sizes]
    counts = [self.token_counts, self.dropped_counts]
    experts = np.stack(slabs + counts, axis=2)
    for i, total in enumerate(self.total_recv_tokens):
      rank = "-" if self.ranks is None else self.ranks[i]
      tokens = self.token_counts[i].sum()
      lines.append(row(rank, "all", 0, total, tokens, self.dropped[i]))
      if self.group_sizes.size <= _MAX_EXPERT_LINES:
        lines += [row("", *numbers) for numbers in experts[i]]
    return "\n".join(lines)


def describe(handle: EpHandle) -> RoutingSummary:
  """Returns the expert segments, loads and drops of a step's routing.

      handle = jax.jit(functools.partial(ep.ep_prepare, layer))(topk_idx)
      plan = ep.describe(handle)
      print(plan)                             # a table
      assert plan.dropped.sum() == 0

  Waits for the handle and copies its counts to the host. Not collective. Inside
  a compiled program, each rank prints its own table with:

      jax.debug.callback(lambda h: print(ep.describe(h)), handle)

  Args:
    handle: a handle of one step, not traced. For the global view, the summary
      has the N <= R ranks whose devices belong to this process. For the local
      view, it has one rank.

  Returns:
    A `RoutingSummary`.

  Raises:
    TypeError: `handle` is not a handle, or is being traced.
    ValueError: the handle is a stack of several steps.
  """
  check_handle("describe", handle)
  layer = handle.layer
  what = f'describe(layer "{layer.name}")'
  counts = (
    handle.token_counts,
    handle.group_sizes,
    handle.total_recv_tokens,
    handle.dropped_counts,
  )
  if any(isinstance(x, jax.core.Tracer) for x in counts):
    raise TypeError(
      f"{what}: the handle is being traced and has no values yet; return it"
      " from the compiled program and describe it there, or print it from"
      " inside with jax.debug.callback(lambda h: print(ep.describe(h)),"
      " handle)."
    )
  ranks, local = layer.group.num_token_ranks, layer.group.num_local_experts
  shape = handle.group_sizes.shape
  rows: Sequence[np.ndarray]
  if shape == (local,):
    here = None
    rows = [np.asarray(x)[None] for x in counts]
  elif shape == (ranks, local):
    (here, *_), rows = zip(*map(_addressable_rows, counts), strict=True)
  else:
    raise ValueError(
      f"{what}: group_sizes has shape {shape}, but [L] = [{local}] of a rank or"
      f" [R, L] = [{ranks}, {local}] is expected; of stacked handles, take one:"
      " jax.tree.map(lambda x: x[i], handles)."
    )
  tokens, sizes, totals, dropped = rows
  counted = tokens, sizes, totals[:, 0], dropped
  return RoutingSummary(layer, here, handle.capacity, *counted)


def _addressable_rows(array: jax.Array) -> tuple[np.ndarray, np.ndarray]:
  """Returns the indices and values of the rows on devices of this process."""
  rows: dict[int, np.ndarray] = {}
  for shard in jax.numpy.asarray(array).addressable_shards:
    first = shard.index[0].start or 0
    rows.update(enumerate(np.asarray(shard.data), start=first))
  which = sorted(rows)
  return np.array(which, np.int32), np.stack([rows[i] for i in which])
