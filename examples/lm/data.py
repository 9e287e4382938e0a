# SPDX-License-Identifier: Apache-2.0
"""Draws each batch of a text from only the seed and the batch's number.

So a resumed run reads the same batches as an uninterrupted run, and a
checkpoint needs no position in the data.
"""

import hashlib
import pathlib
from typing import NamedTuple

import numpy as np

from lm.model import Config
import text

_LIMIT = 8_000_000  # bytes to read at most


class Data(NamedTuple):
  """A text as int32 bytes, split into training and held-out bytes."""

  train: np.ndarray
  held_out: np.ndarray
  unigram: float  # loss, in nats, of the best prediction without context
  digest: str  # a hash of the text


def read(path: pathlib.Path, length: int) -> Data:
  """Reads a text from a file or a folder, and splits it.

  Raises:
    ValueError: the text is missing, or shorter than a window of `length`.
  """
  whole = text.read(path, _LIMIT)
  train, held_out = split(whole, length)
  if train.size <= length:
    raise ValueError(
      f"{path}: the text has {train.size} bytes to train on, but a window"
      f" takes {length + 1}; name a longer text, or shorten the windows with"
      " --length."
    )
  counts = np.bincount(whole)
  shares = counts[counts > 0] / whole.size
  digest = hashlib.sha256(whole.astype(np.uint8)).hexdigest()[:16]
  return Data(train, held_out, -np.sum(shares * np.log(shares)), digest)


def split(whole: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the training bytes, and held-out blocks of the text.

  Every 20th block is held out; of fewer than 20 blocks, the last full block. A
  block has 4096 bytes or a 20th of the text, whichever is smaller, but at least
  the `length + 1` bytes of a window.
  """
  block = max(length + 1, min(4096, whole.size // 20))
  numbers = np.arange(whole.size) // block
  is_held_out = numbers % 20 == min(19, max(0, whole.size // block - 1))
  return whole[~is_held_out], whole[is_held_out]


def batch(part: np.ndarray, number: int, config: Config) -> np.ndarray:
  """Returns random windows of a text, int32 `[B, S + 1]`."""
  rng = np.random.default_rng((config.seed, number))
  starts = rng.integers(part.size - config.length, size=config.batch)
  return part[starts[:, None] + np.arange(config.length + 1)]
