# SPDX-License-Identifier: Apache-2.0
"""Reads the arrays of a snapshot that many ranks have written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
import itertools
from typing import Any, NamedTuple
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from ep._tools.snapshots import memory


class Chunk(NamedTuple):
  """A box of an array, in a generation of a file."""

  name: str  # of the array
  dtype: str
  shape: Sequence[int]  # of the array
  begins: Sequence[int]  # of the box in the array
  extent: Sequence[int]  # of the box
  size: int  # in bytes
  checksum: int


Part = tuple[memory.Generation, memory.File, int]  # and the number of ranks
_Place = tuple[Chunk, memory.File, int]  # and the position in the file


class Source:
  """A snapshot of all ranks of an attempt, at one step."""

  def __init__(self, step: int, parts: Iterable[Part]):
    self.step = step
    boxes: dict[str, dict[tuple[int, ...], _Place]] = {}
    for generation, file, _ in parts:
      index = file.index(generation)
      for chunk, position in _chunks(generation, index):
        box = boxes.setdefault(chunk.name, {})
        # Several ranks have an array that is not of a mesh of all ranks.
        first, *_ = box.setdefault(tuple(chunk.begins), (chunk, file, position))
        if chunk != first:
          raise ValueError(
            f"ep.Snapshots: ranks had different numbers in {chunk.name}; make"
            " it an array on the mesh of all ranks, with a row for each rank."
          )
    self.chunks = {name: [*box.values()] for name, box in boxes.items()}

  def array(self, name: str, like: Any) -> jax.Array:
    """Returns an array with the shape, dtype and sharding of `like`."""
    chunks = self.chunks[name]
    first = chunks[0][0]
    is_same = like.dtype == jnp.dtype(first.dtype)
    is_same &= like.ndim == len(first.shape)
    sides = [*zip(like.shape, first.shape, strict=False)]
    if not is_same or sum(ours != theirs for ours, theirs in sides) > 1:
      raise ValueError(
        f"ep.Snapshots: {name} is {first.dtype}{[*first.shape]} in the"
        f" snapshot, but {like.dtype}{[*like.shape]} here; only one dimension"
        " may differ, by zeros."
      )

    def box(index: Any) -> Any:
      limits = [
        i.indices(n)[:2] for i, n in zip(index, like.shape, strict=True)
      ]
      out = np.zeros([end - begin for begin, end in limits], like.dtype)
      for chunk, file, position in chunks:
        bounds = [
          (max(begin, at), min(end, at + size), at, begin)
          for (begin, end), at, size in zip(
            limits, chunk.begins, chunk.extent, strict=True
          )
        ]
        if all(low < high for low, high, *_ in bounds):
          data = np.frombuffer(_read(chunk, file, position), like.dtype)
          theirs = tuple(slice(lo - at, hi - at) for lo, hi, at, _ in bounds)
          ours = tuple(slice(lo - at, hi - at) for lo, hi, _, at in bounds)
          out[ours] = data.reshape(chunk.extent)[theirs]
      return out

    for chunk, file, position in chunks:
      kept = [
        max(size - at, 0)
        for size, at in zip(like.shape, chunk.begins, strict=True)
      ]
      if any(n < size for n, size in zip(kept, chunk.extent, strict=True)):
        cut = np.frombuffer(_read(chunk, file, position), like.dtype)
        cut = cut.reshape(chunk.extent).copy()
        cut[tuple(map(slice, kept))] = 0
        if np.any(cut):
          raise ValueError(
            f"ep.Snapshots: {name} has the shape {[*like.shape]} here,"
            f" but the snapshot has {[*chunk.shape]}, and not only zeros beyond"
            " that shape."
          )
    return jax.make_array_from_callback(like.shape, like.sharding, box)


def _chunks(
  generation: memory.Generation, index: Any
) -> Iterator[tuple[Chunk, int]]:
  """Yields the chunks of a generation, and their positions in the file."""
  position = generation.begin + generation.index_size
  for chunk in itertools.starmap(Chunk, index["chunks"]):
    yield chunk, position
    position += chunk.size


def ranks_of(file: memory.File, generation: memory.Generation) -> int:
  """Returns the number of ranks of a snapshot; 0 if a part is damaged."""
  try:
    index = file.index(generation)
    for chunk, position in _chunks(generation, index):
      _read(chunk, file, position)
  except ValueError:
    return 0
  return int(index["ranks"])


def _read(chunk: Chunk, file: memory.File, position: int) -> bytearray:
  """Returns the bytes of a chunk; raises ValueError if they are damaged."""
  data = file.read(position, chunk.size)
  if zlib.crc32(data) != chunk.checksum:
    raise ValueError(f"ep.Snapshots: {chunk.name} is damaged")
  return data
