# SPDX-License-Identifier: Apache-2.0
"""Trains a mixture-of-experts language model on the bytes of a text.

    bazel run //examples:train_moe_lm
    bazel run //examples:train_moe_lm -- --text=$PWD/docs --out=run

starts the ranks of a (dp, ep) mesh as processes on this host, or joins the
ranks of a launcher. With --out, the run writes metrics and checkpoints to a
folder; the same command continues an interrupted run, and --extend adds steps.
--dense also trains a dense model of the same active size on the same batches.
With --max_restarts, a run that loses ranks goes on with the others.
docs/training.md has the details, and the folder lm the modules.
"""

from collections.abc import Callable
import dataclasses
import math
import pathlib
import signal
import sys
from typing import Any

from absl import app, flags, logging
import jax
from jax.sharding import Mesh
import numpy as np
import tqdm

import ep
from ep import launch
from lm import data, model, plot
from lm.checkpoint import RunFolder, Stop
from lm.step import init, State, Step, working_ranks
import ranks

FLAGS = flags.FLAGS

# Model flags. A flag that sets a field of `model.Config` has the field's name.
flags.DEFINE_integer("layers", 4, "layers, all with experts", 1)
flags.DEFINE_integer("hidden", 128, "hidden size", 1)
flags.DEFINE_integer("inner", 256, "inner size of an expert", 1)
flags.DEFINE_enum(
  "wire",
  None,
  ["mxfp8", "fp8_block128"],
  "fp8 transport of rows to experts; default: rows are sent exactly",
)
_DENSE = flags.DEFINE_bool(
  "dense", False, "also train a dense model of the same active size"
)

# Flags of the data and the training.
flags.DEFINE_integer("batch", 16, "windows of text in a step", 1)
_SHARDS = flags.DEFINE_integer(
  "shards", 4, "shards of a batch; a rank works on one shard at a time", 1
)
flags.DEFINE_integer("length", 128, "bytes of a window", 1)
flags.DEFINE_float("learning_rate", 3e-3, "peak learning rate", 0.0)
flags.DEFINE_integer("warmup", 50, "steps until the peak", 0)
flags.DEFINE_integer(
  "decay_steps", 600, "the rate is a tenth of the peak from this step on", 1
)
flags.DEFINE_float(
  "aux_loss", 1e-2, "weight of the balancing loss; 0 for balance by bias", 0.0
)
flags.DEFINE_float(
  "bias_rate", 5e-3, "step of the selection bias; 0 for balance by loss", 0.0
)
flags.DEFINE_integer("seed", 0, "seed of parameters and data", 0)

# Flags of the run.
_STEPS = flags.DEFINE_integer("steps", 600, "last step of the run", 1)
_EXTEND = flags.DEFINE_integer(
  "extend", None, "instead of --steps: number of further steps", 1
)
_OUT = flags.DEFINE_string(
  "out", None, "folder for metrics and checkpoints; default: none"
)
_SAVE_EVERY = flags.DEFINE_integer("save_every", 100, "steps per checkpoint", 1)
_SNAPSHOT_EVERY = flags.DEFINE_integer(
  "snapshot_every", 10, "steps per snapshot in memory, with --max_restarts", 1
)
_MAX_RESTARTS = flags.DEFINE_integer(
  "max_restarts", 0, "how often the run begins again after a failure", 0
)
_MIN_PROCESSES = flags.DEFINE_integer(
  "min_processes", None, "processes with which it may begin again", 1
)
_TIMEOUT_S = flags.DEFINE_float(
  "timeout_s", 300.0, "seconds without a step after which the run fails", 0.0
)
_PLOT = flags.DEFINE_string("plot", None, "picture of the run: *.png, *.svg")

_EVALUATE_EVERY = 50  # steps from one evaluation to the next

flags.adopt_module_key_flags(ranks)
ranks.require(
  "dp ep shards",
  "shards must be a multiple of dp * ep, rounded down to a power of two",
  lambda dp, ep, shards: shards % working_ranks(dp * ep) == 0,
)
ranks.require(
  "shards batch",
  "batch must be a multiple of shards, which all hold as many windows, and at"
  " least twice shards: XLA rounds a shard of one window otherwise",
  lambda shards, batch: batch % shards == 0 and batch > shards,
)
ranks.require(
  "hidden",
  f"hidden must be a multiple of {model.HEAD}, the size of an attention head",
  lambda hidden: hidden % model.HEAD == 0,
)
ranks.require(
  "hidden wire",
  "hidden must be a multiple of 128 with fp8_block128",
  lambda hidden, wire: wire != "fp8_block128" or hidden % 128 == 0,
)
ranks.require(
  "warmup decay_steps",
  "warmup must be shorter than decay_steps",
  lambda warmup, decay_steps: warmup < decay_steps,
)
ranks.require(
  "plot",
  "the name of a picture must end with .png, .svg or .pdf",
  lambda plot: plot is None or plot.endswith((".png", ".svg", ".pdf")),
)


def main(argv) -> int:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  logging.set_verbosity(logging.FATAL)  # orbax logs errors that it also raises
  if launch.inside_launcher():
    return run_ranks()
  try:
    check()  # reports an error once, not on every rank
  except (OSError, ValueError) as error:
    print(f"train_moe_lm: {error}")
    return 1
  env = {"JAX_ENABLE_PREEMPTION_SERVICE": "1"}
  if _OUT.value and _MAX_RESTARTS.value:
    # A restart finds the programs of earlier ones with as many ranks.
    env["JAX_COMPILATION_CACHE_DIR"] = str(ranks.here(_OUT.value) / "programs")
    env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
  return ranks.launch_ranks(
    __file__,
    max_restarts=_MAX_RESTARTS.value,
    min_processes=_MIN_PROCESSES.value,
    env=env,
  )


def run_ranks() -> int:
  """Runs the ranks of this process; returns the exit code."""
  # Ctrl-C terminates a rank without a traceback; the run can be continued.
  signal.signal(signal.SIGINT, signal.SIG_DFL)
  ranks.initialize(threads=_SHARDS.value)
  try:
    run()
  except (Stop, OSError) as error:
    # All processes raise the same `Stop`; one process alone can raise OSError.
    if jax.process_index() == 0 or isinstance(error, OSError):
      print(f"train_moe_lm: {error}")
    return 1
  return 0


def check() -> None:
  """Raises OSError or ValueError if the text or an output is not usable."""
  data.read(ranks.text_path(), config().length)
  if _OUT.value:
    ranks.here(_OUT.value).mkdir(parents=True, exist_ok=True)
  if _PLOT.value:
    ranks.here(_PLOT.value).open("ab").close()


def config() -> model.Config:
  fields = dataclasses.fields(model.Config)
  return model.Config(**{each.name: FLAGS[each.name].value for each in fields})


def run() -> None:
  """Trains the models, from their last checkpoints if any; prints results."""
  cfg = config()
  text = data.read(ranks.text_path(), cfg.length)
  out, picture = (
    ranks.here(flag.value) if flag.value else None for flag in (_OUT, _PLOT)
  )
  say(
    f"{ranks.DP.value} x {ranks.EP.value} (dp, ep) mesh, processes: "
    f"{jax.process_count()}\n"
    f"{(text.train.size + text.held_out.size) / 1e6:.1f} million bytes of text,"
    f" whose unigram entropy is {text.unigram:.3f} nats"
  )

  mesh = ranks.make_mesh()
  layer = ep.MoE(
    cfg.moe,
    mesh,
    max_tokens_per_rank=cfg.batch * cfg.length // cfg.shards,
    backend=ranks.BACKEND.value,
    timeout_s=_TIMEOUT_S.value,
  )
  with layer.group:
    state, moe = train(cfg, layer, mesh, text, out)
  dense = []
  if _DENSE.value:
    _, dense = train(
      cfg.dense,
      model.dense_layer,
      ranks.make_mesh(dp=mesh.size, ep=1),  # ep=1: one expert cannot be split
      text,
      out and out / "dense",
      last=int(state.step),
    )

  if out:
    say(
      f"metrics and checkpoints: {out}; the same command with --extend=100"
      " trains 100 steps more"
    )
  if jax.process_index():
    return
  if picture:
    title = describe(cfg, state)
    plot.plot_run(picture, moe, dense, text.unigram, title)
    print(f"picture: {picture}")


def train(
  cfg: model.Config,
  layer: Callable,
  mesh: Mesh,
  text: data.Data,
  out: pathlib.Path | None,
  last: int | None = None,
) -> tuple[State, list[dict[str, Any]]]:
  """Trains a model, from its last snapshot, or checkpoint in `out`, if any.

  Args:
    layer: the feed-forward layer, as in `model.apply`.
    text: the text to train on and to evaluate on.
    out: the folder of the run.
    last: the last step; by default from the flags.

  Returns:
    The state, and, on the first process, a record of each step.
  """
  state, records, folder = init(cfg, mesh), [], None
  snapshots = ep.Snapshots()
  _, snapshot = snapshots.restore(state) or (0, None)
  if out:
    folder = RunFolder(out, dataclasses.asdict(cfg) | {"text": text.digest})
    state, records = folder.restore(state, snapshot)
  elif snapshot:
    state = snapshot
  done = int(state.step)
  last = last or (done + _EXTEND.value if _EXTEND.value else _STEPS.value)
  step = Step(cfg, layer, mesh)

  def held_out(state):
    batches = [data.batch(text.held_out, n, cfg) for n in range(4)]
    return float(np.mean([step.loss(state, batch) for batch in batches]))

  say(describe(cfg, state))
  if done:
    more = "; --extend=100 adds steps" * (done >= last)
    say(f"resuming after step {done}{more}")
  bar = tqdm.tqdm(
    initial=done,
    total=last,
    unit="step",
    mininterval=1.0,
    postfix="compiling",
    file=sys.stdout,
    disable=jax.process_index() != 0 or done >= last,
  )
  with bar, ep.watch(stall_s=_TIMEOUT_S.value, exit_after_s=1.0):
    for n in range(done + 1, last + 1):
      with ep.watch.step():
        state, report = step(state, data.batch(text.train, n - 1, cfg))
        # Wait for each step: a loss that is not finite must stop the run.
        report = jax.tree.map(np.ndarray.tolist, jax.device_get(report))
      if not math.isfinite(report["loss"] + report["grad_norm"]):
        raise Stop(
          f"step {n}: the loss is {report['loss']} and the norm of its gradient"
          f" {report['grad_norm']}; start again with a lower --learning_rate or"
          " a longer --warmup."
        )
      evaluates = n % _EVALUATE_EVERY == 0
      record = {"step": n, "held_out": held_out(state) if evaluates else None}
      records.append(record | report)
      if folder:
        folder.append(records[-1])
      shown = f"loss {report['loss']:.3f} (unigram {text.unigram:.3f})"
      if cfg.num_experts > 1:
        shown += f", max/mean load {max(report['imbalance']):.2f}"
        shown += f", dropped {sum(report['dropped']):.0f}"
      bar.set_postfix_str(shown, refresh=False)
      bar.update()
      is_preempted = ranks.preempted(n)
      if folder and (n % _SAVE_EVERY.value == 0 or n == last or is_preempted):
        folder.save(state)
        if not bar.disable:
          bar.write(f"step {n}: saved in {out}", file=sys.stdout)
      if is_preempted:
        raise Stop(f"step {n}: the machine is about to go away.")
      if n % _SNAPSHOT_EVERY.value == 0:
        snapshots.take(n, state)

  reached = f"{held_out(state):.3f} nats per byte on text that was held out"
  if losses := [each["loss"] for each in records[-20:]]:
    mean = sum(losses) / len(losses)
    reached = f"loss {mean:.3f} in the last {len(losses)} steps, {reached}"
  say(reached)
  return state, records


def describe(cfg: model.Config, state: State) -> str:
  count = sum(x.size for x in jax.tree.leaves(state.params))
  inside = f"of {cfg.num_experts} experts, top {cfg.top_k}"
  inside += f", with {cfg.wire} rows" if cfg.wire else ""
  if cfg.num_experts == 1:
    inside = f"without experts, of the inner size {cfg.inner}"
  return f"{count / 1e6:.1f} million parameters, {cfg.layers} layers {inside}"


def say(line: str) -> None:
  if jax.process_index() == 0:
    print(line)


if __name__ == "__main__":
  app.run(main)
