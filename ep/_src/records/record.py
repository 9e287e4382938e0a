# SPDX-License-Identifier: Apache-2.0
"""record: writes the routing of each step to files, from compiled programs."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterator, Mapping
import contextlib
import functools
import math
import os
import pathlib
import threading

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from ep._src.base import arguments, compat, primitive
from ep._src.base.errors import EpError
from ep._src.native.program_names import ProgramNames
from ep._src.ops.taps import tapping
from ep._src.records import files


@contextlib.contextmanager
def record(
  path: str | os.PathLike[str] | None,
  *,
  layers: Collection[str] | None = None,
  weights: bool = False,
  calls_per_step: int | Mapping[str, int] = 1,
  flush_s: float = 10.0,
) -> Iterator[None]:
  """Writes the ids of every `ep_prepare` that runs in the context to files.

      with ep.record("routing"):
        for batch in data:
          state = step(state, batch)      # traced anew, once
      topk_idx = ep.replay("routing").topk_idx("moe_3", step=17)

  A call is one `ep_prepare` of a rank, whether compiled or not, inside of a
  `scan`, or under `vmap`, where each example makes one. What `jax.checkpoint`
  computes again is not a call. The calls of a layer, which its `name` stands
  for, are numbered from 0 on in the order in which rank 0 makes them: number n
  is the call `n % calls_per_step` of the step `n // calls_per_step`. So layers
  of other places of a model need other names, or share the calls of a step.

  The ids are [..., K]. A choice that moves to a further candidate is recorded
  as that, and one that is dropped as it was chosen: a replay with the same
  ranks and layer drops it again.

  Each process writes the ids of its own ranks to NumPy archives in the folder,
  and all processes must do the same. The head of ep/_src/records/files.py has
  their arrays, which any tool that reads .npz files can load. A thread writes
  what came in the last seconds, so a process that is killed loses no more than
  those. Leaving the context waits for all arrays that are alive, and writes the
  rest. So keep a result of the last step, or wait for it. If nothing came, it
  warns.

  If the thread cannot write, as on a full disk, the next programs of this
  process fail with an `ep.EpError` that says so. Other processes see that as
  they see any process that fails: they get an error when it has closed its
  group or ended, or after `timeout_s`.

  It is a context of the thread that enters it. A program that is exported in it
  is refused, because it could not call this process.

  Args:
    path: a folder, new or without files of a record. None: nothing is recorded,
      for instance by an evaluation within a context.
    layers: names of the layers to record; None records all.
    weights: whether to write the weights of these choices, too, as float32: as
      they came to `ep_prepare`, if it gets `topk_weights`, as it does in
      `ep.moe_layer` and `ep.moe.apply`.
    calls_per_step: how often a step calls `ep_prepare` with a layer: 1, or as
      often as a `scan` does; for all layers, or by name.
    flush_s: seconds after which what came is written.

  Raises:
    ValueError, TypeError: an argument does not fit, or the folder has a record.
    RuntimeError: on leaving, if files could not be written. With
      `ep.EpError`, a program in the context tells it sooner.
  """
  if path is None:
    with tapping(None):
      yield
    return
  recorder = _Recorder(
    pathlib.Path(path).absolute(), layers, weights, calls_per_step, flush_s
  )
  try:
    with tapping(recorder):
      yield
    for array in jax.live_arrays():
      # The failure of a program is told to those who use its results.
      with contextlib.suppress(*EpError):
        array.block_until_ready()
  finally:
    recorder.close()
  recorder.warn_if_empty()


class _Recorder:
  """Collects the calls of this process and writes them, in a thread.

  `add` may be called by any thread, and `close` once.
  """

  def __init__(self, folder, layers, weights, calls_per_step, flush_s):
    if isinstance(layers, str):
      raise TypeError(
        f"ep.record: layers = {layers!r} is a str, but a collection of names is"
        f" expected; pass [{layers!r}]."
      )
    self._layers = layers if layers is None else frozenset(layers)
    named = {"calls_per_step": calls_per_step}
    if isinstance(calls_per_step, Mapping):
      named = {f"calls_per_step[{k!r}]": v for k, v in calls_per_step.items()}
    for name, value in named.items():
      arguments.check(
        arguments.integer("ep.record", name, value) > 0,
        "ep.record",
        f"{name} = {value}, but a step makes at least one call.",
      )
    self.weights = weights
    self._calls_per_step = calls_per_step
    self._flush_s = arguments.seconds("ep.record", "flush_s", flush_s)
    self._folder = folder
    self._writer = files.Writer(folder, jax.process_index())
    self.programs = ProgramNames("@record")
    self._num_ranks: dict[str, int] = {}
    self._others: set[str] = set()  # names of layers that are not recorded
    # A deque may be appended to and read by two threads.
    self._added: collections.deque = collections.deque()
    self._counts: collections.Counter = collections.Counter()
    self._lock = threading.Lock()
    # The lock guards how often each device has run each site, how often any
    # device has, and whether they go on.
    self._runs: collections.Counter = collections.Counter()
    self._most_runs: collections.Counter = collections.Counter()
    self._is_open = True
    self._failure: Exception | None = None
    self._end = threading.Event()
    self._thread = threading.Thread(
      target=self._write_until_end, name="ep.record", daemon=True
    )
    self._thread.start()

  def __call__(self, layer, topk_idx, topk_weights, leaves):
    """Returns the leaves of a handle that is traced now, in the local view.

    If one is used, the ids of its choices are recorded. So are the weights, if
    they are wanted and there are any; they have no derivative.
    """
    self._check(layer)
    group = layer.group
    copies = [a for a in group.mesh.shape if a not in group.token_axes]
    place = lax.axis_index((*group.token_axes, *copies))
    operands = [topk_idx, place]
    if self.weights and topk_weights is not None:
      operands.append(topk_weights.astype(jnp.float32))
    (zero,) = record_p.bind(*operands, recorder=self, layer=layer)
    # The ops of the handle run after the call, since `mem` depends on it. A
    # call whose handle is used for something else is kept by the barrier.
    mem, *others = leaves
    leaves, tree = jax.tree.flatten([mem + zero.astype(mem.dtype), *others])
    together = compat.vary_together(*leaves, zero)
    return tree.unflatten(lax.optimization_barrier(together)[:-1])

  def _check(self, layer):
    """Raises `ValueError` if another group has a layer of this name."""
    ranks = layer.group.num_token_ranks
    known = self._num_ranks.setdefault(layer.name, ranks)
    arguments.check(
      known == ranks,
      f'ep_prepare(layer "{layer.name}")',
      f"its calls on {known} ranks are being recorded, and these are on"
      f" {ranks}; give the layers different names.",
    )

  def wants(self, layer: str) -> bool:
    if self._layers is None or layer in self._layers:
      return True
    self._others.add(layer)
    return False

  def add(self, layer, num_copies, site, topk_idx, place, topk_weights=None):
    """Adds a call of the device at a place of the mesh, and returns (0,).

    Of `num_copies` devices that hold the same tokens, the first one's counts.

    Raises:
      RuntimeError: files cannot be written. All devices of the process fail in
        the same run of a site, so that none waits for one that has failed.
    """
    place = int(place)
    with self._lock:
      run = self._runs[site, place]
      if self._failure and run >= self._most_runs[site]:
        raise self._error()
      self._runs[site, place] = run + 1
      self._most_runs[site] = max(self._most_runs[site], run + 1)
    rank, copy = divmod(place, num_copies)
    if self._is_open and not copy:
      if topk_weights is not None:
        topk_weights = np.array(topk_weights)
      call = layer, site, run, rank, np.array(topk_idx), topk_weights
      self._added.append(call)
    return _ZEROS

  def close(self):
    """Writes what was added, and records no more."""
    self._end.set()
    self._thread.join()
    self._is_open = False
    self._writer.close()
    if self._failure:
      raise self._error() from self._failure

  def warn_if_empty(self):
    """Warns if no program called this process."""
    if self._runs:
      return
    why = (
      "a program that jax.jit(f).lower(...).compile() made before is not traced"
      " anew; compile it in the context"
    )
    if self._others:
      why = (
        f"layers = {sorted(self._layers)}, but the context has traced"
        f" {sorted(self._others)}; name some of these"
      )
    arguments.warn(f"ep.record: nothing was recorded in {self._folder}: {why}.")

  def _error(self):
    return RuntimeError(
      f"ep.record: cannot write to {self._folder}: {self._failure}; what came"
      " before is there. Record to a folder with room, or do not record."
    )

  def _write_until_end(self):
    try:
      while not self._end.wait(self._flush_s):
        self._flush()
      self._flush()
    except Exception as e:  # `add` and `close` tell the user
      with self._lock:
        self._failure, self._is_open = e, False

  def _flush(self):
    added = [self._added.popleft() for _ in range(len(self._added))]
    self._writer.write([self._numbered(*call) for call in added])

  def _numbered(self, layer, site, run, rank, topk_idx, topk_weights):
    per_step = self._calls_per_step
    if isinstance(per_step, Mapping):
      per_step = per_step.get(layer.name, 1)
    step, call = divmod(self._counts[layer.name, rank], per_step)
    self._counts[layer.name, rank] += 1
    return files.Call(
      layer=layer.name,
      num_ranks=layer.group.num_token_ranks,
      calls_per_step=per_step,
      rank=rank,
      step=step,
      call=call,
      site=site,
      run=run,
      topk_idx=topk_idx,
      topk_weights=topk_weights,
    )


# A program adds it to `mem`, so that it waits for a call.
_ZEROS = (np.zeros((), np.int32),)


def _types(topk_idx, *_, **__):
  return [compat.out_aval((), jnp.int32, topk_idx)]


def _lower(ctx, *operands, recorder, layer):
  if not compat.can_call_python(ctx):
    raise ValueError(
      f'ep_prepare(layer "{layer.name}"): a program that is exported cannot be'
      " recorded, because it cannot call this process; export it outside of"
      " ep.record, or within ep.record(None)."
    )
  site = f"{recorder.programs.name(ctx)}/{compat.next_position(ctx)}"

  shape = layer.group.mesh.shape
  copies = math.prod(shape.values()) // layer.group.num_token_ranks
  add = functools.partial(recorder.add, layer, copies, site)
  return compat.lower_to_python(ctx, add, *operands)


# It is not cacheable, since each op of a program has its own position in it.
record_p = primitive.new("ep_record", _types, _lower, cacheable=False)
compat.run_once_in_remat(record_p)
