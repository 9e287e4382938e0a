# SPDX-License-Identifier: Apache-2.0
"""EpHandle: the routing of one step, as a pytree."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax

from ep._src.base import arguments
from ep._src.base.layer import EpLayerConfig


class Routing(NamedTuple):
  """The arrays of an `EpHandle`, as the functions of one rank pass them."""

  mem: jax.Array
  group_sizes: jax.Array
  token_counts: jax.Array
  total_recv_tokens: jax.Array
  dropped_counts: jax.Array
  max_recv_tokens: jax.Array
  kept: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EpHandle:
  """The routing that `ep_prepare` returns and the other ops need.

  A handle consists of plain arrays and static data, so it can cross `jit`
  boundaries, `scan`, `jax.checkpoint`, donation and serialisation. The shapes
  below are shapes in the local view. In the global view each array but `kept`
  has a leading axis of R ranks.

  An invalid routing does not terminate a program on GPUs, or a program of "xla"
  that was exported or is of a group with `errors="flag"`. The handle of an
  invalid routing has sizes and counts of 0, totals of -1, and no choice with a
  row. `ep.check` raises the error.

  Attributes:
    mem: uint8 [M], the routing in a form that the backend defines.
    group_sizes: int32 [L], rows of each local expert inside the capacity,
      including padding, as `lax.ragged_dot` takes them.
    token_counts: int32 [L], rows of each local expert that hold a token,
      without padding. TransformerEngine's `token_counts` includes padding: code
      written for it must use `group_sizes` to find the rows of an expert.
    total_recv_tokens: int32 [1], rows that this rank would receive with an
      unlimited capacity, including padding. Rows past the capacity are dropped.
    dropped_counts: int32 [L], dropped choices of each local expert. All tokens
      together chose an expert `token_counts + dropped_counts` times.
    max_recv_tokens: int32 [1], the largest `total_recv_tokens` in the EP
      domain. It is equal on all ranks, so all ranks can take the same branch.
    kept: bool [*token_shape, K], whether each choice has a row: False if it is
      unused (-1) or was dropped. In the global view it has the leading axes and
      the sharding of `topk_idx`.
    layer: static; the configuration given to `ep_prepare`.
    token_shape: static; leading dims of this rank's tokens, whose product is T.
  """

  mem: jax.Array
  group_sizes: jax.Array
  token_counts: jax.Array
  total_recv_tokens: jax.Array
  dropped_counts: jax.Array
  max_recv_tokens: jax.Array
  kept: jax.Array
  _: dataclasses.KW_ONLY
  layer: EpLayerConfig = dataclasses.field(metadata=dict(static=True))
  token_shape: tuple[int, ...] = dataclasses.field(metadata=dict(static=True))

  @property
  def capacity(self) -> int:
    """C: the most rows that a rank can receive; the length of `recv_tokens`."""
    return self.layer.capacity_for(math.prod(self.token_shape))


def check_handle(op: str, handle: Any) -> None:
  """Raises `TypeError` unless `handle` is an EpHandle."""
  cure = "pass what ep_prepare returned"
  arguments.check_type(op, "handle", handle, EpHandle, cure)
