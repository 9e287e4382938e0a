# SPDX-License-Identifier: Apache-2.0
"""ep_combine: returns expert outputs to their tokens and sums them."""

from __future__ import annotations

from collections.abc import Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ep._src.base import arrays, compat
from ep._src.base.compat import ad
from ep._src.base.group import Sizes
from ep._src.ops import primitives
from ep._src.ops.dispatch import check_rows
from ep._src.ops.handle import EpHandle
from ep._src.ops.row_map import map_used_rows, weighted
from ep._src.ops.views import mapped, opened, RANK, TOKENS


def ep_combine(
  handle: EpHandle,
  expert_out: jax.Array,
  weights: jax.Array | None = None,
) -> jax.Array:
  """Sums, for each token, the output rows of its experts.

  Collective over the EP domain; sends rows back along the routing of
  `ep_dispatch`. With the `slot(t, k)` of `ep_dispatch`:

      # RECEIVE, on each rank
      for t in range(T):
        sum = 0.0                                            # float32
        for k in range(K):                                   # ascending
          expert = topk_idx[t, k]
          if expert != -1 and slot(t, k) < C:
            row = expert_out[expert // L][slot(t, k)]        # as float32
            sum += row                                       # or
            sum += weights[expert // L][slot(t, k)] * row    # with weights
        out[t] = sum                                         # rounded once

  So the result does not depend on the number of ranks. Rows without a choice,
  such as padding, are never read.

  The derivative sends `grad_out[t]` to the slots of token t, times their
  weights if given.

  Args:
    handle: from `ep_prepare`.
    expert_out: float32, bfloat16 or float16 [C, H] ([R, C, H] in the global
      view), in the layout of `ep_dispatch`.
    weights: optional float [C] ([R, C]), usually the `recv_topk_weights` of
      `ep_dispatch`, by which each row is multiplied in float32. (With
      backend="nccl" the products are rounded to the dtype of the rows.)

  Returns:
    [..., H] of the dtype of `expert_out`, leading dims as in `topk_idx`.

  Raises:
    ValueError, TypeError: shape or dtype does not fit the handle or the group.
    ep.EpError: when the program runs, on every rank: a peer is
      gone, late, or runs another program.
  """
  view, sizes = opened("ep_combine", handle)
  op, lead = view.op, (*view.ranks, sizes.C)
  expert_out = arrays.array(op, "expert_out", expert_out)
  check_rows(op, "expert_out", expert_out, sizes)
  if expert_out.shape[:-1] != lead:
    raise ValueError(
      f"{op}: expert_out has shape {expert_out.shape}, but"
      f" {[*lead, 'H']} is expected, a row for each slot of ep_dispatch."
    )
  if weights is not None:
    weights = jnp.asarray(weights)
    if weights.shape != lead or not jnp.issubdtype(weights.dtype, jnp.floating):
      raise ValueError(
        f"{op}: weights is {weights.dtype}{list(weights.shape)}, but floating"
        f" point {list(lead)} is expected: the recv_topk_weights of"
        " ep_dispatch, one for each slot."
      )
  static = sizes, handle.token_shape
  operands = handle.mem, handle.group_sizes, expert_out, weights
  out: jax.Array = combine.in_view(view, static, *operands)
  return out


@mapped([RANK, RANK, RANK, RANK], TOKENS)
def combine(
  sizes: Sizes,
  token_shape: tuple[int, ...],
  mem: jax.Array,
  group_sizes: jax.Array,
  expert_out: jax.Array,
  weights: jax.Array | None = None,
) -> jax.Array:
  """Sums the output rows of one rank; the arguments as in `ep_combine`."""
  operands = mem, group_sizes, expert_out
  if weights is not None:
    weights = weights.astype(jnp.float32)
    (out,) = primitives.bind(weighted_combine_p, sizes, *operands, weights)
  else:
    (out,) = primitives.bind(combine_p, sizes, *operands)
  return out.reshape(*token_shape, out.shape[-1])


# The transpose of combine copies rows as dispatch does:
# grad_slots[slot(t, k)] = grad_out[t].
_combine_bwd_bytes_p = primitives.mover(
  "ep_combine_bwd_bytes", to_slots=True, target="ep_combine_bwd"
)
combine_p = primitives.mover("ep_combine", to_slots=False)
combine_bwd_p = primitives.mover(
  "ep_combine_bwd", to_slots=True, of_bytes=_combine_bwd_bytes_p
)
primitives.linear_op(combine_p, transposed=combine_bwd_p)
primitives.linear_op(combine_bwd_p, transposed=combine_p)

# Weighted combine, out[t] = sum_k w[slot] x[slot], is bilinear in x and w. The
# tangent
#
#   T(x, w; dx, dw) = combine(dx, w) + combine(x, dw)
#
# is one linear op of (dx, dw), so its transpose needs only one exchange. This
# exchange copies a cotangent g to the slots, G[slot(t, k)] = g[t], and then
#
#   grad_x[slot] = w[slot] G[slot]        grad_w[slot] = <x[slot], G[slot]>
#
# T is also linear in (x, w), and symmetric: T(x, w; dx, dw) = T(dx, dw; x, w).
# `group_sizes` is an operand so that gradients skip unused slots.
_weighted_p = primitives.mover(
  "ep_weighted_combine", to_slots=False, target="ep_combine"
)


def _weighted(
  mem: jax.Array,
  group_sizes: jax.Array,
  x: jax.Array,
  w: jax.Array,
  *,
  sizes: Sizes,
) -> Any:
  if sizes.connection.weighs:
    return _weighted_p.bind(mem, group_sizes, x, w, sizes=sizes)
  rows = map_used_rows(weighted, group_sizes, x, w)
  return combine_p.bind(mem, group_sizes, rows, sizes=sizes)


_combine_types = primitives.row_types(to_slots=False)
weighted_combine_p = primitives.composite(
  "ep_weighted_combine_used", _weighted, _combine_types
)


def _tangent(
  mem: jax.Array,
  group_sizes: jax.Array,
  x: jax.Array,
  w: jax.Array,
  dx: jax.Array,
  dw: jax.Array,
  *,
  sizes: Sizes,
) -> list[jax.Array]:
  combine = functools.partial(_weighted, mem, group_sizes, sizes=sizes)
  return [a + b for a, b in zip(combine(dx, w), combine(x, dw), strict=True)]


weighted_tangent_p = primitives.composite(
  "ep_weighted_combine_tangent", _tangent, _combine_types
)


def _weighted_jvp(
  primals: Sequence[jax.Array], tangents: Sequence[Any], *, sizes: Sizes
) -> tuple[list[jax.Array], list[jax.Array]]:
  tangents = [*map(compat.instantiate_zeros, tangents[2:])]
  return (
    weighted_combine_p.bind(*primals, sizes=sizes),
    weighted_tangent_p.bind(*primals, *tangents, sizes=sizes),
  )


def _tangent_jvp(
  primals: Sequence[jax.Array], tangents: Sequence[Any], *, sizes: Sizes
) -> tuple[list[jax.Array], list[jax.Array]]:
  *slots, x, w, dx, dw = primals
  tx, tw, tdx, tdw = map(compat.instantiate_zeros, tangents[2:])
  tangent = functools.partial(weighted_tangent_p.bind, *slots, sizes=sizes)
  terms = zip(tangent(x, w, tdx, tdw), tangent(dx, dw, tx, tw), strict=True)
  return tangent(x, w, dx, dw), [a + b for a, b in terms]


def _tangent_transpose(
  cts: Sequence[Any],
  mem: Any,
  group_sizes: Any,
  x: Any,
  w: Any,
  *_: Any,
  sizes: Sizes,
) -> list[Any]:
  cts = [*map(compat.instantiate_zeros, cts)]
  (g,) = primitives.bind(combine_bwd_p, sizes, mem, group_sizes, *cts)
  grads = map_used_rows(_gradients, group_sizes, x, w, g, tail=sizes.tail)
  return [None, None, None, None, *grads]


def _gradients(
  x: jax.Array, w: jax.Array, g: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the gradients of a block of rows x [B, H] and weights w [B]."""
  g32 = g.astype(jnp.float32)
  return weighted(g, w), jnp.sum(x.astype(jnp.float32) * g32, axis=1)


ad.primitive_jvps[weighted_combine_p] = _weighted_jvp
ad.primitive_jvps[weighted_tangent_p] = _tangent_jvp
ad.primitive_transposes[weighted_tangent_p] = _tangent_transpose
