# SPDX-License-Identifier: Apache-2.0
"""The backend "xla": `lax` collectives and gathers, on every platform of XLA.

Each op's primitive is lowered to a function of one rank's arrays. `ep_prepare`
gathers the number of tokens per rank and expert, and every rank computes its
plan from these counts (xla/plans.py). Dispatch sends rows along the plan, and
combine sends rows back (xla/exchanges.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
from jax import lax
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np

from ep._src.backends.xla import checks, exchanges, plans
from ep._src.base import compat, errors
from ep._src.base.backend import Backend, Join
from ep._src.base.compat import LoweringContext
from ep._src.base.errors import fail_if, FAULT_WORDS
from ep._src.base.group import Connection, EpGroup, Sizes


class XlaBackend(Backend):
  """A backend for any mesh, without native code."""

  def connect(self, group: EpGroup, join: Join) -> Connection:
    join(group, dict)  # checks that all processes agree
    return XlaConnection(group)


class XlaConnection(Connection):
  """A connection through XLA's collectives.

  `EpHandle.mem` holds a plan, then the fault of the routing.
  """

  flags = True

  def __init__(self, group: EpGroup):
    super().__init__(group)
    self._last: jax.Array | None = None

  def saw(self, carrier: Any) -> None:
    if self.group.errors == "flag" and not isinstance(carrier, Tracer):
      self._last = carrier

  def raise_failures(self) -> None:
    last, self._last = self._last, None
    if last is not None:
      errors.raise_carried(last)

  def mem_bytes(self, sizes: Sizes) -> int:
    return plans.mem_bytes(sizes) + 4 * FAULT_WORDS

  def _close(self) -> None:
    self._last = None

  _release = _close

  def lower(
    self, op: str, ctx: LoweringContext, *operands: Any, sizes: Sizes
  ) -> Any:
    if not compat.can_call_python(ctx):
      sizes = dataclasses.replace(sizes, raises=False)
    on_cpus = compat.is_for_cpus(ctx)

    def fn(*operands: Any) -> Sequence[jax.Array]:
      if not sizes.T:
        return [jnp.zeros(out.shape, out.dtype) for out in ctx.avals_out]
      if op == "ep_prepare":
        return _prepare(sizes, *operands)
      mem, *arrays = operands
      plan, is_sound = plans.unpack(sizes, mem[: -4 * FAULT_WORDS])
      is_sound = checks.check_plan(sizes, on_cpus, op, plan.routing, is_sound)
      outs = _MOVERS[op](sizes, on_cpus, plan, is_sound, *arrays)
      if op == "ep_combine" and sizes.checked:
        return [checks.check_finite(sizes, *outs)]
      return outs

    scope = jax.named_scope(f"{op}[{sizes.name}]")
    return compat.lower_local(scope(fn))(ctx, *operands)


def _prepare(sizes: Sizes, idx: jax.Array) -> list[jax.Array]:
  choices = plans.sort_choices(sizes, idx)
  wrong, configs, start, digests = exchanges.share(
    sizes,
    errors.first_wrong_choice(idx, sizes.E),
    jnp.full(1, sizes.fingerprint % 2**31, jnp.int32),
    choices.start,
    plans.digest(plans.int32(idx).reshape(-1))[None],
  )
  slabs = plans.make_slabs(sizes, start)
  needed = slabs.offset[:, -1]
  most = sizes.C if sizes.overflow == "error" else None
  label = sizes.name, sizes.K, sizes.E, sizes.C
  fault = errors.fault_of_routing(wrong, configs[:, 0], needed, most, *label)
  failed = fail_if(
    fault[0] > 0, errors.raise_fault, fault, can_raise=sizes.raises
  )
  plan = plans.make_plan(sizes, choices, slabs, digests[:, 0])
  mem = jnp.concatenate([plans.pack(sizes, plan) + failed, fault])
  needed = jnp.where(failed, -1, needed)
  me = lax.axis_index(sizes.group.axis_name)
  offset = slabs.offset[me].clip(max=sizes.C)
  tokens = slabs.before[me, :, -1]
  token_counts = jnp.minimum(tokens, sizes.C - offset[:-1])
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


def _combine(*args: Any) -> list[jax.Array]:
  terms, *weights = exchanges.to_choices(*args)
  return [_sum(terms, *weights)]


def _dispatch_bwd(*args: Any) -> list[jax.Array]:
  terms, weights = exchanges.to_choices(*args)
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


# The functions take the arguments of `exchanges.to_slots`.
_MOVERS: dict[str, Callable[..., list[jax.Array]]] = {
  "ep_dispatch": exchanges.to_slots,
  "ep_combine": _combine,
  "ep_dispatch_bwd": _dispatch_bwd,
  "ep_combine_bwd": exchanges.to_slots,
}
