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
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np

from ep._src.backends.xla import checks, exchanges, plans
from ep._src.backends.xla.plans import Dims, Plan
from ep._src.base import compat, errors
from ep._src.base.backend import Backend, Connection, Join, OpParams
from ep._src.base.compat import LoweringContext
from ep._src.base.config import GroupConfig
from ep._src.base.errors import fail_if, FAULT_WORDS


class XlaBackend(Backend):
  """A backend for any mesh, without native code."""

  def connect(self, group: GroupConfig, join: Join) -> Connection:
    join(group, dict)  # checks that all processes agree
    return XlaConnection(group)


class XlaConnection(Connection):
  """A connection through XLA's collectives.

  `EpHandle.mem` holds a plan, then the fault of the routing.
  """

  flags = True

  def __init__(self, group: GroupConfig):
    super().__init__(group)
    self._last: jax.Array | None = None

  def saw(self, carrier: Any) -> None:
    if self.group.errors == "flag" and not isinstance(carrier, Tracer):
      self._last = carrier

  def raise_failures(self) -> None:
    last, self._last = self._last, None
    if last is not None:
      errors.raise_carried(last)

  def mem_bytes(self, params: OpParams) -> int:
    dims = Dims(params.layer, params.num_tokens)
    return plans.mem_bytes(dims) + 4 * FAULT_WORDS

  def _close(self) -> None:
    self._last = None

  _release = _close

  def lower(
    self, op: str, ctx: LoweringContext, *operands: Any, params: OpParams
  ) -> Any:
    dims = Dims(
      params.layer,
      params.num_tokens,
      drop=params.drop,
      can_raise=params.raises and compat.can_call_python(ctx),
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
  layer = dims.layer
  wrong, configs, start, digests = exchanges.share(
    dims,
    errors.first_wrong_choice(idx, dims.E),
    jnp.full(1, layer.fingerprint % 2**31, jnp.int32),
    choices.start,
    plans.digest(plans.int32(idx).reshape(-1))[None],
  )
  slabs = plans.make_slabs(dims, start)
  needed = slabs.offset[:, -1]
  most = None if dims.drop else dims.C
  label = layer.name, dims.K, dims.E, dims.C
  fault = errors.fault_of_routing(wrong, configs[:, 0], needed, most, *label)
  failed = fail_if(
    fault[0] > 0, errors.raise_fault, fault, can_raise=dims.can_raise
  )
  plan = plans.make_plan(dims, choices, slabs, digests[:, 0])
  mem = jnp.concatenate([plans.pack(dims, plan) + failed, fault])
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
  plan, is_sound = plans.unpack(dims, mem[: -4 * FAULT_WORDS])
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
