# SPDX-License-Identifier: Apache-2.0
"""Checks choices as the caller wrote them.

`ep_prepare` checks the ids that it gets. If a layer gives it slots of experts,
or a part of the tokens, then its errors name slots, or tokens of the part. And
a token that repeats an expert may get two copies of it, which are two slots.
"""

from __future__ import annotations

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from ep._src.base import arrays, compat, errors, primitive
from ep._src.base.fail_if import fail_if
from ep._src.base.kept import keep_routing
from ep._src.group.group import EpLayerConfig


def checked_choices(
  layer: EpLayerConfig, num_experts: int, ids: jax.Array
) -> jax.Array:
  """Returns choices int32 [..., K], or fails on all ranks as `ep_prepare` does.

  Collective over the EP domain, over whose axis `ids` varies. A program that
  cannot call Python returns ids that `ep_prepare` refuses.
  """
  if not ids.size:
    return ids
  (ids,) = _check_p.bind(
    ids,
    name=layer.name,
    axis_name=layer.group.axis_name,
    num_experts=num_experts,
  )
  return keep_routing(ids)


def _check(ids, *, name, axis_name, num_experts, can_raise):
  K = ids.shape[-1]

  def fail(faults):
    rank = int(np.argmax(faults[:, 0] < errors.NO_FAULT))
    what = f'ep_prepare(layer "{name}"), rank {rank}'
    fault, expert = faults[rank].tolist()
    raise errors.wrong_choice(what, fault, expert, K, num_experts)

  fault = _first_fault(ids.reshape(-1, K), num_experts)
  faults = lax.all_gather(fault, axis_name)
  failed = fail_if(
    (faults[:, 0] < errors.NO_FAULT).any(), fail, faults, can_raise=can_raise
  )
  return [jnp.where(failed > 0, -2, ids)]


def _first_fault(ids, num_experts):
  """Returns int32 [fault, id]; see `errors.wrong_choice`."""
  K = ids.shape[1]
  is_wrong = (ids < -1) | (ids >= num_experts)
  is_earlier = arrays.iota(K) < arrays.iota(K)[:, None]
  is_same = ids[:, :, None] == ids[:, None, :]
  repeats = (is_same & is_earlier).any(2) & (ids >= 0)
  fault = 2 * arrays.iota(ids.size).reshape(ids.shape)
  fault += jnp.where(is_wrong, 0, 1)
  fault = jnp.where(is_wrong | repeats, fault, errors.NO_FAULT).min()
  return jnp.stack([fault, ids.ravel().at[fault // 2].get(mode="clip")])


def _lower(ctx, ids, **params):
  check = functools.partial(
    _check, can_raise=compat.can_call_python(ctx), **params
  )
  return compat.lower_local(jax.named_scope("ep_check")(check))(ctx, ids)


_check_p = primitive.new("ep_check", lambda ids, **_: [ids], _lower)
