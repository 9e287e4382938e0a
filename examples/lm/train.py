# SPDX-License-Identifier: Apache-2.0
"""The training step: loss, gradients, AdamW, and the balance of the experts."""

import dataclasses
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import ep
from lm import data, model


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """How a model is trained.

  Experts are balanced in two ways, which can be combined. `aux_loss` weighs a
  term of the loss that is least when all experts are chosen equally often
  (Switch Transformer). `bias_rate` is the step by which a router's selection
  bias rises for idle experts and falls for busy ones (DeepSeek-V3).
  """

  warmup: int  # steps up to the peak of the learning rate
  decay_steps: int  # after which the learning rate is a tenth of the peak
  learning_rate: float  # at the peak
  weight_decay: float
  clip: float  # the largest norm of the gradient
  aux_loss: float
  z_loss: float  # the weight of a term that keeps the router's logits small
  bias_rate: float

  def schedule(self) -> optax.Schedule:
    """Returns the learning rate as a function of the steps done.

    It does not depend on where a run ends, so a run can be continued for any
    number of steps.
    """
    return optax.warmup_cosine_decay_schedule(
      init_value=0.0,
      peak_value=self.learning_rate,
      warmup_steps=self.warmup,
      decay_steps=self.decay_steps,
      end_value=self.last_rate,
    )

  @property
  def last_rate(self) -> float:
    return 0.1 * self.learning_rate

  def optimizer(self) -> optax.GradientTransformation:
    return optax.adamw(
      self.schedule(), b2=0.95, weight_decay=self.weight_decay, mask=_decays
    )


class State(NamedTuple):
  """Everything that a step changes. A checkpoint holds it.

  The data and the random numbers of a step are functions of the seed and
  `step`, so they need no state of their own.
  """

  step: jax.Array  # steps done
  params: dict
  optimizer: optax.OptState
  moe: ep.moe.State  # of all layers, stacked


class Sums(NamedTuple):
  """Sums over shards. A mean over the batch is a sum of the shards' parts."""

  grads: dict | None  # of the loss with its further terms
  loss: jax.Array  # cross-entropy in nats per byte, without further terms
  aux_loss: jax.Array  # [layers], of balance
  entropy: jax.Array  # [layers], of the routers' odds, in nats
  load: jax.Array  # [layers, E], choices that fell on each expert
  dropped: jax.Array  # [layers], choices that found no room
  max_rank_rows: jax.Array  # [layers], rows of the busiest rank


class Report(NamedTuple):
  """Holds what a step reports, which is the same on every rank."""

  sums: Sums  # without the gradients
  grad_norm: jax.Array  # before clipping
  learning_rate: jax.Array


def partition_specs(
  model_config: model.ModelConfig, train_config: TrainConfig
) -> State:
  """Returns a spec for each array of `State`."""
  optimizer = train_config.optimizer()
  params = model.partition_specs(model_config)
  shapes = jax.eval_shape(
    lambda: optimizer.init(model.init(jax.random.key(0), model_config))
  )
  return State(
    step=P(),
    params=params,
    # The moments of a parameter lie where it lies; all else is a scalar.
    optimizer=optax.tree_utils.tree_map_params(
      optimizer,
      lambda _, spec: spec,
      shapes,
      params,
      transform_non_params=lambda _: P(),
    ),
    moe=ep.moe.State(P()),
  )


def in_order(model_config: model.ModelConfig) -> ep.Placement:
  """Returns the placement of all layers that has experts in their own order."""
  return ep.Placement([range(model_config.num_experts)] * model_config.layers)


def abstract(
  mesh: Mesh, model_config: model.ModelConfig, train_config: TrainConfig
) -> State:
  """Returns the shapes, dtypes and shardings of `State`'s arrays."""
  return jax.tree.map(
    lambda x, spec: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
    ),
    jax.eval_shape(lambda: _first_state(0, model_config, train_config)),
    partition_specs(model_config, train_config),
  )


def init(
  mesh: Mesh,
  seed: int,
  model_config: model.ModelConfig,
  train_config: TrainConfig,
) -> State:
  """Returns the state before the first step; each device makes its shards."""
  like = abstract(mesh, model_config, train_config)
  return jax.jit(
    lambda: _first_state(seed, model_config, train_config),
    out_shardings=jax.tree.map(lambda x: x.sharding, like),
  )()


def _first_state(seed, model_config, train_config):
  params = model.init(jax.random.key(seed), model_config)
  return State(
    step=jnp.zeros((), jnp.int32),
    params=params,
    optimizer=train_config.optimizer().init(params),
    moe=ep.moe.State(
      jnp.zeros((model_config.layers, model_config.num_experts))
    ),
  )


class Step:
  """A training step, whose bits do not depend on the number of ranks.

  A batch consists of shards. Each rank works on one shard at a time, in the
  same shapes whatever the number of ranks is, and the shards that the ranks
  work on together are an exchange. Sums over shards are added in one order, as
  a balanced binary tree: first over the ranks of an exchange, by
  `ep.ordered_psum`, then over exchanges. The tree is the same for all numbers
  of ranks that are powers of two.

  An exchange is a program of its own, in the local view. XLA would compile a
  loop over exchanges, and a loop of one trip, in other ways, which may round
  differently.

  Args:
    mesh: of the axes `data.RANKS`.
    layer: the feed-forward layer, as in `model.apply`.
    model_config, train_config: what is trained, and how.
    shards: of a batch, a multiple of the number of ranks.
  """

  def __init__(
    self,
    mesh: Mesh,
    layer: model.Layer,
    model_config: model.ModelConfig,
    train_config: TrainConfig,
    shards: int,
  ):
    self._mesh = mesh
    self._exchanges = shards // mesh.size
    self._in_order = in_order(model_config)
    # XLA multiplies constants in advance where no collective stands between
    # them, which is on one rank only. So the program gets this as an argument.
    self._share = np.float32(1 / shards)
    specs = partition_specs(model_config, train_config)
    sum_specs = Sums(specs.params, *[P()] * (len(Sums._fields) - 1))

    def program(fn, in_specs, out_specs, **options):
      ranks = jax.shard_map(
        fn,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,  # so each rank has the gradient of its own shard
      )
      return jax.jit(ranks, **options)

    def sums(*args):
      return _sums(layer, model_config, train_config, *args)

    def update(*args):
      return _update(train_config, specs.params, *args)

    self._sums = program(
      sums, (specs.params, P(), P(), P(), P(data.RANKS)), sum_specs
    )
    self._add = jax.jit(
      lambda x, y: jax.tree.map(jnp.add, x, y), donate_argnums=0
    )
    self._update = program(
      update, (specs, sum_specs, P()), (specs, P()), donate_argnums=0
    )

  def __call__(
    self,
    state: State,
    batch: np.ndarray,
    placement: ep.Placement | None = None,
  ) -> tuple[State, Report]:
    """Returns the next state, in the memory of this one, and a report.

    Args:
      state: as of `init`.
      batch: int32 `[B, S + 1]`, which every process has whole. Its shards are
        consecutive rows.
      placement: where the experts of each layer are in the state, `[layers,
        E]`; None for their own order.
    """
    exchanges = np.split(batch, self._exchanges)
    placement = placement or self._in_order
    sums = self._total(state, placement, exchanges)
    return self._update(state, sums, placement)

  def loss(self, state: State, batch: np.ndarray) -> float:
    """Returns the cross-entropy of a batch, in nats per byte.

    It runs the program of a step, gradients included, so that the bits depend
    on the number of ranks as little as a step's.
    """
    exchanges = np.split(batch, self._exchanges)
    return float(self._total(state, self._in_order, exchanges).loss)

  def _total(self, state, placement, exchanges):
    """Returns the sums of exchanges, of which 2^n are added first."""
    if len(exchanges) == 1:
      batch = data.place(exchanges[0], self._mesh)
      # Waiting keeps the memory of later exchanges from being taken now.
      return jax.block_until_ready(
        self._sums(state.params, state.moe, placement, self._share, batch)
      )
    first = 1 << (len(exchanges) - 1).bit_length() - 1
    return self._add(
      self._total(state, placement, exchanges[:first]),
      self._total(state, placement, exchanges[first:]),
    )


def _sums(
  layer, model_config, train_config, params, moe_state, placement, share, batch
):
  """Returns the sums over an exchange.

  Args:
    layer, model_config, train_config: as of `Step`.
    params, moe_state: as of `State`; a rank has its own experts.
    placement: where the experts of each layer are.
    share: the weight of a shard, 1 / shards.
    batch: the rank's shard, `[B / shards, S + 1]`.
  """
  ranks = lax.axis_size(data.RANKS)

  def loss_fn(params):
    logits, experts = model.apply(
      params,
      layer,
      batch[:, :-1],
      moe_state=moe_state,
      placement=placement,
    )
    loss = optax.softmax_cross_entropy_with_integer_labels(
      logits, batch[:, 1:]
    ).mean()
    # The routers' losses are means over the ranks. JAX differentiates the sum
    # of all ranks' copies, which is the gradient of the rank's own shard.
    total = (
      loss
      + train_config.aux_loss * experts.aux_loss.sum()
      + train_config.z_loss * experts.z_loss.sum()
    )
    return total * share, (loss * share, experts)

  def sum_copies(grad, spec):
    return ep.ordered_psum(grad, [a for a in data.RANKS if a not in spec])

  grads, (loss, experts) = jax.grad(loss_fn, has_aux=True)(params)
  return Sums(
    grads=jax.tree.map(sum_copies, grads, model.partition_specs(model_config)),
    loss=ep.ordered_psum(loss, data.RANKS),
    aux_loss=experts.aux_loss * (ranks * share),
    entropy=experts.entropy * (ranks * share),
    load=experts.load,
    dropped=experts.dropped,
    max_rank_rows=experts.max_rank_rows,
  )


def _update(train_config, specs, state, sums, placement):
  """Returns the next state and a `Report`, of the sums over all shards."""
  norm = _norm(sums.grads, specs, placement)
  scale = jnp.minimum(1.0, train_config.clip / norm)
  updates, optimizer = train_config.optimizer().update(
    jax.tree.map(lambda g: g * scale, sums.grads), state.optimizer, state.params
  )
  rate = train_config.bias_rate
  report = Report(
    sums._replace(grads=None), norm, train_config.schedule()(state.step)
  )
  state = State(
    step=state.step + 1,
    params=optax.apply_updates(state.params, updates),
    optimizer=optimizer,
    moe=state.moe.after(sums.load, rate=rate),
  )
  return state, report


def _norm(grads, specs, placement):
  """Returns the norm of all gradients, which adds experts in their order."""

  def square(grad, spec):
    if "ep" not in spec:
      return jnp.sum(grad * grad)
    axis = spec.index("ep")
    experts = _row_sums(jnp.reshape(grad * grad, (*grad.shape[: axis + 1], -1)))
    slots = lax.all_gather(experts, "ep", axis=axis, tiled=True)
    ordered = jnp.take_along_axis(slots, placement.slots, axis)
    return _row_sums(ordered.reshape(-1))

  return jnp.sqrt(sum(jax.tree.leaves(jax.tree.map(square, grads, specs))))


def _row_sums(x):
  """Returns the sums over the last axis, added up as a tree of halves.

  XLA would add up in another order where there are fewer experts.
  """
  while (size := x.shape[-1]) > 1:
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size % 2)])
    x = x[..., : x.shape[-1] // 2] + x[..., x.shape[-1] // 2 :]
  return x[..., 0]


def _decays(params):
  """Returns which parameters decay: all but the scales of the norms."""
  return jax.tree.map_with_path(
    lambda path, _: not path[-1].key.endswith("norm"), params
  )
