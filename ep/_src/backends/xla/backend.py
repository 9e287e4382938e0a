# SPDX-License-Identifier: Apache-2.0
"""The backend "xla": `lax` collectives and gathers, on every platform of XLA.

Each op's primitive is lowered to a function of one rank's arrays. `ep_prepare`
gathers the number of tokens per rank and expert, and every rank computes its
plan from these counts (plans.py). Dispatch sends rows along the plan, and
combine sends rows back: by XLA's ragged all-to-all (ragged.py), or in buckets
(padded.py) in programs for CPUs, where XLA has no such collective.

An op raises the error of any rank on all ranks. If the program cannot call
Python, or must not (`ep_bootstrap(errors="flag")`), the op's results are NaN
instead, and the handle carries the fault of its routing.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any, NoReturn

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from ep._src.backends.xla import padded, plans, ragged
from ep._src.base import compat, errors
from ep._src.base.backend import Backend, Join
from ep._src.base.compat import fail_if, LoweringContext
from ep._src.base.errors import FAULT_WORDS
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

  def mem_bytes(self, sizes: Sizes) -> int:
    return plans.mem_bytes(sizes) + 4 * FAULT_WORDS

  def lower(
    self, op: str, ctx: LoweringContext, *operands: Any, sizes: Sizes
  ) -> Any:
    if not compat.can_call_python(ctx):
      sizes = dataclasses.replace(sizes, raises=False)
    fn = functools.partial(
      _run, op, sizes, compat.is_for_cpus(ctx), ctx.avals_out
    )
    scope = jax.named_scope(f"{op}[{sizes.name}]")
    return compat.lower_local(scope(fn))(ctx, *operands)


def _run(
  op: str,
  sizes: Sizes,
  on_cpus: bool,
  types: Sequence[Any],
  *operands: jax.Array,
) -> list[jax.Array]:
  """Returns the results of an op, which have `types`, on one rank."""
  if not sizes.T:
    return [jnp.zeros(x.shape, x.dtype) for x in types]
  if op == "ep_prepare":
    return _prepare(sizes, *operands)
  mem, *arrays = operands
  plan, is_sound = plans.unpack(sizes, mem[: -4 * FAULT_WORDS])
  # On other platforms, the check would make each op wait for the host.
  if on_cpus and sizes.raises:
    is_sound &= _check_plan(sizes, op, plan.routing, is_sound)
  way = padded if on_cpus or sizes.P == 1 else ragged
  to_slots = op in ("ep_dispatch", "ep_combine_bwd")
  send = way.to_slots if to_slots else way.to_choices
  outs: list[jax.Array] = send(sizes, plan, is_sound, *arrays)
  if op == "ep_combine":
    out = _sum(*outs)
    return [_check_finite(sizes, out) if sizes.checked else out]
  if op == "ep_dispatch_bwd":
    terms, weights = outs
    return [_sum(terms), weights.T]
  return outs


def _prepare(sizes: Sizes, idx: jax.Array) -> list[jax.Array]:
  choices = plans.sort_choices(sizes, idx)
  wrong, configs, start, digests = _share(
    sizes,
    errors.first_wrong_choice(idx, sizes.E),
    jnp.full(1, sizes.fingerprint % 2**31, jnp.int32),
    choices.start,
    plans.digest(idx.astype(jnp.int32).reshape(-1))[None],
  )
  plan, offset, tokens = plans.make_plan(sizes, choices, start, digests[:, 0])
  needed = offset[:, -1]
  fault = errors.fault_of(
    wrong,
    sizes.name,
    sizes.K,
    sizes.E,
    sizes.C,
    needed=needed if sizes.overflow == "error" else None,
    configs=configs[:, 0],
  )
  failed = fail_if(
    fault[0] > 0, errors.raise_fault, fault, can_raise=sizes.raises
  )
  mem = jnp.concatenate([plans.pack(sizes, plan) + failed, fault])
  needed = jnp.where(failed, -1, needed)
  me = lax.axis_index(sizes.group.axis_name)
  offset, tokens = offset[me].clip(max=sizes.C), tokens[me]
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


def _share(sizes: Sizes, *arrays: jax.Array) -> list[jax.Array]:
  """All-gathers vectors [n] to [P, n], all of them in one collective."""
  mine = jnp.concatenate(arrays)[None]
  if sizes.P > 1:
    mine = lax.all_gather(mine, sizes.group.axis_name, tiled=True)
  return jnp.split(mine, np.cumsum([a.size for a in arrays])[:-1], axis=1)


def _check_plan(
  sizes: Sizes, op: str, routing: jax.Array, is_sound: jax.Array
) -> jax.Array:
  """Returns True; fails unless all ranks have sound plans of one routing."""
  what = f'{op}(layer "{sizes.name}")'

  def fail(shared: np.ndarray) -> NoReturn:
    unsound, routing = shared.T
    if unsound.any():
      raise ValueError(
        f"{what}, rank {np.argmax(unsound)}: handle.mem is not the routing"
        " state that ep_prepare returned on this rank for this layer; pass that"
        " handle unchanged"
      )
    raise errors.disagreement(what, "the routing of the handle", routing)

  mine = jnp.concatenate([(~is_sound).astype(jnp.int32)[None], routing])
  (shared,) = _share(sizes, mine)
  failed = (shared[:, 0] > 0).any() | (shared[:, 1] != shared[0, 1]).any()
  return fail_if(failed, fail, shared, can_raise=True) == 0


def _check_finite(sizes: Sizes, out: jax.Array) -> jax.Array:
  """Returns `out` [T, H] of `ep_combine`; fails if an element is not finite."""
  wrong = ~jnp.isfinite(out).reshape(-1)
  first = jnp.int32([wrong.any(), jnp.argmax(wrong)])
  (all_first,) = _share(sizes, first)

  def fail(all_first: np.ndarray) -> NoReturn:
    rank = int(np.argmax(all_first[:, 0]))
    token, column = divmod(int(all_first[rank, 1]), out.shape[1])
    raise ValueError(
      f'ep_combine(layer "{sizes.name}"): out[{token}, {column}] of rank'
      f" {rank} is not finite"
    )

  failed = fail_if(
    (all_first[:, 0] > 0).any(), fail, all_first, can_raise=sizes.raises
  )
  checked: jax.Array = lax.optimization_barrier((out, failed))[0]
  return checked
