# SPDX-License-Identifier: Apache-2.0
"""Copies the state of a training run into memory that outlives its ranks."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
import dataclasses
import itertools
import json
import operator
import secrets
import threading
import time
from typing import Any
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from ep._src.base import compat
from ep._tools.snapshots import memory, peers, source

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

  All ranks call `take` and `restore` with the same steps and trees. A process
  makes one object of this class, after `ep.launch.initialize`.

  Raises:
    RuntimeError: this process has not joined the other ranks.
  """

  def __init__(self) -> None:
    self._client = compat.distributed_client()
    self._rank = compat.distributed_process()
    self._ranks = compat.distributed_count()
    self._files = memory.inherited()
    if self._files and self._files.ranks != self._ranks:
      raise RuntimeError(
        f"ep.Snapshots: this process knows {self._ranks} of"
        f" {self._files.ranks} ranks; call ep.launch.initialize() before."
      )
    self._server: peers.Server | None = None
    self._token = ""
    self._copier: peers.Peer | None = None
    if self._files and self._files.places < self._ranks:
      self._serve(self._files)
    self._lock = threading.RLock()  # of `take` and `wait`
    self._thread: threading.Thread | None = None
    self._error: Exception | None = None
    self._is_ending = False
    atexit.register(self._end)
    self._last: int | None = None  # step of the last complete snapshot
    self._taken = -(1 << 63)  # step of the last snapshot

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
      step: an integer that grows from call to call.
      state: a tree of arrays of this process's mesh.

    Raises:
      TypeError: a leaf is not an array, or is a typed key; the step is no
        integer.
      ValueError: the step has not grown; the state before is larger than the
        first one.
      OSError: this host lacked memory for the snapshot before.
    """
    if not self._files:
      return
    step = operator.index(step)
    with self._lock:
      self.wait()
      if step <= self._taken:
        raise ValueError(
          f"ep.Snapshots: step = {step} after step {self._taken}, but steps"
          " must grow: restore would return the larger one."
        )
      names = [name for name, _ in _leaves(state)]
      copies = _copy(jax.tree.leaves(state))
      self._taken = step
      self._thread = threading.Thread(
        target=self._write,
        args=(self._files, step, names, copies),
        daemon=True,
      )
      self._thread.start()

  def wait(self) -> None:
    """Waits for the last snapshot; raises its error, if any."""
    with self._lock:
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
    and may have divided its arrays otherwise. Afterwards, only this snapshot
    and newer ones can be restored.

    Args:
      like: arrays, or values of `jax.ShapeDtypeStruct` with shardings, with the
        tree, shapes and dtypes of the state. One dimension of an array may be
        longer or shorter than in the snapshot, by zeros at its end: the empty
        slots of experts, whose number depends on the ranks.

    Raises:
      ValueError: the snapshot has another tree, shape or dtype, or ranks had
        different numbers in an array that is not on a mesh of all ranks.
    """
    found = self._newest()
    if found is None:
      return None
    named = dict(_leaves(like))
    if differing := sorted(named.keys() ^ found.chunks.keys()):
      where = "tree" if differing[0] in named else "snapshot"
      raise ValueError(
        "ep.Snapshots: the snapshot is of another tree: only the"
        f" {where} has {differing[0]}; restore the tree that was taken."
      )
    arrays = [found.array(name, leaf) for name, leaf in named.items()]
    return found.step, jax.tree.unflatten(jax.tree.structure(like), arrays)

  def _newest(self) -> source.Source | None:
    """Returns the newest complete snapshot whose checksums hold.

    The ranks of a host share the work of reading all files of the host.
    """
    if (files := self._files) is None:
      return None
    offers = [
      (restart, rank, dataclasses.astuple(generation), ranks)
      for restart, rank, file in _share(files)
      for generation in file.generations()
      if (ranks := source.ranks_of(file, generation))
    ]
    answers = self._exchange(offers)
    complete: dict[tuple[int, int], dict[int, source.Part]] = {}
    for peer, theirs in answers:
      for restart, rank, fields, ranks in theirs:
        generation = memory.Generation(*fields)
        # A rank's own file and its copy may hold a step in other places.
        file = files.old.get(restart, {}).get(rank)
        if not file or generation not in file.generations():
          file = peer.file(restart, rank)
        part = generation, file, ranks
        complete.setdefault((restart, generation.step), {})[rank] = part
    for (found, step), parts in sorted(complete.items(), reverse=True):
      if all(len(parts) == ranks for *_, ranks in parts.values()):
        self._empty(files, keep=found)
        return source.Source(step, parts.values())
    return None

  def _empty(self, files: memory.Inherited, keep: int | None = None) -> None:
    """Empties this rank's share of the files of all attempts but one."""
    for restart, _, file in _share(files):
      if restart != keep:
        file.empty()

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
    self,
    files: memory.Inherited,
    step: int,
    names: list[str],
    copies: list[Any],
  ) -> None:
    try:
      if not self._wait_for_all(self._last):
        return
      if self._last is not None:  # all ranks have a snapshot of this attempt
        self._empty(files)
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
            source.Chunk(
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
      files.own.write(step, index, arrays)
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


def _share(
  files: memory.Inherited,
) -> Iterator[tuple[int, int, memory.File]]:
  """Yields the old files that this rank reads, of all files of its host."""
  old = (
    (restart, rank, file)
    for restart, ranks in files.old.items()
    for rank, file in ranks.items()
  )
  return itertools.islice(old, files.place, None, files.places)


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
