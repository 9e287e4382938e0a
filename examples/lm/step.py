# SPDX-License-Identifier: Apache-2.0
"""The training step: loss, gradients, AdamW, and the balance of the experts.

The bits of losses and parameters do not depend on the number of ranks. A batch
consists of shards. Each rank works on one shard at a time, so all shapes are
independent of the number of ranks. A "round" is the set of shards, one per
rank, that the ranks process at the same time. The step sums over shards as a
balanced binary tree: first over the ranks of a round, by `ep.ordered_psum`,
then over rounds. The tree is the same for all powers of two as the number of
ranks. Of another number of ranks, as many as the largest power of two work on
shards. The other ranks are idle, and only hold experts: their tokens are
masked, and the weight of their losses is zero.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import ep
from lm import model
from lm.model import Config

RANKS = ("dp", "ep")  # the mesh axes; a batch is sharded over both
_CLIP = 1.0  # the largest gradient norm; larger gradients are clipped
_Z_LOSS = 1e-3  # the weight of the router z-loss, which keeps logits small


class State(NamedTuple):
  """The training state, which a checkpoint stores."""

  step: jax.Array  # number of finished steps
  params: dict
  optimizer: optax.OptState
  moe: ep.moe.State  # stacked states of all layers


class Sums(NamedTuple):
  """Sums over the shards of a batch; a shard adds its mean times 1 / shards."""

  grads: dict  # gradients of the total loss
  loss: jax.Array  # cross-entropy in nats per byte
  aux_loss: jax.Array  # [layers], balancing losses; 1 if balanced
  entropy: jax.Array  # [layers], entropies of the routers, in nats
  load: jax.Array  # [layers, E], choices of each expert
  dropped: jax.Array  # [layers], dropped choices


def partition_specs(config: Config) -> State:
  """Returns a spec for each array of `State`."""
  params = model.partition_specs(config)
  shapes = jax.eval_shape(
    lambda: config.optimizer.init(model.init(jax.random.key(0), config))
  )
  # An AdamW moment has the spec of its parameter; other state is scalar.
  moments = optax.tree_utils.tree_map_params(
    config.optimizer,
    lambda _, spec: spec,
    shapes,
    params,
    transform_non_params=lambda _: P(),
  )
  return State(P(), params, moments, ep.moe.State(P()))


def init(config: Config, mesh: Mesh) -> State:
  """Returns the initial state; each device computes its own shards."""

  def first():
    params = model.init(jax.random.key(config.seed), config)
    slots = -(-config.num_experts // mesh.shape["ep"]) * mesh.shape["ep"]
    params = ep.moe.with_slots(params, model.partition_specs(config), slots)
    bias = jnp.zeros((config.layers, config.num_experts))
    moments = config.optimizer.init(params)
    return State(jnp.int32(0), params, moments, ep.moe.State(bias))

  shardings = jax.tree.map(
    lambda spec: NamedSharding(mesh, spec), partition_specs(config)
  )
  return jax.jit(first, out_shardings=shardings)()


class Step:
  """A training step of a model on a mesh with the axes `RANKS`.

  Each round is a separate run of one program in `jax.shard_map`. If one program
  looped over rounds, XLA could compile the program differently, with other
  bits, for each number of rounds.

  Args:
    layer: the feed-forward layer, as in `model.apply`.
    mesh: `working_ranks` of its size divides `config.shards`.
  """

  def __init__(self, config: Config, layer: Callable, mesh: Mesh):
    working = working_ranks(mesh.size)
    self._rounds = config.shards // working
    self._batch_sharding = NamedSharding(mesh, P(RANKS))
    # The programs get the weights of the ranks' shards as an argument. XLA
    # would merge a constant with other constants on one rank, where no
    # collective separates them.
    is_working = np.arange(mesh.size) < working
    self._weights = np.where(is_working, np.float32(1 / config.shards), 0)
    specs = partition_specs(config)
    sum_specs = Sums(specs.params, *[P()] * (len(Sums._fields) - 1))

    def program(fn, in_specs, out_specs, **options):
      ranks = jax.shard_map(
        fn,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,  # gradients differ between ranks until summed
      )
      return jax.jit(ranks, **options)

    self._sums = program(
      lambda *args: _sums(config, layer, specs.params, *args),
      (specs.params, specs.moe, P(), P(RANKS)),
      sum_specs,
    )
    self._add = jax.jit(
      lambda x, y: jax.tree.map(jnp.add, x, y), donate_argnums=0
    )
    self._update = program(
      lambda *args: _update(config, specs.params, *args),
      (specs, sum_specs),
      (specs, P()),
      donate_argnums=0,
    )

  def __call__(
    self, state: State, batch: np.ndarray
  ) -> tuple[State, dict[str, jax.Array]]:
    """Returns the next state and a report; donates the memory of `state`.

    Args:
      batch: int32 `[B, S + 1]`, whole on every process. A shard is consecutive
        rows.
    """
    return self._update(state, self._total(state, self._split(batch)))

  def loss(self, state: State, batch: np.ndarray) -> float:
    """Returns the cross-entropy of a batch, in nats per byte.

    The method runs the program of a step, gradients included, so that the bits
    of the loss do not depend on the number of ranks.
    """
    return float(self._total(state, self._split(batch)).loss)

  def _split(self, batch):
    return [
      jax.make_array_from_process_local_data(
        self._batch_sharding, rows, rows.shape
      )
      for rows in map(self._padded, np.split(batch, self._rounds))
    ]

  def _padded(self, rows):
    """Appends windows of zeros for idle ranks."""
    working = np.count_nonzero(self._weights)
    idle = len(rows) // working * (self._weights.size - working)
    return np.pad(rows, ((0, idle), (0, 0)))

  def _total(self, state, rounds):
    """Sums over rounds as a balanced binary tree."""
    if len(rounds) == 1:
      # Wait, so that only one round uses memory.
      return jax.block_until_ready(
        self._sums(state.params, state.moe, self._weights, *rounds)
      )
    first = 1 << (len(rounds) - 1).bit_length() - 1
    return self._add(
      self._total(state, rounds[:first]),
      self._total(state, rounds[first:]),
    )


def working_ranks(num_ranks: int) -> int:
  """Returns the number of ranks that work on shards, a power of two."""
  return 1 << num_ranks.bit_length() - 1


def _sums(config, layer, specs, params, moe_state, weights, batch) -> Sums:
  """Returns the sums over the shards of one round.

  `batch` is the rank's shard, `[B / shards, S + 1]`. `weights` are 1 / shards
  for each working rank, and 0 for idle ranks.
  """
  weight = weights[lax.axis_index(RANKS)]
  mask = jnp.broadcast_to(weight > 0, batch[:, :-1].shape)

  def loss_fn(params):
    tokens = batch[:, :-1]
    logits, experts = model.apply(params, layer, tokens, moe_state, mask)
    loss = optax.softmax_cross_entropy_with_integer_labels(
      logits, batch[:, 1:]
    ).mean()
    # A router loss is a mean over working ranks, equal on all ranks. JAX
    # differentiates the sum over ranks, so a rank gets its shard's gradient.
    total = (
      loss
      + config.aux_loss * experts.aux_loss.sum()
      + _Z_LOSS * experts.z_loss.sum()
    )
    return total * weight, (loss * weight, experts)

  def sum_copies(grad, spec):
    return ep.ordered_psum(grad, [a for a in RANKS if a not in spec])

  grads, (loss, experts) = jax.grad(loss_fn, has_aux=True)(params)
  total_weight = weights[0] * working_ranks(lax.axis_size(RANKS))
  return Sums(
    grads=jax.tree.map(sum_copies, grads, specs),
    loss=ep.ordered_psum(loss, RANKS),
    aux_loss=experts.aux_loss * total_weight,
    entropy=experts.entropy * total_weight,
    load=experts.load,
    dropped=experts.dropped,
  )


def _update(config, specs, state, sums) -> tuple[State, dict[str, Any]]:
  """Returns the next state and a report, from the sums over all shards."""
  norm = _norm(config, sums.grads, specs)
  scale = jnp.minimum(1.0, _CLIP / norm)
  updates, optimizer = config.optimizer.update(
    jax.tree.map(lambda g: g * scale, sums.grads), state.optimizer, state.params
  )
  report = sums._asdict() | {
    "grad_norm": norm,  # before clipping
    "learning_rate": config.schedule(state.step),
    "imbalance": sums.load.max(axis=1) / sums.load.mean(axis=1),
  }
  del report["grads"]
  state = State(
    step=state.step + 1,
    params=optax.apply_updates(state.params, updates),
    optimizer=optimizer,
    moe=state.moe.after(sums.load, rate=config.bias_rate),
  )
  return state, report


def _norm(config, grads, specs):
  """Returns the norm of all gradients; sums the squares per expert first."""

  def square(grad, spec):
    if "ep" not in spec:
      return jnp.sum(grad * grad)
    layers, experts = grad.shape[:2]
    squares = _row_sums(jnp.reshape(grad * grad, (layers, experts, -1)))
    squares = lax.all_gather(squares, "ep", axis=1, tiled=True)
    squares = squares[:, : config.num_experts]  # without empty slots
    return _row_sums(squares.reshape(-1))

  return jnp.sqrt(sum(jax.tree.leaves(jax.tree.map(square, grads, specs))))


def _row_sums(x):
  """Sums over the last axis as a balanced binary tree.

  The order of XLA's own sum would depend on the number of experts on a device.
  """
  while (size := x.shape[-1]) > 1:
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size % 2)])
    x = x[..., : x.shape[-1] // 2] + x[..., x.shape[-1] // 2 :]
  return x[..., 0]
