# SPDX-License-Identifier: Apache-2.0
"""The loop over steps: it records each, saves some, and stops at a NaN."""

from collections.abc import Callable
import math

import jax
import numpy as np

import ep
from lm import metrics
from lm.checkpoint import Checkpoints
from lm.data import Windows
from lm.placing import Placing
from lm.processes import agree, Stop
from lm.train import Report, State


def run(
  step: Callable[
    [State, np.ndarray, ep.Placement | None], tuple[State, Report]
  ],
  state: State,
  windows: Windows,
  *,
  steps: int,
  held_out: Callable[[State], float],
  evaluate_every: int,
  save_every: int,
  history: metrics.History,
  progress: metrics.Progress,
  checkpoints: Checkpoints | None,
  placing: Placing,
) -> State:
  """Returns the state after `steps` steps in all, with experts in order.

  `held_out` returns the loss on text that is not trained on. It is recorded in
  multiples of `evaluate_every` steps, wherever the run ends.

  Waits for each step, because its numbers are recorded and decide whether the
  next is taken.

  Raises:
    Stop: a loss is not finite, or a file cannot be written.
  """
  for done in range(int(state.step) + 1, steps + 1):
    state, report = step(state, windows[done - 1], placing.placement)
    new = metrics.record(done, jax.device_get(report))
    if not math.isfinite(new["loss"] + new["grad_norm"]):
      raise Stop(
        f"step {done}: the loss is {new['loss']} and the norm of its gradient"
        f" {new['grad_norm']}; start again with a lower --learning_rate or a"
        " longer --warmup."
      )
    if done % evaluate_every == 0:
      new["held_out"] = held_out(placing.in_order(state))
    agree(lambda new=new: history.append(new))
    load, rows = report.sums.load, report.sums.max_rank_rows
    mean = np.asarray(load).sum(axis=1) / jax.device_count()
    progress.show(new, float((rows / mean).max()))
    if checkpoints and (done % save_every == 0 or done == steps):
      folder = checkpoints.save(placing.in_order(state))
      progress.note(f"step {done}: saved {folder}")
    state, told = placing.after(done, report.sums.load, state)
    if told:
      progress.note(told)
  return placing.in_order(state)
