# SPDX-License-Identifier: Apache-2.0
"""keep_routing: what `jax.checkpoint` never computes again.

A router that ran again in the backward pass could choose other experts. XLA
keeps some bfloat16 values in float32 where it fuses operations, and reads them
rounded where they are computed again, so the logits of near ties change order.
The gradients would then belong to a routing that never ran.
"""

from __future__ import annotations

from typing import TypeVar

import jax
from jax import lax

from ep._src.base import compat, primitive

_Tree = TypeVar("_Tree")


def keep_routing(x: _Tree) -> _Tree:
  """Returns x, which `jax.checkpoint` saves with any policy.

  The backward pass of a block then has the routing that its forward pass chose.
  `ep.route_topk` and `ep_prepare` keep their results by themselves. Experts
  that a router of your own chooses need it, before anything reads them:

      topk_idx = ep.keep_routing(my_router(x))

  Args:
    x: an array, or a pytree of arrays. It gets no gradient.

  Returns:
    x itself, in value.
  """

  def keep(x):
    return _keep_p.bind(lax.stop_gradient(x))[0]

  return jax.tree.map(keep, x)


_keep_p = primitive.new("ep_keep", lambda x: [x], lambda ctx, x: [x])
_keep_p.def_impl(lambda x: [x])
primitive.batch_elementwise(_keep_p)
compat.run_once_in_remat(_keep_p)
