# SPDX-License-Identifier: Apache-2.0
"""token_chunks: a rank's tokens go through the experts in parts, in turn.

Buffers then have room for a part, forward and backward: of each part only the
routing is kept, and the backward pass computes the rest again.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math

import jax
from jax import lax
import jax.numpy as jnp

from ep._src.base import compat
from ep._src.group.group import EpLayerConfig
from ep._src.moe.network import Experts
from ep._src.moe.placement import Placement
from ep._src.moe.round_trip import round_trip
from ep._src.ops.prepare import ep_prepare


@dataclasses.dataclass(frozen=True)
class Parts:
  """Splits arrays of tokens [*lead, n] into `num` parts of as many tokens.

  Part i has the i-th part of the tokens, in order. Tokens that choose no expert
  are added to the last one.
  """

  lead: tuple[int, ...]
  num: int

  def split(self, x: jax.Array, fill: int = 0) -> jax.Array:
    """Returns [num, tokens of a part, n] of x [*lead, n]."""
    x = x.reshape(-1, x.shape[-1])
    missing = -len(x) % self.num
    x = jnp.pad(x, ((0, missing), (0, 0)), constant_values=fill)
    return x.reshape(self.num, -1, x.shape[-1])

  def join(self, parts: jax.Array) -> jax.Array:
    """Returns the array of which `split` would have made these parts."""
    rows = parts.reshape(-1, parts.shape[-1])[: math.prod(self.lead)]
    return rows.reshape(*self.lead, -1)


def in_parts(
  layer: EpLayerConfig,
  experts: Experts,
  params: Mapping[str, jax.Array],
  tokens: jax.Array,
  topk_idx: jax.Array,
  topk_weights: jax.Array,
  num_parts: int,
  placement: Placement | None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  """Does what `through_experts` does, a part of the tokens at a time.

  Returns the output, and `total_recv_tokens` and `dropped_counts` of all parts,
  as `EpHandle` has them.
  """
  layer = dataclasses.replace(layer, tail="unspecified")
  parts = Parts(topk_idx.shape[:-1], num_parts)
  slots = topk_idx if placement is None else placement.slots_of(topk_idx)
  # No loop may have a collective of XLA's beside ops: XLA:CPU would not order
  # it (unordered_collectives.py). A layer that drops gathers what ranks want.
  _, handles = lax.scan(
    lambda _, routing: (None, ep_prepare(layer, *routing)),
    None,
    (parts.split(slots, fill=-1), parts.split(topk_weights)),
    unroll=layer.overflow == "drop",
  )
  # A cast to vary over more mesh axes is a sum over them in the backward pass,
  # which in the loop would be a collective for each part.
  params, handles, tokens, topk_weights = compat.vary_together(
    params, handles, tokens, topk_weights
  )

  @jax.checkpoint
  def of_part(params, handle, *arrays):
    return round_trip(handle, experts, params, *arrays)

  arrays = map(parts.split, (tokens, slots, topk_weights))
  out = lax.map(lambda args: of_part(params, *args), (handles, *arrays))
  rows, dropped = handles.total_recv_tokens, handles.dropped_counts
  received = rows.sum(0, dtype=jnp.int32), dropped.sum(0, dtype=jnp.int32)
  return parts.join(out), received
