# SPDX-License-Identifier: Apache-2.0
"""Trains a mixture-of-experts language model on the bytes of a text.

    bazel run //examples:train_moe_lm
    bazel run //examples:train_moe_lm -- --text=$PWD/docs --out=run

starts the ranks of a (dp, ep) mesh as processes on this host, or joins a
launcher that has started them. With --out the run leaves metrics and
checkpoints in a folder, and the same command continues it when it was stopped.
docs/training.md has the details; ep/examples/lm has the parts.
"""

import dataclasses
import os
import pathlib
import signal
import sys

from absl import app, flags, logging
import jax
import jax.numpy as jnp
import numpy as np

import ep
from ep import launch
from ep.examples import mesh_flags
from ep.examples import text as texts
from ep.examples.lm import data, loop, model, outputs, plot, sample, train
from ep.examples.lm.checkpoint import Checkpoints
from ep.examples.lm.metrics import History, Progress
from ep.examples.lm.processes import agree, first_does, Stop

FLAGS = flags.FLAGS

_BACKEND = flags.DEFINE_string("backend", None, "ep's; default: by platform")

_LAYERS = flags.DEFINE_integer("layers", 4, "layers, all with experts", 1)
_HIDDEN = flags.DEFINE_integer("hidden", 128, "hidden size", 1)
_HEADS = flags.DEFINE_integer("heads", 4, "attention heads", 1)
_INNER = flags.DEFINE_integer("inner", 256, "inner size of an expert", 1)
_SCORE = flags.DEFINE_enum(
  "score", "softmax", ["softmax", "sigmoid"], "what the router scores with"
)

_STEPS = flags.DEFINE_integer("steps", 600, "training steps", 1)
_BATCH = flags.DEFINE_integer("batch", 16, "windows of text in a step", 1)
_SHARDS = flags.DEFINE_integer(
  "shards", 4, "parts of a batch; a rank works on one of them at a time", 1
)
_LENGTH = flags.DEFINE_integer("length", 128, "bytes of a window", 1)
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 3e-3, "at its peak", 0.0)
_WARMUP = flags.DEFINE_integer("warmup", 50, "steps up to that peak", 0)
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

_TEXT = flags.DEFINE_string(
  "text", None, "file or folder; default: Python's standard library"
)
_TEXT_BYTES = flags.DEFINE_integer(
  "text_bytes", 8_000_000, "of a longer text only these are read", 1
)
_OUT = flags.DEFINE_string(
  "out", None, "folder of metrics and checkpoints; default: nothing is kept"
)
_SAVE_EVERY = flags.DEFINE_integer("save_every", 100, "steps", 1)
_PLOT = flags.DEFINE_string("plot", None, "picture of the run: *.png, *.svg")

_PROMPTS = flags.DEFINE_multi_string(
  "prompt", ["def ", "import "], "what samples begin with; may be repeated"
)
_SAMPLE_BYTES = flags.DEFINE_integer("sample_bytes", 200, "0 for no samples", 0)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "of samples", 0.0)


flags.adopt_module_key_flags(mesh_flags)


@flags.multi_flags_validator(
  ["dp", "ep", "shards"],
  message="shards must be a multiple of dp * ep: all ranks work on as many",
)
def _ranks_divide_shards(values) -> bool:
  return values["shards"] % (values["dp"] * values["ep"]) == 0


@flags.multi_flags_validator(
  ["shards", "batch"],
  message="batch must be a multiple of shards, which all hold as many windows,"
  " and at least twice shards: XLA rounds a shard of one window otherwise",
)
def _shards_divide_batch(values) -> bool:
  windows, rest = divmod(values["batch"], values["shards"])
  return rest == 0 and windows > 1


@flags.multi_flags_validator(
  ["hidden", "heads"],
  message="hidden must be a multiple of 2 * heads: dimensions rotate in pairs",
)
def _heads_divide_hidden(values) -> bool:
  return values["hidden"] % (2 * values["heads"]) == 0


@flags.multi_flags_validator(
  ["steps", "warmup"], message="warmup must be shorter than steps"
)
def _warmup_ends(values) -> bool:
  return values["warmup"] < values["steps"]


@flags.validator("prompt", message="a prompt has at least one byte")
def _prompts_are_not_empty(prompts) -> bool:
  return all(prompts)


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
  return mesh_flags.launch_ranks(__file__)


def run_ranks() -> int:
  """Runs the ranks of this process; returns the exit code."""
  silence_native_code()
  silence_failed_writes()
  # Ctrl-C ends a rank at once and without a traceback; a run resumes after it.
  signal.signal(signal.SIGINT, signal.SIG_DFL)
  # This sets the number of XLA's threads on CPU. XLA may split the sum of a
  # matmul by it, so it must not depend on the ranks or the machine.
  os.environ["NPROC"] = str(_SHARDS.value)
  launch.initialize()
  try:
    run()
  except Stop as stop:
    return fail(stop) if jax.process_index() == 0 else 1
  return 0


def fail(error: Exception) -> int:
  print(f"train_moe_lm: {error}", flush=True)
  return 1


def silence_native_code() -> None:
  """Leaves stdout to Python; XLA's transport between processes prints there."""
  sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
  with open(os.devnull, "wb") as nowhere:
    os.dup2(nowhere.fileno(), 1)


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
  text, windows = agree(read_text)
  first_does(check_outputs)
  unigram = data.unigram_entropy(text)
  model_config, train_config = configs()
  mesh = mesh_flags.make_mesh()
  with ep.ep_bootstrap(
    mesh,
    num_experts=mesh_flags.NUM_EXPERTS.value,
    max_tokens_per_rank=windows.tokens // _SHARDS.value,
    hidden_dim=_HIDDEN.value,
    top_k=mesh_flags.TOP_K.value,
    max_token_dtype=jnp.float32,
    backend=_BACKEND.value,
  ) as group:
    layer = model_config.moe.layer(group)
    state = checkpoints = metrics_path = None
    if _OUT.value:
      checkpoints = Checkpoints(
        here(_OUT.value) / "checkpoints",
        dataclasses.asdict(model_config)
        | dataclasses.asdict(train_config)
        | {"text": data.digest(text)}
        | {flag.name: flag.value for flag in (_BATCH, _SHARDS, _LENGTH, _SEED)},
      )
      state = checkpoints.restore(
        train.abstract(mesh, model_config, train_config)
      )
      metrics_path = here(_OUT.value) / "metrics.jsonl"
    if state is None:
      state = train.init(mesh, _SEED.value, model_config, train_config)
    done = int(state.step)
    is_first = jax.process_index() == 0
    history = agree(lambda: History(metrics_path if is_first else None, done))
    introduce(text, unigram, state)
    with Progress(done, _STEPS.value, windows.tokens, unigram) as progress:
      state = loop.run(
        train.Step(layer, model_config, train_config, _SHARDS.value),
        state,
        windows,
        steps=_STEPS.value,
        save_every=_SAVE_EVERY.value,
        history=history,
        progress=progress,
        checkpoints=checkpoints,
      )
    write_samples(state, model_config, layer)
    if _PLOT.value:
      first_does(lambda: plot.plot(history.records, here(_PLOT.value), unigram))


def introduce(text, unigram, state) -> None:
  """Prints what is about to run."""
  if jax.process_index():
    return
  count = sum(x.size for x in jax.tree.leaves(state.params))
  print(
    f"{mesh_flags.DP.value} x {mesh_flags.EP.value} (dp, ep) mesh, processes: "
    f"{jax.process_count()}\n"
    f"{count / 1e6:.1f} million parameters, {_LAYERS.value} layers of "
    f"{mesh_flags.NUM_EXPERTS.value} experts, top {mesh_flags.TOP_K.value}\n"
    f"{text.size / 1e6:.1f} million bytes of text, whose unigram entropy is "
    f"{unigram:.3f} nats"
  )
  if mesh_flags.num_ranks().bit_count() > 1:
    print(
      f"{mesh_flags.num_ranks()} ranks are not a power of two, so the last bits"
      " of this run are not those of other meshes (docs/training.md)"
    )
  if state.step:
    print(f"resuming after step {state.step}")


def write_samples(state, model_config, layer) -> None:
  if not _SAMPLE_BYTES.value:
    return
  samples = sample.generate(
    state.params,
    model_config,
    layer,
    [prompt.encode() for prompt in _PROMPTS.value],
    bias=state.bias,
    count=_SAMPLE_BYTES.value,
    temperature=_TEMPERATURE.value,
    seed=_SEED.value,
  )
  if jax.process_index() == 0:
    for each in samples:
      print(f"\n--- {each.decode(errors='replace')}")


def read_text() -> tuple[np.ndarray, data.Windows]:
  """Returns the text and the batches of it."""
  path = here(_TEXT.value or texts.standard_library())
  text = texts.read_at_most(path, _TEXT_BYTES.value)
  return text, data.Windows(text, _BATCH.value, _LENGTH.value, _SEED.value)


def check_outputs() -> None:
  """Raises OSError or ValueError if what is asked for cannot be written."""
  if _OUT.value:
    outputs.check_folder("--out", here(_OUT.value))
  if _PLOT.value:
    plot.check(here(_PLOT.value))
    outputs.check_file("--plot", here(_PLOT.value))


def here(path: str | os.PathLike) -> pathlib.Path:
  """Returns a path of the user's, whose folder `bazel run` changes."""
  return pathlib.Path(os.environ.get("BUILD_WORKING_DIRECTORY", ""), path)


def configs() -> tuple[model.ModelConfig, train.TrainConfig]:
  """Returns what the flags say; a field is named like its flag."""
  return tuple(
    config(**{f.name: FLAGS[f.name].value for f in dataclasses.fields(config)})
    for config in (model.ModelConfig, train.TrainConfig)
  )


if __name__ == "__main__":
  app.run(main)
