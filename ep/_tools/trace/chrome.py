# SPDX-License-Identifier: Apache-2.0
"""Converts a trace to events of chrome://tracing and ui.perfetto.dev."""

from __future__ import annotations

import collections
import itertools
from typing import Any

import numpy as np

from ep._tools.trace.blame import LATE_S


def events(merged: dict[str, Any]) -> list[dict[str, Any]]:
  """Returns the events of a trace, sorted by time.

  Slices of a track must not overlap, so a rank in several ops has several
  tracks. Perfetto attaches each end of an arrow to the latest slice that began
  by then, and reverses an arrow to an earlier slice. So the "moving" slice of
  the last rank begins at its arrival, and no other "moving" slice earlier.
  """
  size, exchanges = merged["ep_size"], merged["exchanges"]
  bounds = {p: c["bound_s"] or 0.0 for p, c in merged["clocks"].items()}
  owners = np.reshape(merged["processes"], (-1, size)).tolist()
  num_domains = 1 + max((e["domain"] for e in exchanges), default=0)
  # The time at which each track of a rank becomes free.
  ends: dict[tuple[int, int], list[float]] = collections.defaultdict(list)
  found: list[dict[str, Any]] = []

  def add(
    ph: str, name: str, domain: int, tid: int, seconds: float, **fields: Any
  ) -> None:
    ts = _microseconds(seconds)
    found.append(dict(ph=ph, name=name, ts=ts, pid=domain, tid=tid, **fields))

  def add_slice(
    name: str, domain: int, tid: int, begin: float, end: float, args: Any
  ) -> None:
    dur = round(_microseconds(end) - _microseconds(begin), 3)
    add("X", name, domain, tid, begin, dur=dur, args=args)

  def track(domain: int, rank: int, begin: float, end: float) -> int:
    """Returns a free track of the rank, or makes a new one."""
    tracks = ends[domain, rank]
    number = next((i for i, t in enumerate(tracks) if t <= begin), len(tracks))
    tid: int = (number * num_domains + domain) * size + rank
    if number == len(tracks):
      names = dict(process_name=f"domain {domain}", thread_name=f"rank {rank}")
      for kind, name in names.items():
        add("M", kind, domain, tid, 0, args=dict(name=name))
    tracks[number : number + 1] = [end]
    return tid

  for number, e in enumerate(exchanges):
    domain, came = e["domain"], e["came"]
    last = int(np.argmax(came))
    begins = np.maximum(e["began"], came[last])
    begins[last] = came[last]
    stops = np.maximum(e["ended"], begins).tolist()
    begins = begins.tolist()
    tids = [track(domain, r, came[r], stops[r]) for r in range(size)]
    name = f"{e['op']} {e['layer']}".strip()
    for rank, tid in enumerate(tids):
      args = {k: e[k][rank] for k in ("rows", "dropped", "bytes")}
      args["step"] = e["step"]
      clocks = {owners[domain][rank], owners[domain][last]}
      error_s = sum(bounds[p] for p in clocks)
      if len(clocks) == 2 and error_s >= LATE_S:
        args["clock"] = f"wrong by up to {error_s * 1e3:.1f} ms"
      if rank != last:
        waiting = f"waiting for rank {last}: {name}"
        add_slice(waiting, domain, tid, came[rank], begins[rank], args)
      add_slice(f"moving: {name}", domain, tid, begins[rank], stops[rank], args)
    for rank, tid in enumerate(tids):
      if rank != last:
        arrow = dict(cat="last", id=number * size + rank)
        add("s", "last", domain, tids[last], begins[last], **arrow)
        add("f", "last", domain, tid, begins[rank], bp="e", **arrow)
    if e["op"] == "ep_prepare" and min(e["rows"]) >= 0:
      rows, layer = np.array(e["rows"]), e["layer"]
      imbalance = float(rows.max() * size / max(rows.sum(), 1))
      loads = enumerate(itertools.chain(*e["tokens"]))
      for name, args in (
        ("rows", {str(r): int(n) for r, n in enumerate(rows)}),
        ("imbalance", {"max/mean": imbalance}),
        ("drops", {"": sum(e["dropped"])}),
        ("tokens of experts", {str(i): n for i, n in loads}),
      ):
        add("C", f"{name} {layer}", domain, tids[0], max(e["ended"]), args=args)
  return sorted(found, key=lambda event: event["ts"])


def _microseconds(seconds: float) -> float:
  """Converts to Chrome's unit, rounded to nanoseconds."""
  return round(seconds * 1e6, 3)
