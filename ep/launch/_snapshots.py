# SPDX-License-Identifier: Apache-2.0
"""Copies the state of a training run into memory that outlives its ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import itertools
import json
import threading
import time
from typing import Any, NamedTuple
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from ep._src.base import compat
from ep.launch import _memory as memory

_POLL_S = 0.02
_AGREE_S = 120.0  # limit for the other ranks to check the snapshots
_DONE, _GOOD = "ep/snapshot/done", "ep/snapshot/good"  # keys of the job's store


class Snapshots:
  """Snapshots of a state, from which a job goes on after a rank has died.

      snapshots = ep.launch.Snapshots()
      found = snapshots.restore(state)  # the first state of a run
      done, state = found or (0, state)
      for step in range(done + 1, last + 1):
        state = train(state)
        if step % 10 == 0:
          snapshots.take(step, state)

  The memory is the launcher's: `ep.launch` with `max_restarts` on Linux, one
  host. Without such a launcher, nothing is kept, and `restore` returns None.
  Snapshots take twice the memory of the state, and vanish with the launcher, so
  a run also needs checkpoints on disk.

  All ranks call `take` and `restore` with the same steps and trees.
  """

  def __init__(self) -> None:
    self._client = compat.distributed_client()
    self._rank, self._ranks = compat.distributed_process(), 1
    if self._client:
      self._ranks = jax.process_count()
    self._own: memory.File | None = None
    self._old: list[list[memory.File]] = []
    if files := memory.inherited():
      self._own, self._old = files
    self._thread: threading.Thread | None = None
    self._error: Exception | None = None
    self._last: int | None = None  # step of the last snapshot

  def take(self, step: int, state: Any) -> None:
    """Copies a state, and returns before the copy is complete.

    The devices copy the arrays first, so that a program may then donate them;
    a thread copies them on. If the snapshot before is not complete, this call
    waits for it.

    Args:
      step: a number that grows from call to call.
      state: a tree of arrays of this process's mesh.

    Raises:
      TypeError: a leaf is not an array, or is a typed key.
      OSError: there is not enough memory, for this or the last snapshot.
    """
    if not self._own:
      return
    self.wait()
    names = [name for name, _ in _leaves(state)]
    copies = _copy(jax.tree.leaves(state))
    self._thread = threading.Thread(
      target=self._write, args=(self._own, step, names, copies), daemon=True
    )
    self._thread.start()

  def wait(self) -> None:
    """Waits for the last snapshot; raises its error, if any."""
    if self._thread:
      self._thread.join()
      self._thread = None
    if self._error:
      error, self._error = self._error, None
      raise error

  def restore(self, like: Any) -> tuple[int, Any] | None:
    """Returns the newest snapshot that all ranks completed, and its step.

    Collective over all ranks. The ranks may be fewer or more than those that
    took the snapshot, and may divide arrays otherwise.

    Args:
      like: arrays, or `jax.ShapeDtypeStruct`s with shardings, with the tree,
        shapes and dtypes of the state. The first dimension may be longer or
        shorter than in the snapshot, by rows of zeros: the empty places of
        experts, whose number depends on the ranks.

    Raises:
      ValueError: the snapshot has another tree, shape or dtype.
    """
    source = self._newest()
    if source is None:
      return None
    named = dict(_leaves(like))
    if differing := sorted(named.keys() ^ source.chunks.keys()):
      where = "tree" if differing[0] in named else "snapshot"
      raise ValueError(
        "ep.launch.Snapshots: the snapshot is of another tree: only the"
        f" {where} has {differing[0]}; restore the tree that was taken."
      )
    arrays = [source.array(name, leaf) for name, leaf in named.items()]
    return source.step, jax.tree.unflatten(jax.tree.structure(like), arrays)

  def _newest(self) -> _Source | None:
    """Returns the newest complete snapshot whose checksums hold."""
    sources = [
      _Source(files, step)
      for files in reversed(self._old)
      for step in sorted(memory.common_steps(files), reverse=True)
    ]
    good = {
      at
      for at, each in enumerate(sources)
      if each.holds(self._rank, self._ranks)
    }
    if self._client:  # each rank has checked a part
      key = f"{_GOOD}/{self._rank}"
      self._client.key_value_set(key, json.dumps(sorted(good)))
      for rank in range(self._ranks):
        text = self._client.blocking_key_value_get(
          f"{_GOOD}/{rank}", int(1000 * _AGREE_S)
        )
        good &= set(json.loads(text))
    return sources[min(good)] if good else None

  def _write(
    self, file: memory.File, step: int, names: list[str], copies: list[Any]
  ) -> None:
    try:
      self._wait_for_all(self._last)
      chunks, arrays = [], []
      for name, leaf in zip(names, copies, strict=True):
        for shard in leaf.addressable_shards:
          if shard.replica_id:
            continue  # another device has the same numbers
          data: Any = np.asarray(shard.data, order="C")
          arrays.append(memoryview(data.reshape(-1).view(np.uint8)))
          box = zip(shard.index, leaf.shape, strict=True)
          begins = [index.indices(size)[0] for index, size in box]
          chunks.append(
            _Chunk(
              name,
              leaf.dtype.name,
              leaf.shape,
              begins,
              data.shape,
              arrays[-1].nbytes,
              zlib.crc32(arrays[-1]),
            )
          )
      index = {"rank": self._rank, "ranks": self._ranks, "chunks": chunks}
      file.write(step, index, arrays)
      self._last = step
      if self._client:
        key = f"{_DONE}/{self._rank}"
        self._client.key_value_set(key, str(step), allow_overwrite=True)
    except Exception as error:
      self._error = error

  def _wait_for_all(self, step: int | None) -> None:
    """Waits until all ranks have completed the snapshot of a step."""
    while self._client and step is not None:
      done = self._client.key_value_dir_get(_DONE)
      if sum(int(text) >= step for _, text in done) == self._ranks:
        return
      time.sleep(_POLL_S)


class _Chunk(NamedTuple):
  """A box of an array, in a generation of a file."""

  name: str  # of the array
  dtype: str
  shape: Sequence[int]  # of the array
  begins: Sequence[int]  # of the box in the array
  extent: Sequence[int]  # of the box
  size: int  # in bytes
  checksum: int


class _Source:
  """The files of all ranks of an attempt, at one step."""

  def __init__(self, files: Sequence[memory.File], step: int):
    self.step = step
    self.chunks: dict[str, list[tuple[_Chunk, memory.File, int]]] = {}
    self._is_complete = False
    ranks = {*range(len(files))}
    try:
      for file in files:
        (generation,) = (g for g in file.generations() if g.step == step)
        index = file.index(generation)
        ranks -= {index["rank"]} if index["ranks"] == len(files) else set()
        position = generation.begin + generation.index_size
        for chunk in itertools.starmap(_Chunk, index["chunks"]):
          self.chunks.setdefault(chunk.name, []).append((chunk, file, position))
          position += chunk.size
      self._is_complete = not ranks
    except ValueError:
      pass  # a damaged index

  def holds(self, rank: int, ranks: int) -> bool:
    """Checks the part of a rank of the checksums."""
    chunks = itertools.chain(*self.chunks.values())
    return self._is_complete and all(
      zlib.crc32(file.read(position, chunk.size)) == chunk.checksum
      for chunk, file, position in itertools.islice(chunks, rank, None, ranks)
    )

  def array(self, name: str, like: Any) -> jax.Array:
    """Returns an array with the shape, dtype and sharding of `like`."""
    chunks = self.chunks[name]
    first = chunks[0][0]
    same = like.shape[1:] == (*first.shape[1:],) and like.ndim == len(
      first.shape
    )
    if not same or like.dtype != jnp.dtype(first.dtype):
      raise ValueError(
        f"ep.launch.Snapshots: {name} is {first.dtype}{[*first.shape]} in the"
        f" snapshot, but {like.dtype}{[*like.shape]} here; only the first"
        " dimension may differ."
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
          data = np.frombuffer(file.read(position, chunk.size), like.dtype)
          theirs = tuple(slice(lo - at, hi - at) for lo, hi, at, _ in bounds)
          ours = tuple(slice(lo - at, hi - at) for lo, hi, _, at in bounds)
          out[ours] = data.reshape(chunk.extent)[theirs]
      return out

    for chunk, file, position in chunks:
      cut = like.shape[0] - chunk.begins[0] if like.ndim else 1
      if like.ndim and cut < chunk.extent[0]:
        data = np.frombuffer(file.read(position, chunk.size), like.dtype)
        if np.any(data.reshape(chunk.extent)[max(cut, 0) :]):
          raise ValueError(
            f"ep.launch.Snapshots: {name} has {like.shape[0]} rows here, but"
            " in the snapshot a row after these is not zero."
          )
    return jax.make_array_from_callback(like.shape, like.sharding, box)


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    name = jax.tree_util.keystr(path)
    is_array = isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))
    if not is_array or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      raise TypeError(
        f"ep.launch.Snapshots: {name} is a {type(leaf).__name__} of no fixed"
        " bytes; pass arrays, and the jax.random.key_data of keys."
      )
    yield name, leaf


@jax.jit
def _copy(state: Any) -> Any:
  return jax.tree.map(jnp.copy, state)
