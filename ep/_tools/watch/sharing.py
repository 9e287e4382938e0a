# SPDX-License-Identifier: Apache-2.0
"""Shares the state of each process in the job's key-value store."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import json
import threading
import time
from typing import Any

import jax

from ep._src.base import compat
from ep._src.group import liveness

_FOLDER = "ep/watch/"
# A process is silent after this number of missing records, and this time.
_SILENT_BEATS, _SILENT_S = 3, 2.0
_LAST_S = 2.0  # limit for the last record


@dataclasses.dataclass(frozen=True)
class Record:
  """The state of a process."""

  host: str
  pid: int
  time: float  # of time.time(), when the process published the record
  still_s: float  # time since a number of steps changed
  begun: int  # number of steps
  launched: int
  finished: int
  name: str  # of the last step
  raised: str  # the error that ended the last step, or ""
  has_left: bool  # the process left the context
  stack: str  # of Python, the latest call first
  # The processes that read this record set these two fields.
  silent_s: float = 0.0  # time without a new record, if that is too long
  state: str = ""  # of a silent process; see `liveness.states`


class Sharing:
  """A thread that publishes records of this process, and reads all of them.

  A request to the store may never return, so only this thread makes requests.
  The thread reads records only while the process stands still, because reading
  takes a time that grows with the number of processes.

  Other threads may read the fields, each of which is replaced as a whole.
  """

  def __init__(self, record: Callable[[], Record], beat_s: float):
    self.records: dict[int, Record] = {}
    self.is_reading = False
    self.silent_s = max(_SILENT_BEATS * beat_s, _SILENT_S)
    self._record, self._beat_s = record, beat_s
    self._client: Any = compat.distributed_client()
    self.me = compat.distributed_process()
    self._fault = ""
    self._answered = time.monotonic()
    self._came: dict[int, float] = {}  # when this process first saw a record
    self._stop = threading.Event()
    self._thread = threading.Thread(
      target=self._run, name="ep.watch sharing", daemon=True
    )
    self._is_known = threading.Event()  # set after the first record
    if self._client:
      self._thread.start()
      # Otherwise, if this process stops now, others read an earlier record.
      self._is_known.wait(beat_s)

  def fault(self) -> str:
    """Returns why the store cannot be used, or ""."""
    missing_s = time.monotonic() - self._answered
    if not self._client or missing_s <= self.silent_s:
      return ""
    return f"has not answered for {missing_s:.0f} s {self._fault}".strip()

  def close(self) -> None:
    """Publishes the last record; returns soon even if the store is down."""
    self._stop.set()
    if self._client:
      self._thread.join(_LAST_S)

  def _run(self) -> None:
    is_last = False
    while not is_last:
      is_last = self._stop.is_set()
      try:
        if not self._is_known.is_set():
          liveness.announce()
        self._share()
        self._answered, self._fault = time.monotonic(), ""
        self._is_known.set()
      except jax.errors.JaxRuntimeError as e:
        self._fault = f"({str(e).partition(chr(10))[0][:200]})"
      if not is_last:
        self._stop.wait(self._beat_s)

  def _share(self) -> None:
    text = json.dumps(dataclasses.asdict(self._record()))
    self._client.key_value_set(
      f"{_FOLDER}{self.me}", text, allow_overwrite=True
    )
    if not self.is_reading:
      self.records = {}  # of an earlier stall
      return
    found = self._client.key_value_dir_get(_FOLDER)
    records = {
      int(key.rpartition("/")[2]): Record(**json.loads(text))
      for key, text in found
    }
    states = liveness.states(self._client)
    now = time.monotonic()
    for process, record in records.items():
      before = self.records.get(process)
      if before is None or before.time != record.time:
        self._came[process] = now
      missing_s = now - self._came[process]
      if missing_s > self.silent_s and not record.has_left:
        # The clocks of two hosts may differ.
        missing_s = max(missing_s, time.time() - record.time)
        records[process] = dataclasses.replace(
          record, silent_s=missing_s, state=states.get(process, "")
        )
    self.records = records
