# SPDX-License-Identifier: Apache-2.0
"""Copies the state of a training run into memory that outlives its ranks."""

from __future__ import annotations

import atexit
from collections.abc import Iterable, Iterator, Sequence
import dataclasses
import itertools
import json
import secrets
import threading
import time
from typing import Any, NamedTuple
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from ep._src.base import compat
from ep._tools.snapshots import memory, peers

_POLL_S = 0.02
_END_S = 10.0  # limit for a snapshot at the end of the process
_AGREE_S = 120.0  # limit for the other ranks to check the snapshots
_FOLDER = "ep/snapshot/"  # in the job's key-value store


class Snapshots:
  """Snapshots of a state, from which a job goes on after a rank has died.

      snapshots = ep.Snapshots()
      found = snapshots.restore(state)  # the first state of a run
      done, state = found or (0, state)
      for step in range(done + 1, last + 1):
        state = train(state)
        if step % 10 == 0:
          snapshots.take(step, state)

  The memory is the launcher's: `ep.launch` with `max_restarts`, on Linux. On
  several hosts, each host also keeps a copy for the host before it, so that the
  state survives any host but host 0, and any hosts that are not neighbours.
  Without such a launcher, nothing is kept, and `restore` returns None.
  Snapshots take twice the memory of the state, or four times on several hosts,
  and vanish with the launcher, so a run also needs checkpoints on disk.

  All ranks call `take` and `restore` with the same steps and trees.
  """

  def __init__(self) -> None:
    self._client = compat.distributed_client()
    self._rank = compat.distributed_process()
    self._ranks = compat.distributed_count()
    self._files = memory.inherited()
    self._server: peers.Server | None = None
    self._token = ""
    self._copier: peers.Peer | None = None
    if self._files and self._files.places < self._ranks:
      self._serve(self._files)
    self._thread: threading.Thread | None = None
    self._error: Exception | None = None
    self._is_ending = False
    atexit.register(self._end)
    self._last: int | None = None  # step of the last snapshot

  def _serve(self, files: memory.Inherited) -> None:
    """Starts to exchange snapshots with other hosts."""
    if self._rank == 0:
      self._set("token", secrets.token_hex())
    self._token = self._get("token")
    host = compat.own_address() or "127.0.0.1"
    self._server = peers.Server(host, self._token, files)
    for rank in files.copies:
      self._set(f"copier/{rank}", self._server.address)
    self._copier = peers.Peer(self._get(f"copier/{self._rank}"), self._token)

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
    if not self._files:
      return
    self.wait()
    names = [name for name, _ in _leaves(state)]
    copies = _copy(jax.tree.leaves(state))
    self._thread = threading.Thread(
      target=self._write,
      args=(self._files.own, step, names, copies),
      daemon=True,
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

  def _end(self) -> None:
    """Lets the thread end before Python does, also if other ranks are gone."""
    self._is_ending = True
    if self._thread:
      self._thread.join(_END_S)

  def restore(self, like: Any) -> tuple[int, Any] | None:
    """Returns the newest snapshot that all ranks completed, and its step.

    Collective over all ranks. Fewer or more ranks may have taken the snapshot,
    and may have divided its arrays otherwise.

    Args:
      like: arrays, or values of `jax.ShapeDtypeStruct` with shardings, with the
        tree, shapes and dtypes of the state. One dimension of an array may be
        longer or shorter than in the snapshot, by zeros at its end: the empty
        slots of experts, whose number depends on the ranks.

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
        "ep.Snapshots: the snapshot is of another tree: only the"
        f" {where} has {differing[0]}; restore the tree that was taken."
      )
    arrays = [source.array(name, leaf) for name, leaf in named.items()]
    return source.step, jax.tree.unflatten(jax.tree.structure(like), arrays)

  def _newest(self) -> _Source | None:
    """Returns the newest complete snapshot whose checksums hold.

    The ranks of a host share the work of reading all files of the host.
    """
    if (files := self._files) is None:
      return None
    here = [
      (restart, rank, file)
      for restart, ranks in files.old.items()
      for rank, file in ranks.items()
    ]
    offers = [
      (restart, rank, dataclasses.astuple(generation), ranks)
      for restart, rank, file in here[files.place :: files.places]
      for generation in file.generations()
      if (ranks := _ranks_of(file, generation))
    ]
    answers = self._exchange(offers)
    complete: dict[tuple[int, int], dict[int, _Part]] = {}
    for peer, theirs in answers:
      for restart, rank, fields, ranks in theirs:
        generation = memory.Generation(*fields)
        # A rank's own file and its copy may hold a step in other places.
        source = files.old.get(restart, {}).get(rank)
        if not source or generation not in source.generations():
          source = peer.file(restart, rank)
        part = generation, source, ranks
        complete.setdefault((restart, generation.step), {})[rank] = part
    for (_, step), parts in sorted(complete.items(), reverse=True):
      if all(len(parts) == ranks for *_, ranks in parts.values()):
        return _Source(step, parts.values())
    return None

  def _exchange(self, offers: list[Any]) -> list[tuple[peers.Peer, list[Any]]]:
    """Returns the offers of all ranks; collective."""
    if self._client is None:
      return [(peers.Peer(("", 0), ""), offers)]
    address = self._server.address if self._server else ("", 0)
    self._set(f"offers/{self._rank}", [address, offers])
    answers = [self._get(f"offers/{rank}") for rank in range(self._ranks)]
    return [(peers.Peer(at, self._token), theirs) for at, theirs in answers]

  def _set(self, key: str, value: Any) -> None:
    text = json.dumps(value)
    self._client.key_value_set(_FOLDER + key, text, allow_overwrite=True)

  def _get(self, key: str) -> Any:
    timeout = int(1000 * _AGREE_S)
    return json.loads(
      self._client.blocking_key_value_get(_FOLDER + key, timeout)
    )

  def _write(
    self, file: memory.File, step: int, names: list[str], copies: list[Any]
  ) -> None:
    try:
      if not self._wait_for_all(self._last):
        return
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
      index = {"ranks": self._ranks, "chunks": chunks}
      file.write(step, index, arrays)
      if self._copier:
        self._copier.put(self._rank, step, index, arrays)
      self._last = step
      if self._client:
        self._set(f"done/{self._rank}", step)
    except Exception as error:
      self._error = error

  def _wait_for_all(self, step: int | None) -> bool:
    """Waits for all ranks to complete a step; False if this one ends first."""
    while self._client and step is not None:
      done = self._client.key_value_dir_get(_FOLDER + "done")
      if sum(int(text) >= step for _, text in done) == self._ranks:
        break
      if self._is_ending:
        return False
      time.sleep(_POLL_S)
    return True


class _Chunk(NamedTuple):
  """A box of an array, in a generation of a file."""

  name: str  # of the array
  dtype: str
  shape: Sequence[int]  # of the array
  begins: Sequence[int]  # of the box in the array
  extent: Sequence[int]  # of the box
  size: int  # in bytes
  checksum: int


_Part = tuple[memory.Generation, memory.File, int]


class _Source:
  """A snapshot of all ranks of an attempt, at one step."""

  def __init__(self, step: int, parts: Iterable[_Part]):
    self.step = step
    self.chunks: dict[str, list[tuple[_Chunk, memory.File, int]]] = {}
    for generation, file, _ in parts:
      index = file.index(generation)
      for chunk, position in _chunks(generation, index):
        self.chunks.setdefault(chunk.name, []).append((chunk, file, position))

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
) -> Iterator[tuple[_Chunk, int]]:
  """Yields the chunks of a generation, and their positions in the file."""
  position = generation.begin + generation.index_size
  for chunk in itertools.starmap(_Chunk, index["chunks"]):
    yield chunk, position
    position += chunk.size


def _ranks_of(file: memory.File, generation: memory.Generation) -> int:
  """Returns the number of ranks of a snapshot; 0 if a part is damaged."""
  try:
    index = file.index(generation)
    for chunk, position in _chunks(generation, index):
      _read(chunk, file, position)
  except ValueError:
    return 0
  return int(index["ranks"])


def _read(chunk: _Chunk, file: memory.File, position: int) -> bytearray:
  """Returns the bytes of a chunk; raises ValueError if they are damaged."""
  data = file.read(position, chunk.size)
  if zlib.crc32(data) != chunk.checksum:
    raise ValueError(f"ep.Snapshots: {chunk.name} is damaged")
  return data


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    name = jax.tree_util.keystr(path)
    is_array = isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))
    if not is_array or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      raise TypeError(
        f"ep.Snapshots: {name} is a {type(leaf).__name__} of no fixed"
        " bytes; pass arrays, and the jax.random.key_data of keys."
      )
    yield name, leaf


@jax.jit
def _copy(state: Any) -> Any:
  return jax.tree.map(jnp.copy, state)
