# SPDX-License-Identifier: Apache-2.0
"""Records the routing of each step of compiled programs in files."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterator, Mapping, Sequence
import contextlib
import functools
import os
import pathlib
import threading
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from ep._src.base import arguments, compat, primitive
from ep._src.base.config import LayerConfig
from ep._src.base.contexts import trace_callback
from ep._src.base.errors import EpError
from ep._src.base.primitive import ProgramNames
from ep._tools.records import files


@contextlib.contextmanager
def record(
  path: str | os.PathLike[str] | None,
  *,
  layers: Collection[str] | None = None,
  weights: bool = False,
  calls_per_step: int | Mapping[str, int] = 1,
  flush_s: float = 10.0,
) -> Iterator[None]:
  """Writes the expert ids of every `ep_prepare` that runs in the context.

      with ep.record("routing"):
        for batch in data:
          state = step(state, batch)      # traced once more
      topk_idx = ep.replay("routing").topk_idx("moe_3", step=17)

  A call is one execution of `ep_prepare` on a rank. Each iteration of a `scan`
  and each example of a `vmap` is a call; a recomputation by `jax.checkpoint` is
  not. The calls of a layer, identified by its `name`, are numbered from 0 in
  the order of rank 0: number n is call `n % calls_per_step` of step
  `n // calls_per_step`. So give different layers of a model different names, or
  count their calls together.

  The record has the chosen ids [..., K], also of choices that are then dropped:
  a replay with the same ranks and layer drops them again.

  Each process writes the ids of its own ranks to NumPy archives in the folder,
  so all processes must enter the context. `ep.replay` reads the archives. A
  killed process loses the calls of its last `flush_s` seconds. On exit, the
  context waits for all live arrays and writes the remaining calls, so keep a
  result of the last step, or wait for it. It warns if it has recorded nothing.

  The context belongs to the thread that enters it. It refuses to export a
  program, because an exported program cannot call this process.

  Args:
    path: a folder, new or without files of a record. None records nothing, for
      instance during an evaluation inside another context.
    layers: names of the layers to record; None records all.
    weights: whether to also write the weights of the choices, as float32.
      `ep_prepare` must get `topk_weights`, as in `ep.moe_layer` and `ep.MoE`.
    calls_per_step: number of calls of a layer in a step, for instance the
      length of a `scan`; for all layers, or by name.
    flush_s: interval between writes, in seconds.

  Raises:
    ValueError, TypeError: an argument does not fit, or the folder has a record.
    ep.EpError: a file cannot be written, for instance because the disk is full.
      The next programs of this process raise it. Other processes see a failed
      process: when it closes its group, when it ends, or after `timeout_s`.
    RuntimeError: the same, on exit from the context.
  """
  if path is None:
    with trace_callback(None):
      yield
    return
  recorder = _Recorder(
    pathlib.Path(path).absolute(), layers, weights, calls_per_step, flush_s
  )
  try:
    with trace_callback(recorder):
      yield
    for array in jax.live_arrays():
      # Not an error here: a failed program raises where its results are used.
      with contextlib.suppress(*EpError):
        array.block_until_ready()
  finally:
    recorder.close()
  recorder.warn_if_empty()


class _Recorder:
  """A recorder of calls of `ep_prepare`, with a thread that writes the files.

  `record_p` is used instead of `jax.debug.callback`, which costs four times as
  much, does not order the examples of a `vmap`, and does not distinguish two
  uses of one traced function. The thread writes at intervals: a file for each
  step would double the cost, and the last step before a hang must be written.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    layers: Collection[str] | None,
    weights: bool,
    calls_per_step: int | Mapping[str, int],
    flush_s: float,
  ):
    if isinstance(layers, str):
      raise TypeError(
        f"ep.record: layers = {layers!r} is a str, but a collection of names is"
        f" expected; pass [{layers!r}]."
      )
    named: dict[str, Any] = {"calls_per_step": calls_per_step}
    if isinstance(calls_per_step, Mapping):
      named = {f"calls_per_step[{k!r}]": v for k, v in calls_per_step.items()}
    for name, value in named.items():
      arguments.check(
        arguments.integer("ep.record", name, value) > 0,
        "ep.record",
        f"{name} = {value}, but a step makes at least one call.",
      )
    self._folder = folder
    self._layers = layers if layers is None else frozenset(layers)
    self._weights = weights
    self._calls_per_step = calls_per_step
    flush_s = arguments.seconds("ep.record", "flush_s", flush_s)
    self._flush_s = min(flush_s, threading.TIMEOUT_MAX)
    self._writer = files.Writer(folder, jax.process_index())
    self.programs = ProgramNames("@record")
    self._num_ranks: dict[str, int] = {}
    self._others: set[str] = set()  # names of layers that are not recorded
    self._closed = threading.Event()
    self._failure: Exception | None = None
    # The lock guards `_calls`, which the thread writes next; `_numbers`, calls
    # counted by layer and rank; and `_runs`, counted by site and mesh position.
    self._lock = threading.Lock()
    self._calls: list[files.Call] = []
    self._numbers: collections.Counter[tuple[str, int]] = collections.Counter()
    self._runs: dict[str, collections.Counter[int]] = collections.defaultdict(
      collections.Counter
    )
    self._thread = threading.Thread(
      target=self._write, name="ep.record", daemon=True
    )
    self._thread.start()

  def __call__(
    self,
    layer: LayerConfig,
    topk_idx: jax.Array,
    topk_weights: jax.Array | None,
    leaves: Any,
  ) -> Any:
    """At trace time, makes the leaves of a handle depend on the recording.

    A program that uses one of the returned leaves records the ids, and the
    weights if the user wants them. The weights have no derivative.
    """
    name, group, ranks = layer.name, layer.group, layer.group.num_token_ranks
    if self._layers is not None and name not in self._layers:
      self._others.add(name)
      return leaves
    known = self._num_ranks.setdefault(name, ranks)
    arguments.check(
      known == ranks,
      f'ep_prepare(layer "{name}")',
      f"its calls on {known} ranks are being recorded, and these are on"
      f" {ranks}; give the layers different names.",
    )
    copies = [a for a in group.mesh.shape if a not in group.token_axes]
    operands = [topk_idx, lax.axis_index((*group.token_axes, *copies))]
    if self._weights and topk_weights is not None:
      operands.append(topk_weights.astype(jnp.float32))
    (zero,) = record_p.bind(*operands, recorder=self, layer=layer)
    # Adding zero makes ops that use these leaves run after the recording.
    return jax.tree.map(lambda x: x + zero.astype(x.dtype), leaves)

  def add(
    self,
    layer: LayerConfig,
    site: str,
    topk_idx: np.ndarray,
    place: np.ndarray,
    *topk_weights: np.ndarray,
  ) -> tuple[np.ndarray]:
    """Records a call of the device at mesh position `place`; returns (0,).

    Of devices with the same tokens, only the first one is recorded.

    Raises:
      RuntimeError: files cannot be written. All devices of the process fail in
        the same run of a site, so no device waits for a failed one.
    """
    name, num_ranks = layer.name, layer.group.num_token_ranks
    position, per_step = int(place), self._calls_per_step
    rank, copy = divmod(position, layer.group.mesh.size // num_ranks)
    if isinstance(per_step, Mapping):
      per_step = per_step.get(name, 1)
    arrays = map(np.array, (topk_idx, *topk_weights))
    with self._lock:
      runs = self._runs[site]
      run = runs[position]
      if self._failure and run >= max(runs.values(), default=0):
        raise self._error()
      runs[position] += 1
      if not copy and not self._closed.is_set():
        step, call = divmod(self._numbers[name, rank], per_step)
        self._numbers[name, rank] += 1
        numbers = num_ranks, per_step, rank, step, call, site, run
        self._calls.append(files.Call(name, *numbers, *arrays))
    return _ZEROS

  def close(self) -> None:
    """Writes the remaining calls, and ignores later ones."""
    self._closed.set()
    self._thread.join()
    self._writer.close()
    if self._failure:
      raise self._error() from self._failure

  def warn_if_empty(self) -> None:
    if self._runs:
      return
    why = (
      "a program that jax.jit(f).lower(...).compile() made before is not traced"
      " anew; compile it in the context"
    )
    if self._others:
      why = (
        f"layers = {sorted(self._layers or ())}, but the context has traced"
        f" {sorted(self._others)}; name some of these"
      )
    arguments.warn(f"ep.record: nothing was recorded in {self._folder}: {why}.")

  def _error(self) -> RuntimeError:
    return RuntimeError(
      f"ep.record: cannot write to {self._folder}: {self._failure}; what came"
      " before is there. Record to a folder with room, or do not record."
    )

  def _write(self) -> None:
    """Writes the new calls at intervals, until the recorder is closed."""
    is_last = False
    try:
      while not is_last:
        is_last = self._closed.wait(self._flush_s)
        with self._lock:
          calls, self._calls = self._calls, []
        self._writer.write(calls)
    except Exception as e:  # `add` and `close` raise this error
      self._failure = e


_ZEROS = (np.zeros((), np.int32),)  # the result of `record_p`


def _types(topk_idx: Any, *_: Any, **__: Any) -> Sequence[Any]:
  return [compat.out_aval((), jnp.int32, topk_idx)]


def _lower(
  ctx: compat.LoweringContext,
  *operands: Any,
  recorder: _Recorder,
  layer: LayerConfig,
) -> Sequence[Any]:
  if not compat.can_call_python(ctx):
    raise ValueError(
      f'ep_prepare(layer "{layer.name}"): a program that is exported cannot be'
      " recorded, because it cannot call this process; export it outside of"
      " ep.record, or within ep.record(None)."
    )
  site = f"{recorder.programs.name(ctx)}/{compat.next_position(ctx)}"
  add = functools.partial(recorder.add, layer, site)
  return compat.lower_to_python(ctx, add, *operands)


# Not cacheable: each lowering contains the position of its op in the program.
record_p = primitive.new("ep_record", _types, _lower, cacheable=False)
compat.run_once_in_remat(record_p)
