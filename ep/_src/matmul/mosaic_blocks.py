# SPDX-License-Identifier: Apache-2.0
"""How large the blocks of the kernels of by_mosaic.py are."""

from __future__ import annotations

import dataclasses

_ROWS = (128, 64)
_COLUMNS = (192, 128, 64)


@dataclasses.dataclass(frozen=True)
class Blocks:
  """The sizes of what a thread block works on at once.

  Attributes:
    rows: of a block of the result, 64 or 128; on Blackwell 128.
    columns: of a block of the result, a multiple of 64.
    inner: columns, or for `outer` rows, whose products a step of the pipeline
      adds. It divides the number of columns.
    steps: of the pipeline that are in shared memory at once, 2 or more.
    panel: blocks that lie side by side and are computed before those below, so
      that what they share stays in the cache.
  """

  rows: int = 128
  columns: int = 192
  inner: int = 64
  steps: int = 4
  panel: int = 8


def blocks_for(op: str, height: int, width: int) -> Blocks:
  """Returns the blocks for results [height, width]."""
  columns = 128 if op == "outer" else 192
  return Blocks(
    next(n for n in _ROWS if n <= height),
    next(n for n in _COLUMNS if n <= min(width, columns)),
  )
