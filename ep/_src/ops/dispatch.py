# SPDX-License-Identifier: Apache-2.0
"""ep_dispatch: sends every token to the ranks of its experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp

from ep._src.base import arrays, compat
from ep._src.base.compat import ad
from ep._src.base.group import Sizes
from ep._src.ops import fp8_transport, primitives, quantizers
from ep._src.ops.handle import EpHandle
from ep._src.ops.views import mapped, opened, RANK, TOKENS


@overload
def ep_dispatch(
  handle: EpHandle,
  tokens: jax.Array,
  topk_weights: jax.Array,
  *,
  scales: None = None,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def ep_dispatch(
  handle: EpHandle,
  tokens: jax.Array,
  topk_weights: jax.Array,
  *,
  scales: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]: ...
def ep_dispatch(
  handle: EpHandle,
  tokens: jax.Array,
  topk_weights: jax.Array,
  *,
  scales: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
  """Sends each token to the ranks that own its experts, grouped by expert.

  Collective over the EP domain. Received rows are laid out for a grouped
  matmul: `lax.ragged_dot(recv_tokens, w, handle.group_sizes)`.

  In pseudocode, where `slot(t, k)` is the row that `ep_prepare` assigned to the
  k-th choice of token t on the rank of its expert:

      # SEND, on each rank
      for t in range(T):
        for k in range(K):
          expert = topk_idx[t, k]
          if expert != -1 and slot(t, k) < C:
            rank = expert // L
            recv_tokens[rank][slot(t, k)] = tokens[t]
            recv_topk_weights[rank][slot(t, k)] = topk_weights[t, k]

      # RECEIVE, on each rank: rows that no rank sent
      recv_tokens[padding] = 0                 # and weights
      recv_tokens[sum(group_sizes):] = 0       # or unspecified; see `tail`

  For example, with two ranks, four experts (L = 2), two choices, alignment 2:

      # rank 0: topk_idx = [[0, 2],        rank 1: topk_idx = [[0, 1],
      #                     [0, 3]]                            [2, -1]]
      # rank 0: tokens   = [a, b]          rank 1: tokens   = [c, d]

      # rank 0 receives, in segments of experts 0 and 1:
      #   recv_tokens = [a, b, c, 0 | c, 0]    group_sizes = [4, 2]
      # rank 1 receives, in segments of experts 2 and 3:
      #   recv_tokens = [a, d | b, 0]          group_sizes = [2, 2]

  The cotangent of a token is the sum of the cotangents of its slots, in float32
  and ascending k. The cotangent of a weight is the cotangent of the weight in
  its slot. The derivative does not exchange the routing again.

  Fp8 and int8 rows are sent with their scales, and arrive bit for bit:

      rows, scales = ep.quant.quantize(tokens, "mxfp8")
      recv, recv_weights, recv_scales = ep.ep_dispatch(
        handle, rows, topk_weights, scales=scales
      )
      recv_tokens = ep.quant.dequantize(recv, recv_scales, tokens.dtype)

  Fp8 and int8 rows have no derivative, but their weights have one. If the layer
  has a `wire` format, the op quantizes and dequantizes float rows itself, with
  a straight-through gradient (see `EpLayerConfig`).

  Args:
    handle: from `ep_prepare`, for these tokens.
    tokens: float32, bfloat16 or float16 [..., H], no wider than the group's
      `max_token_dtype`, H <= `hidden_dim`; leading dims as in `topk_idx`. With
      scales: float8_e4m3fn, float8_e5m2, int8 or uint8.
    topk_weights: float [..., K]; converted to float32.
    scales: float32, bfloat16 or float8_e8m0fnu [..., S], the S scales of each
      fp8 or int8 row.

  Returns:
    recv_tokens: [C, H] of the tokens' dtype ([R, C, H] in the global view).
    recv_topk_weights: float32 [C] ([R, C]).
    recv_scales: [C, S] of the dtype of `scales` ([R, C, S]), only with scales.

  Raises:
    ValueError, TypeError: shape or dtype does not fit the handle or the group.
    ep.EpError: when the program runs, on every rank: a peer is
      gone, late, or runs another program.
  """
  view, sizes = opened("ep_dispatch", handle)
  op = view.op
  tokens = arrays.array(op, "tokens", tokens)
  topk_weights = arrays.array(op, "topk_weights", topk_weights)
  given = dict(tokens=tokens, topk_weights=topk_weights)
  if scales is not None:
    given["scales"] = scales = jnp.asarray(scales)
    quantizers.check_bytes(op, "tokens", tokens, scales)
  check_rows(op, "tokens", tokens, sizes, has_scales=scales is not None)
  for name, x in given.items():
    lead = view.lead(name, x.shape)
    if lead != handle.token_shape:
      raise ValueError(
        f"{op}: {name} has shape {x.shape}, i.e. leading dims {lead} on a rank,"
        f" but the handle was prepared for {handle.token_shape}; pass the"
        " tokens that its topk_idx routes."
      )
  if topk_weights.shape[-1] != sizes.K:
    raise ValueError(
      f"{op}: topk_weights has shape {topk_weights.shape}, but [..., top_k] ="
      f" [..., {sizes.K}] is expected."
    )
  if topk_weights.dtype != jnp.float32:
    arrays.check_kind(op, "topk_weights", topk_weights, jnp.floating)
  operands = handle.mem, handle.group_sizes, tokens, topk_weights, scales
  return tuple(dispatch.in_view(view, [sizes], *operands))


@mapped([RANK, RANK, TOKENS, TOKENS, TOKENS], RANK)
def dispatch(
  sizes: Sizes,
  mem: jax.Array,
  group_sizes: jax.Array,
  tokens: jax.Array,
  topk_weights: jax.Array,
  scales: jax.Array | None = None,
) -> list[jax.Array]:
  """Sends the tokens of one rank; the arguments as in `ep_dispatch`."""
  tokens = tokens.reshape(sizes.T, tokens.shape[-1])
  weights = topk_weights.astype(jnp.float32).reshape(sizes.T, sizes.K)
  if scales is None:
    operands = mem, group_sizes, tokens, weights
    return primitives.bind(dispatch_p, sizes, *operands)
  scales = scales.reshape(sizes.T, scales.shape[-1])
  operands = mem, group_sizes, fp8_transport.pack(tokens, scales), weights
  packed, weights = primitives.bind(dispatch_bytes_p, sizes, *operands)
  tokens, scales = fp8_transport.unpack(packed, tokens, scales)
  return [tokens, weights, scales]


def check_rows(
  op: str, name: str, rows: Any, sizes: Sizes, has_scales: bool = False
) -> None:
  """Raises unless the layer allows the dtype and size of `rows` [..., H].

  `quantizers.check_bytes` checks the dtype of rows with scales.
  """
  group = sizes.group
  if not has_scales:
    if rows.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
      raise TypeError(
        f"{op}: {name} is {rows.dtype}, but rows are float32, bfloat16 or"
        " float16; convert them. (Fp8 and int8 rows need scales=.)"
      )
    if rows.dtype.itemsize > group.max_token_dtype.itemsize:
      raise TypeError(
        f"{op}: {name} is {rows.dtype}, but the group's max_token_dtype is"
        f" {group.max_token_dtype}; convert the rows, or raise it"
        " with ep_resize."
      )
  if rows.ndim < 2 or not rows.shape[-1]:
    raise ValueError(
      f"{op}: {name} has shape {rows.shape}, but [..., H] is expected, with at"
      " least one axis of rows and at least one element in a row."
    )
  hidden, most = rows.shape[-1], group.hidden_dim
  if most is not None and hidden > most:
    raise ValueError(
      f"{op}: {name} has hidden size {hidden}, but it must be no more than the"
      f" group's hidden_dim = {most}; raise it with ep_resize."
    )
  if sizes.wire is not None and not has_scales:
    quantizers.check_width(op, hidden, sizes.wire)


# Dispatch copies: recv[slot(t, k)] = tokens[t], recv_w[slot(t, k)] = w[t, k].
# The transpose of dispatch is ep_dispatch_bwd:
#
#   grad_tokens[t] = sum_k grad_recv[slot(t, k)]
#   grad_w[t, k]   = grad_recv_w[slot(t, k)]
#
# The derivative ignores the rounding of rows to fp8.
dispatch_bytes_p = primitives.mover(
  "ep_dispatch_bytes", to_slots=True, with_weights=True, target="ep_dispatch"
)
dispatch_p = primitives.mover(
  "ep_dispatch", to_slots=True, with_weights=True, of_bytes=dispatch_bytes_p
)
dispatch_bwd_p = primitives.mover(
  "ep_dispatch_bwd", to_slots=False, with_weights=True
)
primitives.linear_op(dispatch_p, transposed=dispatch_bwd_p)
primitives.linear_op(dispatch_bwd_p, transposed=dispatch_p)
primitives.linear_op(dispatch_bytes_p, transposed=dispatch_bwd_p)


# Dispatch of packed fp8 rows is linear only in the weights. Backends send no
# weights without rows, so weight tangents are sent with dummy rows of size 1.
def _dispatch_bytes_jvp(
  primals: Sequence[jax.Array], tangents: Sequence[Any], *, sizes: Sizes
) -> tuple[list[Any], list[Any]]:
  mem, group_sizes, *_ = primals
  recv, recv_weights = dispatch_bytes_p.bind(*primals, sizes=sizes)
  rows = jnp.zeros((sizes.T, 1), jnp.float32)
  tangent = compat.instantiate_zeros(tangents[3])
  operands = mem, group_sizes, rows, tangent
  _, tangent = primitives.bind(dispatch_bytes_p, sizes, *operands)
  no_tangent = ad.Zero(jax.typeof(recv).to_tangent_aval())
  return [recv, recv_weights], [no_tangent, tangent]


ad.primitive_jvps[dispatch_bytes_p] = _dispatch_bytes_jvp
