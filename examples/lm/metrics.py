# SPDX-License-Identifier: Apache-2.0
"""The numbers of a run: one JSON object a step, and a line on the terminal."""

import contextlib
import json
import pathlib
import sys
import time
from typing import TypedDict

import jax
import numpy as np
import tqdm

from lm.train import Report


class Record(TypedDict):
  """A step's numbers as plain values; a list has a value for each layer."""

  step: int  # steps done
  loss: float  # cross-entropy, in nats per byte
  held_out: float | None  # of text that is not trained on, in some steps
  learning_rate: float  # of this step
  grad_norm: float  # of all gradients, before they are clipped
  imbalance: list[float]  # the busiest expert's load over the mean
  dropped: list[int]  # choices that found no room
  entropy: list[float]  # of the router's odds in nats, the mean over tokens
  aux_loss: list[float]  # the balancing loss: 1 if balanced
  load: list[list[int]]  # choices that fell on each expert


def record(step: int, report: Report) -> Record:
  """Returns the record of a step, without a loss on held-out text."""
  sums = report.sums
  load = np.asarray(sums.load)
  return {
    "step": step,
    "loss": float(sums.loss),
    "held_out": None,
    "learning_rate": float(report.learning_rate),
    "grad_norm": float(report.grad_norm),
    "imbalance": (load.max(axis=1) / load.mean(axis=1)).tolist(),
    "dropped": np.asarray(sums.dropped).tolist(),
    "entropy": np.asarray(sums.entropy).tolist(),
    "aux_loss": np.asarray(sums.aux_loss).tolist(),
    "load": load.astype(int).tolist(),
  }


class History:
  """The records of a run, in memory and, with a path, as lines of a file.

  The file gets each line at once, so `tail -f` shows the run. A run that
  resumes after step n keeps the lines of the steps up to n, and makes the
  others again. Records hold no times, so a run's file is the same however often
  it was resumed. If the file was lost before, it has the steps since then, each
  once.

  Raises:
    ValueError: a line of the file is no record.
  """

  def __init__(self, path: pathlib.Path | None = None, steps_done: int = 0):
    self.records: list[Record] = []
    self._file = None
    if path is not None:
      self._file = path.open("a+b")
      self._file.seek(0)
      kept = 0
      for line in self._file:
        if not line.endswith(b"\n"):
          break  # a process was killed in the middle of it
        each = self._parse(line, path)
        if each["step"] > steps_done:
          break
        self.records.append(each)
        kept += len(line)
      self._file.truncate(kept)

  def _parse(self, line: bytes, path: pathlib.Path) -> Record:
    with contextlib.suppress(ValueError, AttributeError, TypeError):
      each = json.loads(line)
      if each.keys() == Record.__annotations__.keys() and each["step"] > 0:
        return each
    raise ValueError(
      f"{path}: line {len(self.records) + 1} is no record of a step; move the"
      " file away, and start the same command again. It leaves a file of the"
      " steps that it makes."
    )

  def append(self, new: Record) -> None:
    """Adds a record; raises `OSError` if its line cannot be written."""
    self.records.append(new)
    if self._file:
      self._file.write(json.dumps(new).encode() + b"\n")
      self._file.flush()


class Progress:
  """A line on the terminal that shows how far a run is.

  Args:
    first, steps: the steps done before, and in all.
    tokens: of a step.
    unigram: the loss of a model that knows the frequencies of bytes only.
  """

  def __init__(self, first: int, steps: int, tokens: int, unigram: float):
    self._steps, self._tokens, self._unigram = steps, tokens, unigram
    self._times: list[float] = []  # when steps ended
    self._bar = tqdm.tqdm(
      initial=first * tokens,
      total=steps * tokens,
      unit=" tokens",
      unit_scale=True,
      desc="compiling",
      bar_format="{percentage:3.0f}% {desc}  {rate_fmt}  {elapsed}<{remaining}",
      mininterval=1.0,
      file=sys.stdout,
      disable=jax.process_index() != 0 or first >= steps,
    )

  def show(self, new: Record, busiest: float) -> None:
    """Shows a step that has ended.

    `busiest` is the number of rows of the busiest rank, over the mean of all.
    A dense model, which has one expert, has no balance to show.
    """
    self._times.append(time.monotonic())
    text = (
      f"step {new['step']}/{self._steps}"
      f"  loss {new['loss']:.3f} (unigram {self._unigram:.3f})"
    )
    if len(new["load"][0]) > 1:
      text += (
        f"  max/mean {max(new['imbalance']):.2f}, of ranks {busiest:.2f}"
        f"  dropped {sum(new['dropped'])}"
      )
    self._bar.set_description_str(text, refresh=False)
    self._bar.update(self._tokens)

  def note(self, text: str) -> None:
    """Prints a line above the bar."""
    if jax.process_index() == 0:
      self._bar.write(text, file=sys.stdout)

  @property
  def tokens_per_s(self) -> float | None:
    """The speed of the steps so far but the first, which compiles."""
    count, times = len(self._times) - 1, self._times
    return count * self._tokens / (times[-1] - times[0]) if count > 0 else None

  def __enter__(self) -> "Progress":
    return self

  def __exit__(self, *_) -> None:
    self._bar.close()
