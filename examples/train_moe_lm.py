# SPDX-License-Identifier: Apache-2.0
"""Trains a mixture-of-experts language model on the bytes of a text.

    bazel run //examples:train_moe_lm
    bazel run //examples:train_moe_lm -- --text=$PWD/docs --out=run

starts the ranks of a (dp, ep) mesh as processes on this host, or joins a
launcher that has started them. With --out the run leaves metrics and
checkpoints in a folder. The same command continues it when it was stopped, and
--extend adds steps to those that are done.
docs/training.md has the details; the folder lm has the parts.
"""

import dataclasses
import signal
import sys

from absl import app, flags, logging
import jax
import numpy as np

import ep
from ep import launch
from lm import data, loop, model, outputs, plot, sample, train
from lm.checkpoint import Checkpoints
from lm.metrics import History, Progress
from lm.processes import agree, first_does, Stop
import ranks
import text as texts

FLAGS = flags.FLAGS

_LAYERS = flags.DEFINE_integer("layers", 4, "layers, all with experts", 1)
_HIDDEN = flags.DEFINE_integer("hidden", 128, "hidden size", 1)
_HEADS = flags.DEFINE_integer("heads", 4, "attention heads", 1)
_INNER = flags.DEFINE_integer("inner", 256, "inner size of an expert", 1)
_SCORE = flags.DEFINE_enum(
  "score", "softmax", ["softmax", "sigmoid"], "what the router scores with"
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
_SEED = flags.DEFINE_integer("seed", 0, "of parameters, data and samples", 0)

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

_PROMPTS = flags.DEFINE_multi_string(
  "prompt", ["def ", "import "], "what samples begin with; may be repeated"
)
_SAMPLE_BYTES = flags.DEFINE_integer("sample_bytes", 200, "0 for no samples", 0)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "of samples", 0.0)

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
  "warmup decay_steps",
  "warmup must be shorter than decay_steps",
  lambda warmup, decay_steps: warmup < decay_steps,
)
ranks.require(
  "prompt", "a prompt has at least one byte", lambda prompts: all(prompts)
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
  """Hides the tracebacks that orbax prints of errors that it raises, too.

  It also abandons the other writes, each of which then finds no event loop.
  """
  logging.set_verbosity(logging.FATAL)

  def report(unraisable):
    if str(unraisable.exc_value) != "Event loop is closed":
      sys.__unraisablehook__(unraisable)

  sys.unraisablehook = report


def run() -> None:
  """Trains, from the last checkpoint if there is one, then writes samples."""
  text, windows, held_out = agree(read_text)
  first_does(check_outputs)
  unigram = data.unigram_entropy(text)
  model_config, train_config = configs()
  mesh = ranks.make_mesh()
  with ep.ep_bootstrap(
    mesh,
    num_experts=ranks.NUM_EXPERTS.value,
    max_tokens_per_rank=windows.tokens // _SHARDS.value,
    hidden_dim=_HIDDEN.value,
    top_k=ranks.TOP_K.value,
    backend=ranks.BACKEND.value,
  ) as group:
    layer = ep.MoE(model_config.moe, group)
    state = checkpoints = metrics_path = None
    if _OUT.value:
      checkpoints = Checkpoints(
        ranks.here(_OUT.value) / "checkpoints",
        dataclasses.asdict(model_config)
        | dataclasses.asdict(train_config)
        | {"text": data.digest(text)}
        | {flag.name: flag.value for flag in (_BATCH, _SHARDS, _LENGTH, _SEED)},
      )
      state = checkpoints.restore(
        train.abstract(mesh, model_config, train_config)
      )
      metrics_path = ranks.here(_OUT.value) / "metrics.jsonl"
    if state is None:
      state = train.init(mesh, _SEED.value, model_config, train_config)
    done = int(state.step)
    steps = done + _EXTEND.value if _EXTEND.value else _STEPS.value
    is_first = jax.process_index() == 0
    history = agree(lambda: History(metrics_path if is_first else None, done))
    introduce(text, unigram, state, steps)
    step = train.Step(layer, model_config, train_config, _SHARDS.value)

    def loss_on_held_out(state):
      return float(np.mean([step.loss(state, each) for each in held_out]))

    with Progress(done, steps, windows.tokens, unigram) as progress:
      state = loop.run(
        step,
        state,
        windows,
        steps=steps,
        held_out=loss_on_held_out,
        evaluate_every=_EVALUATE_EVERY.value,
        save_every=_SAVE_EVERY.value,
        history=history,
        progress=progress,
        checkpoints=checkpoints,
      )
    write_samples(state, model_config, layer)
    if _PLOT.value:
      picture, title = ranks.here(_PLOT.value), describe(state)
      first_does(lambda: plot.plot(history.records, picture, unigram, title))
    conclude(history.records, loss_on_held_out(state), progress.tokens_per_s)


def describe(state) -> str:
  """Returns the configuration in a line."""
  count = sum(x.size for x in jax.tree.leaves(state.params))
  return (
    f"{count / 1e6:.1f} million parameters, {_LAYERS.value} layers of "
    f"{ranks.NUM_EXPERTS.value} experts, top {ranks.TOP_K.value}"
  )


def introduce(text, unigram, state, steps) -> None:
  """Prints what is about to run."""
  if jax.process_index():
    return
  decay = _DECAY_STEPS.value
  then = (
    f", and constant to step {steps}"
    if steps > decay
    else ", which this run does not reach" * (steps < decay)
  )
  print(
    f"{ranks.DP.value} x {ranks.EP.value} (dp, ep) mesh, processes: "
    f"{jax.process_count()}\n"
    f"{describe(state)}\n"
    f"{text.size / 1e6:.1f} million bytes of text, whose unigram entropy is "
    f"{unigram:.3f} nats\n"
    f"learning rate {_LEARNING_RATE.value:g} after step {_WARMUP.value}, "
    f"{configs()[1].last_rate:g} after step {decay} (--decay_steps){then}"
  )
  if ranks.num_ranks().bit_count() > 1:
    print(
      f"{ranks.num_ranks()} ranks are not a power of two, so the last bits"
      " of this run are not those of other meshes (docs/training.md)"
    )
  if done := int(state.step):
    more = "; --extend=100 adds steps" * (done >= steps)
    print(f"resuming after step {done}{more}")


def conclude(records, held_out, tokens_per_s) -> None:
  """Prints what the run has reached, and where it is."""
  if jax.process_index():
    return
  last = [each["loss"] for each in records[-20:]]
  print()
  if last:
    print(f"loss {np.mean(last):.3f} in the last {len(last)} steps", end=", ")
  print(f"{held_out:.3f} nats per byte on text that was held out")
  if tokens_per_s:
    print(f"{tokens_per_s:,.0f} tokens/s")
  if _PLOT.value:
    print(f"picture: {ranks.here(_PLOT.value)}")
  if _OUT.value:
    print(
      f"metrics and checkpoints: {ranks.here(_OUT.value)}; the same command"
      " with --extend=100 trains 100 steps more"
    )


def write_samples(state, model_config, layer) -> None:
  if not _SAMPLE_BYTES.value:
    return
  samples = sample.generate(
    state.params,
    model_config,
    layer,
    [prompt.encode() for prompt in _PROMPTS.value],
    moe_state=state.moe,
    count=_SAMPLE_BYTES.value,
    temperature=_TEMPERATURE.value,
    seed=_SEED.value,
  )
  if jax.process_index() == 0:
    for each in samples:
      print(f"\n--- {each.decode(errors='replace')}")


def read_text() -> tuple[np.ndarray, data.Windows, list[np.ndarray]]:
  """Returns the text, the batches of it, and batches that are held out."""
  text = texts.read(ranks.text_path(), _TEXT_BYTES.value)
  trained, held_out = (
    data.Windows(part, _BATCH.value, _LENGTH.value, _SEED.value)
    for part in data.split(text, _LENGTH.value)
  )
  return text, trained, [held_out[i] for i in range(4)]


def check_outputs() -> None:
  """Raises OSError or ValueError if what is asked for cannot be written."""
  if _OUT.value:
    outputs.check("--out", ranks.here(_OUT.value), "folder")
  if _PLOT.value:
    plot.check(ranks.here(_PLOT.value))
    outputs.check("--plot", ranks.here(_PLOT.value), "file")


def configs() -> tuple[model.ModelConfig, train.TrainConfig]:
  """Returns what the flags say; a field is named like its flag."""
  return tuple(
    config(**{f.name: FLAGS[f.name].value for f in dataclasses.fields(config)})
    for config in (model.ModelConfig, train.TrainConfig)
  )


if __name__ == "__main__":
  app.run(main)
