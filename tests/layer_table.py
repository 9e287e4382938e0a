# SPDX-License-Identifier: Apache-2.0
"""The rows of the table of layer_test.py, and their dense oracle.

A row is a layer with some options. The oracle applies every expert to every
token in float64, with ep/testing/_dense.py.

Tokens and cotangents are -1, 0 or 1, so fp8 and bfloat16 represent them.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np

from conftest import to_global
import ep
from ep.testing import _dense
from groups import BACKEND, E, GPU, group, K, MESHES
from layer_steps import draw_params
from oracle import make_oracle

HIDDEN, INNER, SHARED = 32, 8, 4
BIAS = np.linspace(-0.2, 0.2, E, dtype=np.float32)
LOSSES = {"aux_loss": 0.1, "z_loss": 0.01}


def unit(x):
  """Is not finite at 0, the value of rows that pad a segment."""
  return x * lax.rsqrt((x * x).sum(axis=-1, keepdims=True))


def lora(segments, params, rows):
  """Multiplies by the methods of `segments`, and once by a kernel of JAX."""
  up, low = segments.matmul(rows, [params["w_up"], params["a_up"]])
  low = segments.matmul(low, params["b_up"])
  slope = segments.spread(params["slope"])
  hidden = segments.map(lambda up, low, s: s * unit(up + low), up, low, slope)
  return lax.ragged_dot(hidden, params["w_down"], segments.group_sizes)


def expert_of_lora(params, e, rows):
  up = params["w_up"][e] + params["a_up"][e] @ params["b_up"][e]
  return params["slope"][e] * unit(rows @ up) @ params["w_down"][e]


@dataclasses.dataclass(frozen=True)
class Row:
  """A layer with some options.

  Attributes:
    options: of `MoEConfig`.
    alignment: of the group.
    ids: the argument, "forced_idx" or "captured_idx", that gets ids.
    has_state: whether calls get a selection bias.
    is_placed: whether calls get a placement.
    pad: whether 4 ranks cannot split the batch, and calls get `pad=True`.
    examples: n of the tokens [8, n, H]: 8 sequences, or n examples of 8 tokens.
    network: experts for `ep.moe_layer`, or None for `ep.MoE`.
    tolerance: of float32 results, relative to the largest one.
  """

  options: Any = dataclasses.field(default_factory=dict)
  alignment: int = 1
  ids: str | None = None
  has_state: bool = False
  is_placed: bool = False
  pad: bool = False
  examples: int = 3
  network: Any = None
  tolerance: float = 2e-5

  @property
  def config(self):
    sizes = dict(hidden=HIDDEN, inner=INNER, num_experts=E, top_k=K)
    return ep.MoEConfig(**(sizes | dict(self.options)))


# In two processes, tests run with the first row only.
ROWS = {
  "fsdp": Row(
    dict(fsdp_axis="dp", score="sigmoid", scale=2.5, shared_inner=SHARED),
    has_state=True,
  ),
  "plain": Row(
    dict(
      gated=False,
      activation=unit,
      num_groups=4,
      top_groups=2,
      group_best=1,
      shared_inner=SHARED,
      drop_by="slot",
    ),
    alignment=4,
  ),
  "early": Row(
    dict(
      biases=True,
      router_bias=True,
      up_activation=unit,
      weigh="early",
      normalize=False,
      balance="sequence",
    ),
    alignment=4,
  ),
  "input": Row(
    dict(
      weigh="input",
      score="sqrtsoftplus",
      activation=unit,
      biases=True,
      wire="mxfp8",
    ),
    alignment=4,
    ids="forced_idx",
    is_placed=True,
  ),
  "tp": Row(
    dict(
      tp_axis="dp",
      biases=True,
      shared_inner=SHARED,
      implementation="ragged_dot",
    )
  ),
  "token_chunks": Row(
    dict(
      token_chunks=3,
      activation=unit,
      biases=True,
      shared_inner=SHARED,
    )
  ),
  "chunk": Row(
    dict(
      overflow="chunk",
      capacity_factor=1.1,  # chunks would not fit without their padding
      up_activation=unit,
      shared_inner=SHARED,
    ),
    alignment=4,
    has_state=True,
  ),
  "deterministic": Row(
    dict(
      deterministic=True, biases=True, router_bias=True, shared_inner=SHARED
    ),
    examples=27,  # more rows than the block of a deterministic layer has
  ),
  "uneven": Row(
    dict(num_experts=7, biases=True, implementation=lax.ragged_dot),
    ids="captured_idx",
    is_placed=True,
  ),
  "pad": Row(dict(dtype=jnp.bfloat16), pad=True, tolerance=2e-2),
  "experts": Row(alignment=4, network=lora, pad=True),
}


class Setup:
  """A row on a mesh: a layer, its arguments, and its calls."""

  def __init__(self, row, mesh="ep4", axis_type=AxisType.Auto, **changes):
    self.row = ROWS[row]
    self.config = dataclasses.replace(self.row.config, **changes)
    if mesh == "ep4" and (self.config.fsdp_axis or self.config.tp_axis):
      mesh = "dp2_ep2"
    axes = MESHES[mesh]
    options = dict(data_axes=()) if self.config.tp_axis else {}
    ranks = 4 // axes["dp"] if self.config.tp_axis else 4
    L = -(-self.config.num_experts // axes["ep"])
    limit = 32 // ranks if GPU and BACKEND != "xla" else None
    here = group(
      mesh,
      axis_type,
      alignment=self.row.alignment,
      num_experts=axes["ep"] * L,
      hidden_dim=HIDDEN,
      max_tokens_per_rank=limit,
      **options,
    )
    self.group, self.slots = here, axes["ep"] * L
    if self.row.network is None:
      self.layer = ep.MoE(self.config, here)
      self.ep_layer, self.specs = self.layer.ep_layer, self.layer.specs()
    else:
      fields = "overflow", "capacity_factor"
      given = {n: changes[n] for n in fields if n in changes}
      self.layer = self.ep_layer = ep.EpLayerConfig(here, **given)
      split = {n: P("ep") for n in params_of(row)}
      self.specs = split | {"router": P()}

  def __call__(self, params, x, mask, ids, placement):
    row = self.row
    if row.network is not None:
      known = x if mask is None else jnp.where(mask[..., None], x, 0)
      logits = known.astype(jnp.float32) @ params["router"]
      idx, weights = ep.route_topk(logits, K, mask=mask)
      own = {n: p for n, p in params.items() if n != "router"}
      args = self.layer, x, idx, weights
      options = dict(experts=row.network, params=own, pad=row.pad)
      return ep.moe_layer(*args, **options), {}
    options = {} if row.ids is None else {row.ids: ids}
    state = ep.moe.State(BIAS) if row.has_state else None
    if row.is_placed:
      options["placement"] = placement
    y, metrics = self.layer(params, x, state, mask=mask, pad=row.pad, **options)
    names = *LOSSES, "load", "drops", "max_rank_rows"
    return y, {n: getattr(metrics, n) for n in names}

  def placement(self, seed=7):
    return ep.Placement(np.random.default_rng(seed).permutation(self.slots))

  def in_slots(self, params, placement):
    """Returns parameters as the layer takes them."""
    params = ep.moe.with_slots(params, self.specs, self.slots)
    if not self.row.is_placed:
      return params
    return {
      n: p[placement.experts] if "ep" in self.specs[n] else p
      for n, p in params.items()
    }

  def by_expert(self, grads, placement):
    """Undoes `in_slots`; gradients of empty slots must be zero."""
    if self.row.is_placed:
      grads = {
        n: g[placement.slots] if "ep" in self.specs[n] else g
        for n, g in grads.items()
      }
    for n, g in grads.items():
      assert "ep" not in self.specs[n] or not g[self.config.num_experts :].any()
    return ep.moe.with_slots(grads, self.specs, self.config.num_experts)

  def put(self, data, placement, mask, replicated=False):
    """Returns global arrays: params, x, ct, mask, ids."""
    mesh, row = self.group.mesh, self.row
    tokens = P(self.group.token_axes)
    if mesh.axis_types[0] == AxisType.Explicit:
      tokens = P("dp")
    if (row.pad and len(data.x) % 4) or replicated:
      tokens = P()
    params = self.in_slots(data.params, placement)
    return (
      {n: to_global(p, mesh, self.specs[n]) for n, p in params.items()},
      *(
        a if a is None else to_global(a, mesh, tokens)
        for a in (data.x, data.ct, mask, data.ids)
      ),
    )


@functools.cache
def params_of(row, seed=1):
  rng, row = np.random.default_rng(seed), ROWS[row]

  def draw(shape):
    return rng.normal(size=shape) * 0.5

  if row.network is None:
    return draw_params(row.config, draw)
  shapes = {
    "w_up": (E, HIDDEN, INNER),
    "a_up": (E, HIDDEN, 2),
    "b_up": (E, 2, INNER),
    "slope": (E, INNER),
    "w_down": (E, INNER, HIDDEN),
    "router": (HIDDEN, E),
  }
  return {n: np.float32(draw(s)) for n, s in shapes.items()}


@dataclasses.dataclass(frozen=True)
class Data:
  """The arguments of a step: whole arrays."""

  params: Any
  x: np.ndarray
  ct: np.ndarray
  mask: np.ndarray
  ids: np.ndarray


@functools.cache
def data_of(row, seed=1, busy=False, pad=True):
  """Draws arguments; if `busy`, all tokens choose among four experts."""
  rng = np.random.default_rng(0)
  params, num_experts = params_of(row, seed), ROWS[row].config.num_experts
  lead = 8, ROWS[row].examples
  x, ct = rng.integers(-1, 2, (2, *lead, HIDDEN)).astype(np.float32)
  ids = rng.random((*lead, num_experts)).argsort(-1)[..., :K].astype(np.int32)
  if busy:
    first = Setup(row, "dp2_ep2").placement().experts[: K + 1]
    ids = np.broadcast_to(first[first < num_experts][:K], ids.shape)
    router = params["router"] * (np.arange(num_experts) == 0)
    params = params | {"router": router}
  elif ROWS[row].ids == "captured_idx":
    ids = np.where(rng.random((*lead, 1)) < 0.5, ids, -1)
  n = 7 if pad and ROWS[row].pad else 8
  return Data(params, x[:n], ct[:n], np.ones((n, lead[1]), bool), ids[:n])


def formula(row, config, params, x, ct, mask, ids, kept):
  """Returns y, the metrics and the gradients of the dense layer."""
  del ct
  logits = (x @ params["router"]) + params.get("router_bias", 0)
  scores = {
    "softmax": jax.nn.softmax,
    "sigmoid": jax.nn.sigmoid,
    "sqrtsoftplus": lambda x: jnp.sqrt(jax.nn.softplus(x)),
  }[config.score](logits)
  idx, given = route(row, config, logits, mask, ids)
  weights = jnp.take_along_axis(scores, jnp.maximum(idx, 0), -1) * (idx >= 0)
  if config.normalize:
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / jnp.where(total, total, 1)
  weights = config.scale * weights * kept

  def network(params, e, rows):
    """Applies expert `e`, or the shared expert if `e` is None."""
    kind, at = ("shared_", ...) if e is None else ("w_", e)

    def product(rows, name):
      out = rows @ params[kind + name][at]
      has_bias = e is not None and config.biases
      return out + params["b_" + name][e] if has_bias else out

    if not config.gated:
      return product(config.activation(product(rows, "up")), "down")
    up = product(rows, "up")
    if config.up_activation:
      up = config.up_activation(up)
    return product(config.activation(product(rows, "gate")) * up, "down")

  apply = network if row.network is None else expert_of_lora
  flat_x, flat_idx, flat_weights = (
    a.reshape(-1, a.shape[-1]) for a in (x, idx, weights)
  )

  def expert(e, rows):
    if config.weigh == "input":
      weight = jnp.where(flat_idx == e, flat_weights, 0).sum(-1, keepdims=True)
      rows = weight * rows
    return apply(params, e, rows)

  outer = flat_weights
  if config.weigh == "input":
    outer = kept.reshape(outer.shape).astype(x.dtype)
  outs = jax.vmap(lambda e: expert(e, flat_x))(jnp.arange(config.num_experts))
  y = _dense.dense(outs, flat_idx, outer).reshape(x.shape)
  metrics = dict(choices=(idx, given))
  if row.network is not None:
    return y, metrics
  if config.shared_inner:
    y += mask[..., None] * network(params, None, x)
  balance = {
    "batch": ep.load_balancing_loss,
    "sequence": ep.sequence_balancing_loss,
  }[config.balance]
  chosen = jax.nn.one_hot(idx, config.num_experts).reshape(
    -1, K, scores.shape[-1]
  )
  metrics |= dict(
    aux_loss=balance(logits, idx, score=config.score, mask=mask),
    z_loss=ep.router_z_loss(logits, mask=mask),
    load=chosen.sum((0, 1)),
    drops=(chosen * (1 - kept.reshape(-1, K, 1))).sum((0, 1)),
  )
  return y, metrics


def route(row, config, logits, mask, ids):
  """Returns the choices; router_test compares them with NumPy."""
  options = {} if row.ids is None else {row.ids: ids}
  names = "score", "normalize", "scale", "num_groups", "top_groups"
  options |= {n: getattr(config, n) for n in (*names, "group_best")}
  if row.has_state:
    options["selection_bias"] = BIAS
  logits = lax.stop_gradient(logits).astype(jnp.float32)
  return ep.route_topk(logits, K, mask=mask, **options)


def loss_of(fn, ct, share=1):
  """Returns the loss of a layer; `share` is the part of a rank's metrics."""

  def loss(params, x):
    y, metrics = fn(params, x)
    terms = sum(LOSSES[n] * metrics[n] for n in LOSSES if n in metrics)
    return (y.astype(jnp.float32) * ct).sum() + terms * share, (y, metrics)

  return loss


def results_of(fn, params, x, ct, share=1):
  grads, (y, metrics) = jax.grad(loss_of(fn, ct, share), (0, 1), has_aux=True)(
    params, x
  )
  return y, metrics, *grads


@functools.cache
def oracle(row, balance):
  config = dataclasses.replace(ROWS[row].config, balance=balance)

  def run(params, x, ct, *others):
    def fn(params, x):
      return formula(ROWS[row], config, params, x, ct, *others)

    return results_of(fn, params, x, ct)

  return _dense.in_float64(run)


def run_oracle(row, data, kept=None, balance=None):
  if kept is None:
    kept = np.ones((*data.mask.shape, K))
  balance = balance or ROWS[row].config.balance
  if ROWS[row].pad:
    balance = "batch"
  x = np.where(data.mask[..., None], data.x, 1)
  args = data.params, x, data.ct, data.mask, data.ids, kept
  return oracle(row, balance)(*args)


def expected(row, data, kept=None, balance=None):
  """Returns y, metrics and gradients of params and x, in float64."""
  y, metrics, *grads = run_oracle(row, data, kept, balance)
  del metrics["choices"]
  return y, metrics, *grads


def kept_choices(row, setup, data):
  """Returns which choices fit, by the oracle of the ops."""
  config, ranks = setup.config, setup.group.num_token_ranks
  _, metrics, *_ = run_oracle(row, data)
  idx, weights = metrics["choices"]
  if setup.row.is_placed:
    idx = setup.placement().slots_of(idx)
  shape = ranks, config.token_chunks, -1, K
  idx, weights = (np.asarray(a).reshape(shape) for a in (idx, weights))
  kept = np.zeros(idx.shape, bool)
  for i in range(config.token_chunks):
    of_chunk = (a[:, i].reshape(-1, K) for a in (idx, weights))
    routings = make_oracle(setup.ep_layer, *of_chunk).routings
    kept[:, i] = np.stack([r.kept for r in routings]).reshape(ranks, -1, K)
  return kept.reshape(*data.mask.shape, K)
