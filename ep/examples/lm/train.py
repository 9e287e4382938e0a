# SPDX-License-Identifier: Apache-2.0
"""The training step: loss, gradients, AdamW, and the balance of the experts."""

from collections.abc import Callable
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import optax

import ep
from ep.examples.lm import model


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """How a model is trained.

  Experts are balanced in two ways, which can be combined. `aux_loss` weighs a
  term of the loss that is least when all experts are chosen equally often
  (Switch Transformer). `bias_rate` is the step by which a router's selection
  bias rises for idle experts and falls for busy ones (DeepSeek-V3).
  """

  steps: int
  warmup: int  # steps
  learning_rate: float  # at the peak
  weight_decay: float
  clip: float  # the largest norm of the gradient
  aux_loss: float
  z_loss: float  # the weight of a term that keeps the router's logits small
  bias_rate: float

  def schedule(self) -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(
      init_value=0.0,
      peak_value=self.learning_rate,
      warmup_steps=self.warmup,
      decay_steps=self.steps,
      end_value=0.1 * self.learning_rate,
    )

  def optimizer(self) -> optax.GradientTransformation:
    return optax.chain(
      optax.clip_by_global_norm(self.clip),
      optax.adamw(
        self.schedule(),
        b2=0.95,
        weight_decay=self.weight_decay,
        mask=_decays,
      ),
    )


class State(NamedTuple):
  """Everything that a step changes, hence what a checkpoint holds.

  The data and the random numbers of a step are functions of the seed and
  `step`, so they need no state of their own.
  """

  step: jax.Array  # steps done
  params: dict
  optimizer: optax.OptState
  bias: jax.Array  # [layers, E], of the routers


class Report(NamedTuple):
  """What a step tells about itself, the same on every rank."""

  loss: jax.Array  # cross-entropy in nats per byte, without further terms
  grad_norm: jax.Array  # before clipping
  learning_rate: jax.Array
  experts: ep.moe.Metrics  # of each layer, stacked


def shardings(
  mesh: Mesh, model_config: model.ModelConfig, train_config: TrainConfig
) -> State:
  """Returns a sharding for each array of `State`."""
  optimizer = train_config.optimizer()
  params = model.partition_specs(model_config)
  shapes = jax.eval_shape(
    lambda: optimizer.init(model.init(jax.random.key(0), model_config))
  )
  specs = State(
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
    bias=P(),
  )
  return jax.tree.map(
    lambda spec: NamedSharding(mesh, spec),
    specs,
    is_leaf=lambda x: isinstance(x, P),
  )


def init(
  mesh: Mesh,
  seed: int,
  model_config: model.ModelConfig,
  train_config: TrainConfig,
) -> State:
  """Returns the state before the first step; each device makes its shards."""

  def make():
    params = model.init(jax.random.key(seed), model_config)
    return State(
      step=jnp.zeros((), jnp.int32),
      params=params,
      optimizer=train_config.optimizer().init(params),
      bias=jnp.zeros((model_config.layers, model_config.num_experts)),
    )

  return jax.jit(
    make, out_shardings=shardings(mesh, model_config, train_config)
  )()


def make_step(
  layer: ep.EpLayerConfig,
  model_config: model.ModelConfig,
  train_config: TrainConfig,
) -> Callable[[State, jax.Array], tuple[State, Report]]:
  """Returns a jitted function of a state and a batch, int32 `[B, S + 1]`.

  It takes the state's memory for the new state.
  """
  mesh = layer.group.mesh
  optimizer, schedule = train_config.optimizer(), train_config.schedule()

  def loss_fn(params, bias, batch):
    logits, experts, _ = model.apply(
      params, model_config, layer, batch[:, :-1], bias=bias
    )
    loss = optax.softmax_cross_entropy_with_integer_labels(
      logits, batch[:, 1:]
    ).mean()
    total = (
      loss
      + train_config.aux_loss * experts.aux_loss.sum()
      + train_config.z_loss * experts.z_loss.sum()
    )
    return total, (loss, experts)

  def step(state, batch):
    grads, (loss, experts) = jax.grad(loss_fn, has_aux=True)(
      state.params, state.bias, batch
    )
    updates, optimizer_state = optimizer.update(
      grads, state.optimizer, state.params
    )
    report = Report(loss, optax.tree.norm(grads), schedule(state.step), experts)
    state = State(
      step=state.step + 1,
      params=optax.apply_updates(state.params, updates),
      optimizer=optimizer_state,
      bias=ep.moe.update_bias(
        state.bias, experts.load, rate=train_config.bias_rate
      ),
    )
    return state, report

  replicated = NamedSharding(mesh, P())
  out = shardings(mesh, model_config, train_config), replicated
  return jax.jit(step, out_shardings=out, donate_argnums=0)


def _decays(params):
  """Returns which parameters decay: all but the scales of the norms."""
  return jax.tree.map_with_path(
    lambda path, _: not path[-1].key.endswith("norm"), params
  )
