# SPDX-License-Identifier: Apache-2.0
"""Each row of a segment is in one tile, and tiles are aligned for kernels."""

import jax
import numpy as np
import pytest

from ep._src.matmul import row_tiles

C, HEIGHT = 1000, 128

# Most cases have 7 segments, so that they share a program.
SIZES = {
  "one": [C],
  "none": [0] * 7,
  "most tiles": [1] * (C // 9),  # Few segments begin at a multiple of 8.
  "last row": [0, C - 1, 1, 0, 0, 0, 0],
  "too many": [600, 600, 3, 0, 0, 0, 0],
  "negative": [-70, 30, 0, 0, 0, 0, 0],
  **{
    str(seed): np.random.default_rng(seed).multinomial(C - seed, [1 / 7] * 7)
    for seed in range(4)
  },
}


@jax.jit
def _tiles(sizes):
  return row_tiles.tiles(sizes, C, HEIGHT)


@pytest.mark.parametrize("case", SIZES)
def test_tiles_cover_the_rows_of_slabs(case):
  sizes = np.int32(SIZES[case])
  count, *columns = map(np.asarray, _tiles(sizes))
  slab_of_row = np.full(C, -1)
  for i, (slab, start, begin, end) in enumerate(zip(*columns, strict=True)):
    assert 0 <= start <= C - HEIGHT
    assert start % row_tiles.ALIGNMENT == 0
    assert 0 <= slab < len(sizes)
    if i >= count[0]:
      assert begin >= end
      continue
    assert 0 <= begin < end <= HEIGHT
    rows = slice(start + begin, start + end)
    assert (slab_of_row[rows] == -1).all()
    slab_of_row[rows] = slab
  expected = np.repeat(np.arange(len(sizes)), sizes.clip(0))[:C]
  np.testing.assert_array_equal(slab_of_row[: len(expected)], expected)
  assert (slab_of_row[len(expected) :] == -1).all()
