# SPDX-License-Identifier: Apache-2.0
"""The backend "xla": `lax` collectives and gathers, on every platform of XLA.

Each op's primitive is lowered to a function of one rank's arrays. `ep_prepare`
gathers the number of tokens per rank and expert, and every rank computes its
plan from these counts (xla/plans.py). Dispatch sends rows along the plan, and
combine sends rows back (xla/exchanges.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from ep._src.backends.xla import checks, exchanges, plans
from ep._src.backends.xla.plans import Dims, Plan
from ep._src.base import compat
from ep._src.base.backend import Backend, Connection, Join, OpParams
from ep._src.base.compat import LoweringContext
from ep._src.base.config import GroupConfig


class XlaBackend(Backend):
  """A backend for any mesh, without native code."""

  def connect(self, group: GroupConfig, join: Join) -> Connection:
    join(group, dict)  # checks that all processes agree
    return XlaConnection(group)


class XlaConnection(Connection):
  """A connection through XLA's collectives, without state."""

  def mem_bytes(self, params: OpParams) -> int:
    return plans.mem_bytes(Dims(params.layer, params.num_tokens))

  def lower(
    self, op: str, ctx: LoweringContext, *operands: Any, params: OpParams
  ) -> Any:
    dims = Dims(
      params.layer,
      params.num_tokens,
      drop=params.drop,
      can_raise=compat.can_call_python(ctx),
      tail=params.tail,
    )

    def fn(*operands: Any) -> Sequence[jax.Array]:
      if not dims.T:
        return [jnp.zeros(out.shape, out.dtype) for out in ctx.avals_out]
      if op != "ep_prepare":
        operands = *_open(dims, op, operands[0]), *operands[1:]
      outs = _OPS[op](dims, *operands)
      if op == "ep_combine" and params.checked:
        return [checks.check_finite(dims, *outs)]
      return outs

    scope = jax.named_scope(f"{op}[{params.layer.name}]")
    return compat.lower_local(scope(fn))(ctx, *operands)


def _prepare(dims: Dims, idx: jax.Array) -> list[jax.Array]:
  choices = plans.sort_choices(dims, idx)
  config = jnp.full(1, dims.layer.fingerprint % 2**31, jnp.int32)
  faults, configs, start, digests = exchanges.share(
    dims,
    checks.find_fault(dims, idx, choices),
    config,
    choices.start,
    plans.digest(plans.int32(idx).reshape(-1))[None],
  )
  slabs = plans.make_slabs(dims, start)
  needed = slabs.offset[:, -1]
  failed = checks.check_routing(dims, idx.dtype, faults, configs[:, 0], needed)
  plan = plans.make_plan(dims, choices, slabs, digests[:, 0])
  mem = plans.pack(dims, plan) + failed
  needed = jnp.where(failed, -1, needed)
  me = lax.axis_index(dims.axis)
  offset = slabs.offset[me].clip(max=dims.C)
  tokens = slabs.before[me, :, -1]
  token_counts = jnp.minimum(tokens, dims.C - offset[:-1])
  kept = (plan.place < idx.size).reshape(idx.shape)
  return [
    lax.bitcast_convert_type(mem, jnp.uint8).reshape(-1),
    jnp.where(failed, 0, jnp.diff(offset)),
    jnp.where(failed, 0, token_counts),
    needed[me][None],
    jnp.where(failed, 0, tokens - token_counts),
    needed.max()[None],
    jnp.where(failed, False, kept),
  ]


def _open(dims: Dims, op: str, mem: jax.Array) -> tuple[Plan, jax.Array]:
  """Unpacks the plan in `EpHandle.mem`; also returns whether it is valid."""
  plan, is_sound = plans.unpack(dims, mem)
  return plan, checks.check_plan(dims, op, plan.routing, is_sound)


def _combine(
  dims: Dims, plan: Plan, is_sound: jax.Array, *arrays: jax.Array
) -> list[jax.Array]:
  terms, *weights = exchanges.to_choices(dims, plan, is_sound, *arrays)
  return [_sum(terms, *weights)]


def _dispatch_bwd(
  dims: Dims, plan: Plan, is_sound: jax.Array, *arrays: jax.Array
) -> list[jax.Array]:
  terms, weights = exchanges.to_choices(dims, plan, is_sound, *arrays)
  return [_sum(terms), weights.T]


def _sum(rows: jax.Array, weights: jax.Array | None = None) -> jax.Array:
  """Returns the sums of rows [K, T, H] over the choices of each token."""

  def term(k: int) -> jax.Array:
    row = _flush(rows[k].astype(jnp.float32))
    if weights is None:
      return row
    # `_flush` keeps XLA from fusing the product with the sum below.
    return _flush(row * _flush(weights[k])[:, None])

  out = term(0)
  for k in range(1, len(rows)):
    out = _flush(out + term(k))
  return _flush(out, sign=0).astype(rows.dtype)


def _flush(x: jax.Array, sign: int = 1 << 31) -> jax.Array:
  """Returns float32 `x` with denormals replaced by zeros of the same sign.

  With `sign=0` denormals and zeros become +0. Uses integer operations, because
  XLA simplifies `0 + x` to `x`, and platforms flush different denormals.
  """
  bits = lax.bitcast_convert_type(x, jnp.uint32)
  is_small = bits & np.uint32(0x7F800000) == 0
  bits = jnp.where(is_small, bits & np.uint32(sign), bits)
  return lax.bitcast_convert_type(bits, jnp.float32)


_OPS: dict[str, Callable[..., list[jax.Array]]] = {
  "ep_prepare": _prepare,
  "ep_dispatch": exchanges.to_slots,
  "ep_combine": _combine,
  "ep_dispatch_bwd": _dispatch_bwd,
  "ep_combine_bwd": exchanges.to_slots,
}
