# SPDX-License-Identifier: Apache-2.0
"""Sums over ranks in a fixed order.

`lax.psum` adds in an order that depends on its transport, and the order changes
the rounding. The sums here have the order

    ((x0 + x1) + (x2 + x3)) + ((x4 + x5) + (x6 + x7))

so the bits do not depend on the transport. If the sizes of the mesh axes are
powers of two, the bits do not depend on the mesh axes either: the sum over
("dp", "ep") is the sum over "dp" of the sums over "ep".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
from jax import lax
import jax.numpy as jnp

from ep._src.base import compat
from ep._src.lax import primitive

_Tree = TypeVar("_Tree")


def ordered_psum(x: _Tree, axis_name: str | Sequence[str]) -> _Tree:
  """Returns the sum of all ranks' arrays, with the same bits on each rank.

  The function gathers the arrays of all ranks, so it needs more memory and time
  than `lax.psum`. The two results differ only by rounding.

  Args:
    x: an array or a pytree of arrays.
    axis_name: axes of the enclosing `jax.shard_map`; without axes returns x.
  """
  if not axis_name:
    return x
  names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)

  def psum(x: jax.Array) -> Any:
    manual = jax.sharding.get_abstract_mesh().manual_axes
    is_manual = set(manual).issuperset(names)
    if is_manual and not compat.checks_vma():
      return _unchecked_psum_p.bind(x, axes=names)[0]
    (x,) = compat.vary_together(x, axes=names)
    return tree_sum(all_gather(x, names))

  total: _Tree = jax.tree.map(psum, x)
  return total


def all_gather(
  x: jax.Array, axis_name: str | Sequence[str], **options: Any
) -> jax.Array:
  """Returns `lax.all_gather`, with a result typed as equal on all ranks.

  The transpose slices a cotangent that is equal on all ranks. The transpose of
  a plain `lax.all_gather` would add the ranks' cotangents.
  """
  to = "invarying" if compat.checks_vma() else "varying"
  parts: jax.Array = lax.all_gather(x, axis_name, to=to, **options)
  return parts


def tree_sum(parts: jax.Array) -> jax.Array:
  """Returns the sum of parts [N, ...] over axis 0, added in a balanced tree."""
  while parts.shape[0] > 1:
    last = parts[parts.shape[0] // 2 * 2 :]
    parts = jnp.concatenate([parts[:-1:2] + parts[1::2], last])
  return parts[0]


def replicated(x: jax.Array, axis_name: Sequence[str]) -> jax.Array:
  """Returns x, which is equal on all ranks; its gradient is an ordered sum.

  The gradient is the `ordered_psum` of the ranks' gradients. In a `shard_map`
  with `check_vma=False` each rank gets only its gradient, and the caller adds.
  """
  if not compat.checks_vma() or not axis_name:
    return x
  outs: list[jax.Array] = _replicated_p.bind(x, axes=tuple(axis_name))
  return outs[0]


def _sum(x: jax.Array, *, axes: tuple[str, ...]) -> list[jax.Array]:
  return [tree_sum(lax.all_gather(x, axes))]


# The sum for `check_vma=False`. Its transpose is the same sum, as with psum.
# The transpose of `lax.all_gather` would be a reduce-scatter, whose transport
# decides the order of the sum. Gloo's reduce-scatter also slows later ops.
_unchecked_psum_p = primitive.new(
  "ep_ordered_psum",
  lambda x, *, axes: [x],
  compat.lower_local(_sum),
  static=["axes"],
)
compat.ad.deflinear2(
  _unchecked_psum_p,
  lambda cts, x, *, axes: _unchecked_psum_p.bind(
    *map(compat.instantiate_zeros, cts), axes=axes
  ),
)

# The identity, with a result that varies over `axes`. The transpose is an
# `ordered_psum`.
_replicated_p = primitive.new(
  "ep_replicated",
  lambda x, *, axes: [compat.varying_aval(x, axes)],
  lambda ctx, x, *, axes: [x],
  static=["axes"],
)
compat.ad.deflinear2(
  _replicated_p,
  lambda cts, x, *, axes: [
    ordered_psum(ct, axes) for ct in map(compat.instantiate_zeros, cts)
  ],
)
for _p in (_unchecked_psum_p, _replicated_p):
  primitive.batch_elementwise(_p)
