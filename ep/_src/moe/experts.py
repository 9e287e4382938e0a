# SPDX-License-Identifier: Apache-2.0
"""The way of tokens through their experts: one round trip, or several."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math

import jax

from ep._src.group.group import EpLayerConfig
from ep._src.moe import chunked
from ep._src.moe.network import Experts
from ep._src.moe.placement import Placement
from ep._src.moe.replicas import Replicas
from ep._src.moe.round_trip import round_trip
from ep._src.moe.shared import SharedExpert
from ep._src.ops.handle import EpHandle
from ep._src.ops.prepare import ep_prepare


def through_experts(
  layer: EpLayerConfig,
  experts: Experts,
  params: Mapping[str, jax.Array],
  tokens: jax.Array,
  topk_idx: jax.Array,
  topk_weights: jax.Array,
  *,
  placement: Placement | Replicas | None = None,
  shared: SharedExpert | None = None,
) -> tuple[jax.Array, EpHandle]:
  """Sends tokens to their experts and sums what comes back. Local view.

  `params` holds the rank's own experts: w_up, w_down, and w_gate, b_up, b_gate,
  b_down if there are any, in the order of the slots of `placement`, if there is
  one. The output of `shared` is added.
  """
  num_tokens = math.prod(topk_idx.shape[:-1])
  num_chunks = chunked.num_chunks(layer, experts, num_tokens)
  layer = dataclasses.replace(layer, tail="unspecified")
  if layer.overflow == "chunk":  # If the handle drops choices, chunks do not.
    layer = dataclasses.replace(layer, overflow="drop", drop_by="slot")
  slots = topk_idx if placement is None else placement.slots_of(topk_idx)
  handle = ep_prepare(layer, slots, topk_weights)
  args = handle, experts, params, tokens, slots, topk_weights
  if num_chunks == 1:
    return round_trip(*args, shared), handle
  out = chunked.round_trips(*args, num_chunks)
  return (out if shared is None else out + shared(tokens)), handle
