# SPDX-License-Identifier: Apache-2.0
"""Identity functions that change how JAX differentiates or saves an array."""

from __future__ import annotations

import functools
from typing import Any, NoReturn, TypeVar

import jax
from jax import lax

from ep._src.base import compat, primitive

_Tree = TypeVar("_Tree")


def keep_routing(x: _Tree) -> _Tree:
  """Returns x; makes `jax.checkpoint`, with any policy, save x.

  A router that ran again in the backward pass could choose other experts: XLA
  keeps some bfloat16 values in float32 where it fuses operations, and rounds
  them where it does not, so near ties of logits may change their order. With
  this function, the backward pass of a block has the routing that its forward
  pass chose. `ep.route_topk` and `ep_prepare` call it. A router of your own
  must call it before anything reads the experts:

      topk_idx = ep.keep_routing(my_router(x))

  Args:
    x: an array, or a pytree of arrays, without a gradient.

  Returns:
    x, with the same values.
  """
  kept: _Tree
  kept = jax.tree.map(lambda x: _keep_p.bind(lax.stop_gradient(x))[0], x)
  return kept


_keep_p = primitive.new("ep_keep", lambda x: [x], lambda ctx, x: [x])
_keep_p.def_impl(lambda x: [x])
primitive.batch_elementwise(_keep_p)
compat.run_once_in_remat(_keep_p)


def reverse_mode_only(message: str, arrays: Any) -> Any:
  """Returns the arrays; their forward-mode derivatives raise `TypeError`.

  Reverse mode linearizes a function and then transposes the linear function. So
  a linear op that can be transposed, but not run, fails only in forward mode.
  """
  return jax.tree.map(functools.partial(_same, message), arrays)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _same(message: str, x: jax.Array) -> jax.Array:
  del message
  return x


@_same.defjvp
def _same_jvp(message: str, primals: Any, tangents: Any) -> tuple[Any, Any]:
  (tangent,) = _tangent_p.bind(*tangents, message=message)
  return *primals, tangent


def _refuse(*_: Any, message: str) -> NoReturn:
  raise TypeError(message)


_tangent_p = primitive.new("ep_tangent", lambda x, message: [x], _refuse)
_tangent_p.def_impl(_refuse)
compat.ad.deflinear2(_tangent_p, lambda cts, *_, message: cts)
primitive.batch_elementwise(_tangent_p)
