# SPDX-License-Identifier: Apache-2.0
"""Cuts the slabs of a buffer into tiles of rows, for kernels on GPUs.

A tile is `height` consecutive rows of the buffer. The rows `begin` to `end` of
a tile belong to one slab:

    |---------------|---------------|---------------|---------------|
    |  slab 0                 |  slab 1     |  slab 2  |  unused ...
    |---------------|---------------|
                        |---------------|
    tile 0          tile 1  tile 2        tile 3

A kernel copies rows from a multiple of ALIGNMENT on, so a tile may begin with
rows of the slab before. The last tiles end with the buffer.

The table of tiles has a static length; only the device knows the number of used
entries.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ep._src.base.arrays import iota

ALIGNMENT = 8


class Slabs(NamedTuple):
  """The bounds of slabs, int32 [L]: rows `start + begin` to `start + end`.

  `start` is a multiple of ALIGNMENT, and `begin` is less than ALIGNMENT.
  """

  start: jax.Array
  begin: jax.Array
  end: jax.Array


class Tiles(NamedTuple):
  """A table of tiles of slabs, of which the first `num_used` tiles are used.

  `num_used` is int32 [1], the other arrays are int32 [N]. A tile has the rows
  `start + begin` to `start + end`, which belong to the slab `slab`.
  """

  num_used: jax.Array
  slab: jax.Array
  start: jax.Array
  begin: jax.Array
  end: jax.Array


def slabs(sizes: jax.Array, num_rows: int) -> Slabs:
  """Returns consecutive slabs of `sizes` rows, cut at the buffer's end."""
  sizes = jnp.maximum(sizes, 0)
  ends = jnp.clip(jnp.cumsum(sizes, dtype=jnp.int32), 0, num_rows)
  firsts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
  begins = firsts % ALIGNMENT
  return Slabs(firsts - begins, begins, ends - firsts + begins)


def tiles(sizes: jax.Array, num_rows: int, height: int) -> Tiles:
  """Returns tiles of `height` rows of a buffer of `num_rows >= height`.

  If both are multiples of ALIGNMENT, so are the starts of tiles.
  """
  of = slabs(sizes, num_rows)
  counts = jnp.where(of.end > of.begin, -(-of.end // height), 0)
  counts_up_to = jnp.cumsum(counts, dtype=jnp.int32)
  # The tiles of a slab also cover fewer than ALIGNMENT rows before the slab,
  # and fewer than `height` rows after the slab.
  excess = ALIGNMENT + height - 2
  tile = iota((num_rows + len(sizes) * excess) // height)
  slab = (counts_up_to[None] <= tile[:, None]).sum(1, dtype=jnp.int32)
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
