# SPDX-License-Identifier: Apache-2.0
"""Trains a mixture-of-experts language model on the bytes of a text.

    bazel run //examples:train_moe_lm
    bazel run //examples:train_moe_lm -- --text=$PWD/docs --out=run

starts the ranks of a (dp, ep) mesh as processes on this host, or joins the
ranks of a launcher. With --out, the program saves checkpoints in a folder and
draws the losses. The same command continues a run that was interrupted, also
on another mesh. docs/howto/train.md explains the program.
"""

import functools
import math
import pathlib
from typing import NamedTuple

from absl import app, flags
import jax
from jax import lax, NamedSharding, P
import jax.numpy as jnp
from jax.scipy.special import entr
from matplotlib.figure import Figure
import numpy as np
import optax
import orbax.checkpoint as ocp
import tqdm

import ep
import ranks

HEAD = 32  # dimensions of an attention head

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(ranks)
flags.DEFINE_integer("layers", 4, "layers, all with experts", 2)
flags.DEFINE_integer("hidden", 128, "hidden size", HEAD)
flags.DEFINE_integer("inner", 256, "inner size of an expert", 1)
flags.DEFINE_integer("batch", 16, "windows of text in a step", 1)
flags.DEFINE_integer("length", 128, "bytes of a window", 1, 2048)
flags.DEFINE_integer(
  "shards", 4, "shards of a batch; a rank works on one shard at a time", 1
)
flags.DEFINE_float("learning_rate", 3e-3, "peak learning rate", 0.0)
flags.DEFINE_integer("steps", 600, "steps of the run", 1)
flags.DEFINE_integer("save_every", 100, "steps per checkpoint", 1)
flags.DEFINE_string("out", None, "folder for checkpoints and losses")
flags.DEFINE_bool(
  "deterministic", False, "compute the same bits on any number of ranks"
)

BLOCK = 4096  # bytes; every 20th block of the text is held out
WARMUP = 50  # steps until the peak learning rate
EVALUATE_EVERY = 50  # steps
AUX_LOSS = 1e-2  # weight of the balancing loss
BIAS_RATE = 5e-3  # step of the selection bias

ranks.require(
  "batch shards dp ep",
  "shards must be a power of two and not less than dp * ep, and batch a"
  " multiple of shards, of at least two windows each",
  lambda batch, shards, dp, ep: (
    shards.bit_count() == 1 and dp * ep <= shards < batch and not batch % shards
  ),
)


# Data. A batch depends only on its number, so a resumed run reads the batches
# of an uninterrupted run, and a checkpoint needs no position in the text.


def read_text() -> tuple[np.ndarray, np.ndarray]:
  """Returns the training bytes and the held-out bytes."""
  text = ranks.read_text(limit=8_000_000, least=2 * BLOCK)
  blocks = text[: text.size // BLOCK * BLOCK].reshape(-1, BLOCK)
  return np.delete(blocks, np.s_[::20], axis=0).ravel(), blocks[::20].ravel()


def read_batch(text: np.ndarray, number: int) -> np.ndarray:
  """Returns random windows of a text, int32 `[B, S + 1]`."""
  starts = np.random.default_rng(number).integers(
    text.size - FLAGS.length, size=FLAGS.batch
  )
  return text[starts[:, None] + np.arange(FLAGS.length + 1)]


# Model: a decoder-only transformer in ordinary JAX.


def init_params(layer: ep.MoE):
  """Returns the parameters; arrays of "blocks" have a leading layer axis."""
  n, h, heads = FLAGS.layers, FLAGS.hidden, FLAGS.hidden // HEAD
  keys = jax.random.split(jax.random.key(0), 5)

  def normal(key, *shape):
    return jax.random.normal(key, shape) * h**-0.5

  return {
    "embed": normal(keys[0], ranks.VOCABULARY, h),
    "blocks": {
      "qkv": normal(keys[1], n, 3, h, heads, HEAD),
      "out": normal(keys[2], n, heads, HEAD, h),
      "moe": jax.vmap(layer.init)(jax.random.split(keys[3], n)),
    },
    "unembed": normal(keys[4], h, ranks.VOCABULARY),
  }


def apply(params, layer: ep.MoE, tokens, moe: ep.moe.State, mask):
  """Returns the logits of each next byte, and the metrics of all MoE layers."""

  def block(x, params_and_state):
    p, state = params_and_state
    q, k, v = jnp.einsum("bsh,qhnd->qbsnd", jax.nn.standardize(x), p["qkv"])
    y = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
    x += jnp.einsum("bsnd,ndh->bsh", y, p["out"])
    y, metrics = layer(p["moe"], jax.nn.standardize(x), state, mask=mask)
    return x + y, metrics

  x, metrics = lax.scan(block, params["embed"][tokens], (params["blocks"], moe))
  return jax.nn.standardize(x) @ params["unembed"], metrics


def rotate(x):
  """Rotates pairs of dimensions by angles proportional to the position."""
  frequencies = 1e4 ** (-jnp.arange(HEAD // 2) / (HEAD // 2))
  angles = jnp.arange(x.shape[1])[:, None, None] * frequencies
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  a, b = jnp.split(x, 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


# Step. A batch consists of shards. A round is one shard on each working rank,
# and one run of a program, so no shape depends on the number of ranks. With
# --deterministic, shards are added as one balanced tree, first over the ranks
# of a round, then over rounds. If the number of ranks is no power of two, some
# ranks are idle: they only have experts.


class State(NamedTuple):
  step: jax.Array  # number of finished steps
  params: dict
  optimizer: optax.OptState
  moe: ep.moe.State  # the selection biases of all layers
  curves: jax.Array  # [steps, 3]: loss, held-out loss, load of busiest expert


def make_optimizer() -> optax.GradientTransformation:
  rate = optax.warmup_cosine_decay_schedule(
    0.0, FLAGS.learning_rate, WARMUP, max(FLAGS.steps, 2 * WARMUP)
  )
  return optax.adamw(rate, b2=0.95, weight_decay=0.1)


def init_state(layer: ep.MoE) -> State:
  """Returns the first state; each device computes its own shards."""
  on = functools.partial(NamedSharding, layer.group.mesh)
  blocks = {"qkv": P(), "out": P(), "moe": layer.specs(lead=1)}
  specs = {"embed": P(), "blocks": blocks, "unembed": P()}
  shardings = jax.tree.map(on, specs)
  params = jax.jit(lambda: init_params(layer), out_shardings=shardings)()
  optimizer = make_optimizer().init(params)  # with the shardings of params
  moe = ep.moe.State(jnp.zeros((FLAGS.layers, FLAGS.num_experts)))
  curves = jnp.zeros((FLAGS.steps, 3))
  return jax.tree.map(
    lambda x: x if x.sharding.num_devices > 1 else jax.device_put(x, on(P())),
    State(jnp.int32(0), params, optimizer, moe, curves),
  )


def make_sums(layer: ep.MoE, specs):
  """Returns `sums(state, windows)`: gradients, loss and loads of a batch."""
  mesh = layer.group.mesh
  shard = FLAGS.batch // FLAGS.shards
  working = 1 << mesh.size.bit_length() - 1  # a power of two
  # Weights are an argument: XLA would merge a constant with other constants.
  is_working = np.arange(mesh.size) < working
  weights = np.where(is_working, np.float32(1 / FLAGS.shards), 0)
  psum = ep.ordered_psum if FLAGS.deterministic else lax.psum

  @jax.jit
  @jax.shard_map(
    mesh=mesh,
    in_specs=(specs, P(), P(), P(ranks.AXES)),
    out_specs=(specs, P(), P()),
    check_vma=False,  # gradients differ between ranks until summed
  )
  def of_round(params, moe, weights, windows):
    weight = weights[lax.axis_index(ranks.AXES)]
    inputs, targets = windows[:, :-1], windows[:, 1:]
    mask = jnp.broadcast_to(weight > 0, inputs.shape)

    def loss_fn(params):
      logits, metrics = apply(params, layer, inputs, moe, mask)
      loss = optax.softmax_cross_entropy_with_integer_labels(
        logits, targets
      ).mean()
      # The balancing loss is a mean over working ranks, equal on all ranks.
      total = loss + AUX_LOSS * metrics.aux_loss.sum()
      return total * weight, (loss * weight, metrics.load)

    def sum_copies(grad, spec):
      return psum(grad, tuple(a for a in ranks.AXES if a not in spec))

    grads, (loss, load) = jax.grad(loss_fn, has_aux=True)(params)
    return jax.tree.map(sum_copies, grads, specs), psum(loss, ranks.AXES), load

  add = jax.jit(lambda x, y: jax.tree.map(jnp.add, x, y))

  def sums(state: State, windows: np.ndarray):
    if len(windows) > working * shard:
      return add(*(sums(state, half) for half in np.split(windows, 2)))
    windows = np.pad(windows, ((0, (mesh.size - working) * shard), (0, 0)))
    windows = jax.make_array_from_process_local_data(
      NamedSharding(mesh, P(ranks.AXES)), windows, windows.shape
    )
    # Wait, so that only one round uses memory.
    return jax.block_until_ready(
      of_round(state.params, state.moe, weights, windows)
    )

  return sums


def update(state: State, sums, held_out: float) -> State:
  """Returns the next state, from the sums over a batch."""
  grads, loss, load = sums
  updates, optimizer = make_optimizer().update(
    grads, state.optimizer, state.params
  )
  busiest = jnp.max(load.max(axis=1) / load.mean(axis=1))
  return State(
    state.step + 1,
    optax.apply_updates(state.params, updates),
    optimizer,
    state.moe.after(load, rate=BIAS_RATE),
    state.curves.at[state.step].set(jnp.stack([loss, held_out, busiest])),
  )


# Save.


def open_checkpoints(folder: pathlib.Path) -> ocp.CheckpointManager:
  """Opens a folder; raises ValueError if it has a run with other flags."""
  names = "layers hidden inner num_experts top_k batch shards length"
  settings = {name: FLAGS[name].value for name in names.split()}
  checkpoints = ocp.CheckpointManager(
    folder,
    options=ocp.CheckpointManagerOptions(save_interval_steps=FLAGS.save_every),
    metadata=settings,
  )
  if (saved := checkpoints.metadata().custom_metadata) != settings:
    raise ValueError(f"{folder} has a run with {saved}, not {settings}.")
  return checkpoints


def restore(checkpoints, start):
  """Returns the newest saved state, or `start` if there is none."""
  if (step := checkpoints.latest_step()) is None:
    return start
  like = jax.tree.map(ocp.utils.to_shape_dtype_struct, start)
  # On other ranks, Orbax cuts or appends the empty slots of experts.
  args = ocp.args.StandardRestore(like, strict=False)
  return checkpoints.restore(step, args=args)


# The run.


def train() -> None:
  """Trains the model, from its last checkpoint if any; prints the losses."""
  text, held_out_text = read_text()
  # The loss of the best prediction without context.
  unigram = float(entr(np.bincount(text) / text.size).sum())
  cfg = ep.MoEConfig(
    *(FLAGS.hidden, FLAGS.inner, FLAGS.num_experts, FLAGS.top_k),
    balance="sequence",
    deterministic=FLAGS.deterministic,
  )
  tokens = FLAGS.batch * FLAGS.length // FLAGS.shards
  layer = ep.MoE(
    cfg, ranks.make_mesh(), max_tokens_per_rank=tokens, backend=FLAGS.backend
  )
  state = init_state(layer)
  shardings = jax.tree.map(lambda x: x.sharding, state)
  specs = jax.tree.map(lambda x: x.spec, shardings.params)
  if FLAGS.out:
    out = ranks.here(FLAGS.out).absolute()
    checkpoints = open_checkpoints(out / "checkpoints")
    state = restore(checkpoints, state)
  sums = make_sums(layer, specs)
  step = jax.jit(update, out_shardings=shardings, donate_argnums=0)

  def evaluate() -> float:  # runs a step's program, to have the same bits
    batches = (read_batch(held_out_text, n) for n in range(4))
    return np.mean([float(sums(state, batch)[1]) for batch in batches])

  done, is_first = int(state.step), jax.process_index() == 0
  bar = tqdm.tqdm(initial=done, total=FLAGS.steps, disable=not is_first)
  with layer.group, ep.watch(exit_after_s=1.0), bar:
    for n in range(done, FLAGS.steps):
      held_out = evaluate() if n % EVALUATE_EVERY == 0 else math.nan
      with ep.watch.step():
        state = step(state, sums(state, read_batch(text, n)), held_out)
        loss = np.asarray(state.curves)[n, 0]
      if not math.isfinite(loss):
        raise ValueError(f"step {n}: the loss is {loss}; lower --learning_rate")
      bar.set_postfix_str(f"loss {loss:.3f}, unigram {unigram:.3f}", False)
      bar.update()
      if FLAGS.out:
        args, is_last = ocp.args.StandardSave(state), n + 1 == FLAGS.steps
        checkpoints.save(n + 1, args=args, force=is_last)
    held_out = evaluate()
  if FLAGS.out:
    checkpoints.close()  # waits for the last checkpoint
  if is_first:
    print(f"loss on held-out text: {held_out:.3f} nats per byte")
    if FLAGS.out:
      draw(out, np.asarray(state.curves), unigram)
      print(f"checkpoints, losses.csv and losses.png: {out}")


def draw(folder: pathlib.Path, curves: np.ndarray, unigram: float) -> None:
  """Writes losses.csv, and draws its losses and loads to losses.png."""
  header = "loss,held-out loss,load of the busiest expert / mean"
  np.savetxt(folder / "losses.csv", curves, delimiter=",", header=header)
  loss, held_out, busiest = curves.T
  figure = Figure(figsize=(10, 4), layout="constrained")
  losses, balance = figure.subplots(1, 2)
  losses.plot(loss, linewidth=0.8, label="training")
  losses.plot(held_out, "o", label="held out")
  losses.axhline(unigram, color="gray", linestyle="--", label="unigram entropy")
  losses.set(xlabel="step", title="loss, nats per byte", ylim=0)
  losses.legend()
  balance.plot(busiest, linewidth=0.8)
  balance.set(xlabel="step", title="load of the busiest expert / mean", ylim=1)
  figure.savefig(folder / "losses.png", dpi=100)


def main(argv) -> int | str:
  return ranks.main(argv, __file__, read_text, train, threads=FLAGS.shards)


if __name__ == "__main__":
  app.run(main)
