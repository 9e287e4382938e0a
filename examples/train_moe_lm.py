# SPDX-License-Identifier: Apache-2.0
"""Trains a mixture-of-experts language model on the bytes of a text.

    bazel run //examples:train_moe_lm
    bazel run //examples:train_moe_lm -- --text=$PWD/docs --out=run

starts the ranks of a (dp, ep) mesh as processes on this host, or joins a
launcher that has started them. With --out the run leaves metrics and
checkpoints in a folder. The same command continues it when it was stopped, and
--extend adds steps to those that are done. --dense then trains a dense model of
the same active size on the same batches.
docs/training.md has the details; the folder lm has the parts.
"""

import contextlib
import dataclasses
import pathlib
import signal
import sys
from typing import NamedTuple

from absl import app, flags, logging
import jax
from jax.sharding import Mesh
import numpy as np

import ep
from ep import launch
from lm import data, loop, model, outputs, plot, timeline, train
from lm.checkpoint import Checkpoints
from lm.metrics import History, Progress, Record
from lm.placing import Placing
from lm.processes import agree, first_does, Stop
import ranks
import text as texts

FLAGS = flags.FLAGS

_LAYERS = flags.DEFINE_integer("layers", 4, "layers, all with experts", 1)
_HIDDEN = flags.DEFINE_integer("hidden", 128, "hidden size", 1)
_HEADS = flags.DEFINE_integer("heads", 4, "attention heads", 1)
_INNER = flags.DEFINE_integer("inner", 256, "inner size of an expert", 1)
_DENSE = flags.DEFINE_bool(
  "dense", False, "also train a dense model of the same active size"
)
_SCORE = flags.DEFINE_enum(
  "score", "softmax", ["softmax", "sigmoid", "sqrtsoftplus"], "of the router"
)
_BLOCKS = {"mxfp8": 32, "fp8_block128": 128}  # elements that share a scale
_WIRE = flags.DEFINE_enum(
  "wire", None, _BLOCKS, "how rows travel to experts; default: exact"
)

_STEPS = flags.DEFINE_integer("steps", 600, "where a run ends", 1)
_EXTEND = flags.DEFINE_integer(
  "extend", None, "or else, steps after those that are done", 1
)
_BATCH = flags.DEFINE_integer("batch", 16, "windows of text in a step", 1)
_SHARDS = flags.DEFINE_integer(
  "shards", 4, "parts of a batch; a rank works on one of them at a time", 1
)
_LENGTH = flags.DEFINE_integer("length", 128, "bytes of a window", 1)
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 3e-3, "at its peak", 0.0)
_WARMUP = flags.DEFINE_integer("warmup", 50, "steps up to that peak", 0)
_DECAY_STEPS = flags.DEFINE_integer(
  "decay_steps", 600, "steps after which the rate is a tenth, and stays", 1
)
_WEIGHT_DECAY = flags.DEFINE_float("weight_decay", 0.1, "of AdamW", 0.0)
_CLIP = flags.DEFINE_float("clip", 1.0, "largest norm of the gradient", 0.0)
_AUX_LOSS = flags.DEFINE_float(
  "aux_loss", 1e-2, "weight of the balancing loss; 0 for balance by bias", 0.0
)
_Z_LOSS = flags.DEFINE_float("z_loss", 1e-3, "weight of the router's z loss", 0)
_BIAS_RATE = flags.DEFINE_float(
  "bias_rate", 5e-3, "step of the selection bias; 0 for balance by loss", 0.0
)
_PLACEMENT_EVERY = flags.DEFINE_integer(
  "placement_every", 0, "steps after which experts are placed anew; 0: never", 0
)
_REPLICAS = flags.DEFINE_integer(
  "replicas", 0, "slots of a rank for copies of hot experts, in each step", 0
)
_SEED = flags.DEFINE_integer("seed", 0, "of parameters and data", 0)

_TEXT_BYTES = flags.DEFINE_integer(
  "text_bytes", 8_000_000, "of a longer text only these are read", 1
)
_OUT = flags.DEFINE_string(
  "out", None, "folder of metrics and checkpoints; default: nothing is kept"
)
_SAVE_EVERY = flags.DEFINE_integer("save_every", 100, "steps", 1)
_EVALUATE_EVERY = flags.DEFINE_integer(
  "evaluate_every", 50, "steps from one loss on held-out text to the next", 1
)
_PLOT = flags.DEFINE_string("plot", None, "picture of the run: *.png, *.svg")
_TRACE = flags.DEFINE_string(
  "trace", None, "trace of all ranks, which is explained at the end: *.json.gz"
)

flags.adopt_module_key_flags(ranks)
ranks.require(
  "dp ep shards",
  "shards must be a multiple of dp * ep: all ranks work on as many",
  lambda dp, ep, shards: shards % (dp * ep) == 0,
)
ranks.require(
  "shards batch",
  "batch must be a multiple of shards, which all hold as many windows, and at"
  " least twice shards: XLA rounds a shard of one window otherwise",
  lambda shards, batch: batch % shards == 0 and batch > shards,
)
ranks.require(
  "hidden heads",
  "hidden must be a multiple of 2 * heads: dimensions rotate in pairs",
  lambda hidden, heads: hidden % (2 * heads) == 0,
)
ranks.require(
  "hidden wire",
  "hidden must be a multiple of 32 with mxfp8, of 128 with fp8_block128",
  lambda hidden, wire: hidden % _BLOCKS.get(wire, 1) == 0,
)
ranks.require(
  "warmup decay_steps",
  "warmup must be shorter than decay_steps",
  lambda warmup, decay_steps: warmup < decay_steps,
)


def main(argv) -> int:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  logging.set_verbosity(logging.ERROR)
  if launch.inside_launcher():
    return run_ranks()
  try:
    # Here an error is reported once, not by every rank.
    read_text()
    check_outputs()
  except (OSError, ValueError) as error:
    return fail(error)
  return ranks.launch_ranks(__file__)


def run_ranks() -> int:
  """Runs the ranks of this process; returns the exit code."""
  silence_failed_writes()
  # Ctrl-C ends a rank at once and without a traceback; a run resumes after it.
  signal.signal(signal.SIGINT, signal.SIG_DFL)
  ranks.initialize(threads=_SHARDS.value)
  try:
    run()
  except Stop as stop:
    return fail(stop) if jax.process_index() == 0 else 1
  return 0


def fail(error: Exception) -> int:
  print(f"train_moe_lm: {error}", flush=True)
  return 1


def silence_failed_writes() -> None:
  """Hides the tracebacks that orbax prints; it raises the same errors.

  It also abandons the other writes, each of which then finds no event loop.
  """
  logging.set_verbosity(logging.FATAL)

  def report(unraisable):
    if str(unraisable.exc_value) != "Event loop is closed":
      sys.__unraisablehook__(unraisable)

  sys.unraisablehook = report


class Text(NamedTuple):
  """The text of a run, and its parts."""

  bytes: np.ndarray
  windows: data.Windows
  held_out: list[np.ndarray]  # batches
  unigram: float  # entropy


class Trained(NamedTuple):
  """A model that has been trained, and how that went."""

  config: model.ModelConfig
  state: train.State
  records: list[Record]
  held_out: float  # loss
  tokens_per_s: float | None  # None if there was at most one step


def run() -> None:
  """Trains, from the last checkpoint if there is one, and tells the result."""
  text = agree(read_text)
  first_does(check_outputs)
  config = configs()[0]
  mesh = ranks.make_mesh()
  out = ranks.here(_OUT.value) if _OUT.value else None
  with ep.ep_bootstrap(
    mesh,
    num_experts=ranks.NUM_EXPERTS.value + ranks.EP.value * _REPLICAS.value,
    max_tokens_per_rank=text.windows.tokens // _SHARDS.value,
    hidden_dim=_HIDDEN.value,
    top_k=ranks.TOP_K.value,
    backend=ranks.BACKEND.value,
  ) as group:
    layer = ep.MoE(config.moe, group)
    introduce(text)
    with traced(group):
      moe = train_model(text, mesh, layer, config, out)
  dense = None
  if _DENSE.value:
    dense = train_model(
      text,
      # One expert is not split.
      ranks.make_mesh(dp=ranks.num_ranks(), ep=1),
      model.dense_layer,
      config.dense,
      out and out / "dense",
      int(moe.state.step),
    )
  if _PLOT.value:
    picture = ranks.here(_PLOT.value)
    first_does(
      lambda: plot.plot(
        moe.records,
        picture,
        text.unigram,
        dense.records if dense else (),
        describe(moe.config, moe.state),
      )
    )
  conclude(moe, dense)
  if _TRACE.value:
    first_does(lambda: print(ep.explain(ranks.here(_TRACE.value))))
  if _TRACE.value and _PLOT.value:
    picture = ranks.here(_PLOT.value)
    picture = picture.with_stem(f"{picture.stem}_trace")
    first_does(lambda: timeline.plot(ranks.here(_TRACE.value), picture))


def traced(group: ep.EpGroup) -> contextlib.AbstractContextManager[None]:
  """Returns a context whose exchanges are written to the file of --trace."""
  if _TRACE.value:
    return ep.trace(group, ranks.here(_TRACE.value))
  return contextlib.nullcontext()


def train_model(
  text: Text,
  mesh: Mesh,
  layer: model.Layer,
  config: model.ModelConfig,
  out: pathlib.Path | None,
  steps: int | None = None,
) -> Trained:
  """Trains a model, from its last checkpoint in `out` if there is one.

  The model is trained up to step `steps`, or up to the one that flags name.
  """
  train_config = configs()[1]
  state = checkpoints = metrics_path = None
  if out:
    checkpoints = Checkpoints(
      out / "checkpoints",
      dataclasses.asdict(config)
      | dataclasses.asdict(train_config)
      | {"text": data.digest(text.bytes)}
      | {flag.name: flag.value for flag in (_BATCH, _SHARDS, _LENGTH, _SEED)},
    )
    state = checkpoints.restore(train.abstract(mesh, config, train_config))
    metrics_path = out / "metrics.jsonl"
  if state is None:
    state = train.init(mesh, _SEED.value, config, train_config)
  done = int(state.step)
  if steps is None:
    steps = done + _EXTEND.value if _EXTEND.value else _STEPS.value
  is_first = jax.process_index() == 0
  history = agree(lambda: History(metrics_path if is_first else None, done))
  introduce_model(config, state, steps)
  step = train.Step(mesh, layer, config, train_config, _SHARDS.value)
  is_moe = isinstance(layer, ep.MoE)
  placing = Placing(
    layer.group if is_moe else None,
    train.partition_specs(config, train_config),
    train.in_order(config),
    _PLACEMENT_EVERY.value if is_moe else 0,
  )

  def loss_on_held_out(state):
    return float(np.mean([step.loss(state, each) for each in text.held_out]))

  with Progress(done, steps, text.windows.tokens, text.unigram) as progress:
    state = loop.run(
      step,
      state,
      text.windows,
      steps=steps,
      held_out=loss_on_held_out,
      evaluate_every=_EVALUATE_EVERY.value,
      save_every=_SAVE_EVERY.value,
      history=history,
      progress=progress,
      checkpoints=checkpoints,
      placing=placing,
    )
  return Trained(
    config,
    state,
    history.records,
    loss_on_held_out(state),
    progress.tokens_per_s,
  )


def describe(config: model.ModelConfig, state: train.State) -> str:
  """Returns the configuration in a line."""
  count = sum(x.size for x in jax.tree.leaves(state.params))
  inside = f"of {config.num_experts} experts, top {config.top_k}"
  inside += f", whose rows travel as {config.wire}" if config.wire else ""
  if config.num_experts == 1:
    inside = f"without experts, of the inner size {config.inner}"
  return (
    f"{count / 1e6:.1f} million parameters, {config.layers} layers {inside}"
  )


def introduce(text: Text) -> None:
  """Prints what is about to run."""
  if jax.process_index():
    return
  print(
    f"{ranks.DP.value} x {ranks.EP.value} (dp, ep) mesh, processes: "
    f"{jax.process_count()}\n"
    f"{text.bytes.size / 1e6:.1f} million bytes of text, whose unigram entropy"
    f" is {text.unigram:.3f} nats"
  )
  if ranks.num_ranks().bit_count() > 1:
    print(
      f"{ranks.num_ranks()} ranks are not a power of two, so the last bits"
      " of this run are not those of other meshes (docs/training.md)"
    )


def introduce_model(config, state, steps) -> None:
  """Prints what is about to be trained, and from where on."""
  if jax.process_index():
    return
  print(
    f"{describe(config, state)}\n"
    f"learning rate {_LEARNING_RATE.value:g} after step {_WARMUP.value},"
    f" {configs()[1].last_rate:g} from step {_DECAY_STEPS.value} on"
  )
  if done := int(state.step):
    more = "; --extend=100 adds steps" * (done >= steps)
    print(f"resuming after step {done}{more}")


def conclude(moe: Trained, dense: Trained | None) -> None:
  """Prints what the run has reached, and where it is."""
  if jax.process_index():
    return
  print()
  for name, each in [("", moe), *([("dense: ", dense)] if dense else [])]:
    print(name + reached(each))
  if _PLOT.value:
    print(f"picture: {ranks.here(_PLOT.value)}")
  if _TRACE.value:
    print(f"trace: {ranks.here(_TRACE.value)}")
  if _OUT.value:
    print(
      f"metrics and checkpoints: {ranks.here(_OUT.value)}; the same command"
      " with --extend=100 trains 100 steps more"
    )


def reached(trained: Trained) -> str:
  """Returns the losses and the speed of a model in a line."""
  last = [each["loss"] for each in trained.records[-20:]]
  parts = [f"{trained.held_out:.3f} nats per byte on text that was held out"]
  if last:
    parts.insert(0, f"loss {np.mean(last):.3f} in the last {len(last)} steps")
  if trained.tokens_per_s:
    parts.append(f"{trained.tokens_per_s:,.0f} tokens/s")
  return ", ".join(parts)


def read_text() -> Text:
  text = texts.read(ranks.text_path(), _TEXT_BYTES.value)
  trained, held_out = (
    data.Windows(part, _BATCH.value, _LENGTH.value, _SEED.value)
    for part in data.split(text, _LENGTH.value)
  )
  batches = [held_out[i] for i in range(4)]
  return Text(text, trained, batches, data.unigram_entropy(text))


def check_outputs() -> None:
  """Raises OSError or ValueError if what is asked for cannot be written."""
  if _OUT.value:
    outputs.check("--out", ranks.here(_OUT.value), "folder")
  if _PLOT.value:
    plot.check(ranks.here(_PLOT.value))
    outputs.check("--plot", ranks.here(_PLOT.value), "file")
  if _TRACE.value:
    outputs.check("--trace", ranks.here(_TRACE.value), "file")


def configs() -> tuple[model.ModelConfig, train.TrainConfig]:
  """Returns what the flags say; a field is named like its flag."""
  return tuple(
    config(**{f.name: FLAGS[f.name].value for f in dataclasses.fields(config)})
    for config in (model.ModelConfig, train.TrainConfig)
  )


if __name__ == "__main__":
  app.run(main)
