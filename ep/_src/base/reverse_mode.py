# SPDX-License-Identifier: Apache-2.0
"""Refuses forward mode in our words, where there is only reverse mode.

Reverse mode linearizes a function and then transposes what it got. So a linear
op may refuse to run and still have a transpose, which only reverse mode takes.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import jax

from ep._src.base import compat, primitive


def only(message: str, arrays: Any) -> Any:
  """Returns the arrays, whose tangents raise `TypeError` if they are computed.

  So no op that depends on them has forward mode.
  """
  return jax.tree.map(functools.partial(_same, message), arrays)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _same(message, x):
  del message
  return x


@_same.defjvp
def _same_jvp(message, primals, tangents):
  (tangent,) = _tangent_p.bind(*tangents, message=message)
  return *primals, tangent


def _refuse(*_: Any, message: str) -> NoReturn:
  raise TypeError(message)


# The identity of a tangent. It is linear, and has a transpose but no value.
_tangent_p = primitive.new("ep_tangent", lambda x, message: [x], _refuse)
_tangent_p.def_impl(_refuse)
compat.ad.deflinear2(_tangent_p, lambda cts, *_, message: cts)
primitive.batch_elementwise(_tangent_p)
