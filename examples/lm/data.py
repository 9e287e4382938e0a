# SPDX-License-Identifier: Apache-2.0
"""Batches of a text, each a function of its number alone.

So a run that resumes at step n reads what the unbroken run would have read, and
no position in the data has to be saved.
"""

import hashlib

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from text import VOCABULARY

RANKS = ("dp", "ep")  # the axes of a mesh; a batch is sharded over both


class Windows:
  """Random windows of a text.

  Args:
    text: bytes as int32 `[N]`.
    batch: B, windows of a batch.
    length: S, predictions of a window.
    seed: decides which windows are drawn.

  Raises:
    ValueError: the text is shorter than one window.
  """

  def __init__(self, text: np.ndarray, batch: int, length: int, seed: int):
    if text.size <= length:
      raise ValueError(
        f"the text has {text.size} bytes to train on, but a window takes"
        f" {length + 1}; name a longer text, or shorten the windows with"
        " --length."
      )
    self.tokens = batch * length  # predictions of a batch
    self._text = text
    self._batch = batch
    self._length = length
    self._seed = seed

  def __getitem__(self, number: int) -> np.ndarray:
    """Returns a batch, int32 `[B, S + 1]`; there is no last one."""
    rng = np.random.default_rng((self._seed, number))
    starts = rng.integers(self._text.size - self._length, size=self._batch)
    return self._text[starts[:, None] + np.arange(self._length + 1)]


def split(text: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the text to train on, and blocks of it that are held out.

  These are a block of every 20, or of all if there are fewer. A block has 4096
  bytes, or as few as a window of `length` predictions takes.
  """
  block = max(length + 1, min(4096, text.size // 20))
  numbers = np.arange(text.size) // block
  is_held_out = numbers % 20 == min(19, max(0, text.size // block - 1))
  return text[~is_held_out], text[is_held_out]


def place(batch: np.ndarray, mesh: Mesh) -> jax.Array:
  """Returns a batch that every process has as an array sharded over ranks."""
  return jax.make_array_from_process_local_data(
    NamedSharding(mesh, PartitionSpec(RANKS)), batch, batch.shape
  )


def unigram_entropy(text: np.ndarray) -> float:
  """Returns the loss, in nats, of the best guess that ignores what precedes."""
  counts = np.bincount(text, minlength=VOCABULARY)
  shares = counts[counts > 0] / text.size
  return float(-np.sum(shares * np.log(shares)))


def digest(text: np.ndarray) -> str:
  """Returns a name for the contents of a text."""
  return hashlib.sha256(text.astype(np.uint8).tobytes()).hexdigest()[:16]
