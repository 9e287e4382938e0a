# SPDX-License-Identifier: Apache-2.0
"""Records times of ops for EP_TRACE, by calls of Python; backend "xla".

EP_TRACE traces a whole run, and a profile of a whole run would be too large. So
programs call Python when all operands of an op are ready, and after the op. The
op's exchange begins when the last rank arrives.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
import functools
import json
import pathlib
import threading
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ep._src.base import compat, meshes
from ep._src.base.config import GroupConfig

_KEPT = 1 << 18  # the largest number of exchanges in a trace, as with "host"


class Site(NamedTuple):
  """An op in a compiled program: its layer, and its position in the program."""

  op: str
  layer: str
  program: str
  position: int
  row_bytes: int


class Stamps:
  """The recorded times of a group's ops on this process's ranks. Thread-safe.

  A rank may run an op of a program repeatedly, in loops and launches. The step
  in a record is the number of earlier runs, which is equal on all ranks.
  """

  def __init__(self, group: GroupConfig):
    self._lock = threading.Lock()
    self._path: pathlib.Path | None = None  # set while a trace is on
    self._group = group

  def start(self, path: str) -> None:
    """Starts to record times, which `stop` appends to the file `path`."""
    with self._lock:
      self._path = pathlib.Path(path)
      self._runs: collections.Counter[Any] = collections.Counter()
      self._begins: dict[Any, dict[int, float]] = {}
      self._ends: dict[Any, dict[int, Any]] = collections.defaultdict(dict)
      self._lost = 0

  def stop(self) -> None:
    """Appends the records to the file, in the format of trace.h; idempotent."""
    with self._lock:
      if self._path:
        lines = [json.dumps(line) + "\n" for line in self._lines()]
        with self._path.open("a") as file:
          file.writelines(lines)
        self._path = None

  def before(
    self, site: Site, operands: Sequence[jax.Array]
  ) -> tuple[jax.Array, ...]:
    """Returns the operands, after a call of Python that records the time."""
    nothing = compat.io_callback(
      functools.partial(self._came, site),
      jax.ShapeDtypeStruct((), jnp.int32),
      meshes.index_of_rank(self._group.mesh, self._group.axis_name),
      *_starts(operands),
    )
    first, *others = operands
    return first + nothing.astype(first.dtype), *others  # an integer array + 0

  def after(
    self, site: Site, outs: Sequence[jax.Array], counts: jax.Array
  ) -> None:
    """Calls Python, which records the time when all `outs` are ready.

    `counts` are int32: slots, dropped tokens, and tokens of each local expert.
    """
    compat.io_callback(
      functools.partial(self._ended, site),
      None,
      meshes.index_of_rank(self._group.mesh, self._group.axis_name),
      counts,
      *_starts(outs),
    )

  def _came(self, site: Site, index: np.ndarray, *_: Any) -> np.ndarray:
    now = time.monotonic()
    with self._lock:
      if self._path:
        exchange, rank = self._exchange(site, int(index), "came")
        if exchange in self._begins or len(self._begins) < _KEPT:
          self._begins.setdefault(exchange, {})[rank] = now
        else:
          self._lost += 1
    return np.zeros((), np.int32)

  def _ended(
    self, site: Site, index: np.ndarray, counts: np.ndarray, *_: Any
  ) -> None:
    now = time.monotonic()
    with self._lock:
      if self._path:
        exchange, rank = self._exchange(site, int(index), "ended")
        if exchange in self._begins:
          self._ends[exchange][rank] = now, np.asarray(counts).tolist()

  def _exchange(self, site: Site, index: int, kind: str) -> tuple[Any, int]:
    domain, rank = divmod(index, self._group.ep_size)
    self._runs[site, index, kind] += 1
    return (site, domain, self._runs[site, index, kind] - 1), rank

  def _lines(self) -> Iterator[dict[str, Any]]:
    mesh = self._group.mesh
    assert meshes.has_devices(mesh)
    devices = meshes.domains(mesh, self._group.axis_name)
    me = jax.process_index()
    for (site, domain, step), begins in self._begins.items():
      ends = self._ends[site, domain, step]
      mine = {r for r, d in enumerate(devices[domain]) if d.process_index == me}
      if not begins.keys() == ends.keys() == mine:
        continue  # the exchange did not run entirely during the trace
      # All ranks, also of other processes, arrive before any rank finishes.
      seen = min(end for end, _ in ends.values())
      counts = [
        ends[r][1] if r in mine else [] for r in range(self._group.ep_size)
      ]
      yield dict(
        op=site.op,
        layer=site.layer,
        program=site.program,
        site=f"{site.program}/{site.position}",
        step=step,
        domain=domain,
        began=None,  # known after the files of all processes are merged
        ended=max(end for end, _ in ends.values()),
        came=[begins.get(r, seen) for r in range(len(counts))],
        rows=[c[0] if c else -1 for c in counts],
        dropped=[c[1] if c else -1 for c in counts],
        bytes=[c[0] * site.row_bytes if c else -1 for c in counts],
        tokens=[c[2:] for c in counts],
      )
    yield dict(lost=self._lost)


def _starts(arrays: Sequence[jax.Array]) -> list[jax.Array]:
  return [x.reshape(-1)[:1] for x in arrays]
