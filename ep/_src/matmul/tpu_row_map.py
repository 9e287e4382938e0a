# SPDX-License-Identifier: Apache-2.0
"""Applies a function to used rows: a Pallas kernel for TPUs.

The grid has one step for each block of used rows; the device reads their
number. A step has whole rows, so the function need not be elementwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from ep._src.base import compat

# The height of a block is a power of two between these bounds. 32 rows of any
# dtype are whole tiles of VMEM.
_HEIGHTS = 32, 512
# The most bytes for two buffers of each block. A TPU v5e has 16 MiB of VMEM,
# which also holds intermediate values.
_BUFFER_BYTES = 6 << 20


def map_rows(
  fn: Callable[..., Sequence[jax.Array]],
  num_used: jax.Array,
  arrays: Sequence[jax.Array],
  *,
  in_place: bool = False,
) -> list[jax.Array]:
  """Returns `fn(*arrays)`; rows after the last used block are unwritten.

  If `in_place`, results reuse the memory of the last arrays of their type. XLA
  copies such an array first if the program reads it later.
  """
  outs = jax.eval_shape(fn, *arrays)
  height = _height([*arrays, *outs])
  of_block = compat.jaxpr_as_fun(_of_block(fn, arrays, height))

  def kernel(*refs: Any) -> None:
    blocks = [
      ref[...].reshape(height, *x.shape[1:])
      for ref, x in zip(refs, arrays, strict=False)
    ]
    results = of_block(*blocks)
    for ref, x in zip(refs[len(arrays) :], results, strict=True):
      ref[...] = x.reshape(ref.shape)

  def spec(x: Any) -> Any:
    place = (0,) * (len(_matrix(x)) - 1)
    return pl.BlockSpec((height, *_matrix(x)[1:]), lambda i: (i, *place))

  mapped = pl.pallas_call(
    kernel,
    grid=(lax.div(num_used + (height - 1), jnp.int32(height)),),
    in_specs=[*map(spec, arrays)],
    out_specs=[*map(spec, outs)],
    out_shape=[jax.ShapeDtypeStruct(_matrix(x), x.dtype) for x in outs],
    input_output_aliases=_aliases(arrays, outs) if in_place else {},
    cost_estimate=pl.CostEstimate(
      flops=0,
      bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*arrays, *outs)),
      transcendentals=0,
    ),
  )(*(x.reshape(_matrix(x)) for x in arrays))
  return [x.reshape(out.shape) for x, out in zip(mapped, outs, strict=True)]


def _of_block(
  fn: Callable[..., Any], arrays: Sequence[jax.Array], height: int
) -> Any:
  """Returns the jaxpr of `fn` for blocks."""
  blocks = [
    jax.ShapeDtypeStruct((height, *x.shape[1:]), x.dtype) for x in arrays
  ]
  # A block is on no mesh, so its values need no `reshard`.
  no_mesh = jax.sharding.AbstractMesh((), ())
  with jax.enable_x64(False), jax.sharding.use_abstract_mesh(no_mesh):
    return jax.make_jaxpr(fn)(*blocks)


def _aliases(arrays: Sequence[Any], outs: Sequence[Any]) -> dict[int, int]:
  """Maps each array whose memory a result reuses to the result, by position."""
  aliases: dict[int, int] = {}
  for position, out in enumerate(outs):
    for i in reversed(range(len(arrays))):
      same = (arrays[i].shape, arrays[i].dtype) == (out.shape, out.dtype)
      if same and i not in aliases:
        aliases[i] = position
        break
  return aliases


def _matrix(x: Any) -> tuple[int, ...]:
  """Returns an array's shape in the kernel: a vector [C] becomes [C, 1]."""
  return (*x.shape, 1) if len(x.shape) == 1 else x.shape


def _height(arrays: Sequence[Any]) -> int:
  row_bytes = sum(max(128, *x.shape[1:], 1) * x.dtype.itemsize for x in arrays)
  least, most = _HEIGHTS
  height = most
  while height > least and 2 * height * row_bytes > _BUFFER_BYTES:
    height //= 2
  return height
