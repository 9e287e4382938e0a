# SPDX-License-Identifier: Apache-2.0
"""Cuts the slabs of a buffer into tiles of rows, for kernels on GPUs.

A tile is `height` consecutive rows of the buffer, of which those from `begin`
to `end` are of one slab:

    |---------------|---------------|---------------|---------------|
    |  slab 0                 |  slab 1     |  slab 2  |  unused ...
    |---------------|---------------|
                        |---------------|
    tile 0          tile 1  tile 2        tile 3

A kernel copies rows from a multiple of ALIGNMENT on, so a tile may begin with
rows of the slab before. The last tiles begin early enough to end with the
buffer.

Which slab a tile is of is looked up here, once, and not in each block of the
kernel. The table's length is static, and its used part is known to the device
alone.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ep._src.base.arrays import iota

ALIGNMENT = 8


class Slabs(NamedTuple):
  """Rows of slabs, int32 [L]: those from `start + begin` to `start + end`.

  `start` is a multiple of ALIGNMENT, and `begin` is less than that.
  """

  start: jax.Array
  begin: jax.Array
  end: jax.Array


class Tiles(NamedTuple):
  """Tiles of slabs, of which the first `num_used` are used.

  `num_used` is int32 [1], the others are int32 [N]. The rows of slab `slab` are
  those from `start + begin` to `start + end`.
  """

  num_used: jax.Array
  slab: jax.Array
  start: jax.Array
  begin: jax.Array
  end: jax.Array


def slabs(sizes: jax.Array, num_rows: int) -> Slabs:
  """Returns the slabs of `sizes`, one after another, in a buffer of `num_rows`.

  They are inside the buffer whatever the sizes are.
  """
  sizes = jnp.maximum(sizes, 0)
  ends = jnp.clip(jnp.cumsum(sizes, dtype=jnp.int32), 0, num_rows)
  firsts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
  begins = firsts % ALIGNMENT
  return Slabs(firsts - begins, begins, ends - firsts + begins)


def tiles(sizes: jax.Array, num_rows: int, height: int) -> Tiles:
  """Returns tiles of `height` rows of a buffer of at least that many rows.

  Tiles start at multiples of ALIGNMENT if both numbers are such.
  """
  of = slabs(sizes, num_rows)
  counts = jnp.where(of.end > of.begin, -(-of.end // height), 0)
  counts_up_to = jnp.cumsum(counts, dtype=jnp.int32)
  # The tiles of a slab have fewer than ALIGNMENT rows before it, and fewer than
  # `height` after it.
  excess = ALIGNMENT + height - 2
  tile = iota((num_rows + len(sizes) * excess) // height)
  slab = (counts_up_to <= tile[:, None]).sum(1, dtype=jnp.int32)
  slab = jnp.minimum(slab, len(sizes) - 1)
  skipped = height * (tile - (counts_up_to - counts)[slab])
  start = jnp.clip(of.start[slab] + skipped, 0, num_rows - height)
  origin = of.start[slab] - start
  return Tiles(
    counts_up_to[-1:],
    slab,
    start,
    origin + jnp.maximum(of.begin[slab], skipped),
    origin + jnp.minimum(of.end[slab], skipped + height),
  )
