# SPDX-License-Identifier: Apache-2.0
"""Properties of a layer's programs: collectives, routing, memory and order."""

import collections
import dataclasses
import functools
import re

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import Case, jit_quickly
from conftest import make_mesh, TIMEOUT_S
import ep
from ep._src.backends import host
from ep._tools.collectives.unordered import Program
from groups import BACKEND, bootstrap, E, group, H, has_no_limits, K, layer, T
from layer_steps import (
  draw_params,
  moe_step_of,
  put,
  put_moe,
  run_step,
  step_of,
  whole,
)
from nccl_testing import HostEngine

R, WIDTH = 4, 32  # ranks, and the hidden size
PLAIN = ep.MoEConfig(WIDTH, 16, E, K, biases=True, shared_inner=8)
TIGHT = dict(capacity_factor=1.0)
CHUNK = dict(overflow="chunk", **TIGHT)
FAIR = dict(overflow="drop", drop_by="fair", **TIGHT)
SMALL, LARGE = {"dp": 2, "ep": 2}, {"dp": 2, "fsdp": 2, "ep": 2}


def make(mesh="ep4", **options):
  config = dataclasses.replace(PLAIN, **options)
  here = group(mesh, hidden_dim=WIDTH, max_tokens_per_rank=16)
  return ep.MoE(config, here)


def arrays(layer, *lead):
  """Returns a layer's parameters, and tokens [R * lead[0], ..., H]."""
  rng = np.random.default_rng(0)
  config = layer.config
  params = draw_params(config, lambda shape: rng.normal(size=shape) / 9)
  x = rng.normal(size=(R * lead[0], *lead[1:], config.hidden))
  return params, x.astype(np.float32)


# Collectives. XLA:CPU would not order a collective in a loop or in a branch
# with collectives outside; see ep/_tools/collectives/unordered.py.


@pytest.mark.parametrize(
  "mesh, options",
  [
    (SMALL, dict(balance="sequence", score="sigmoid")),
    (SMALL, dict(deterministic=True)),
    (SMALL, dict(token_chunks=2, wire="mxfp8", **FAIR)),
    (LARGE, dict(token_chunks=4)),
    (LARGE, CHUNK),
  ],
  ids=str,
)
def test_launches_of_a_step_agree(mesh, options):
  """All launches of one program give the same bits."""
  fsdp = "fsdp" if "fsdp" in mesh else None
  config = dataclasses.replace(PLAIN, fsdp_axis=fsdp, **options)
  layer = ep.MoE(
    config,
    make_mesh(mesh),
    max_tokens_per_rank=16,
    timeout_s=TIMEOUT_S,
    backend=BACKEND,
  )
  params, x = arrays(layer, layer.group.mesh.size // R, 16)

  @jax.jit
  def step(params, x, state):
    def loss(params, x):
      y, metrics = layer(params, x, state)
      losses = metrics.aux_loss + metrics.z_loss + jnp.mean(y**2)
      return losses, (y, metrics, state.after(metrics.load))

    return jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)

  args = *put(layer, params, x), layer.init_state()
  program = step.lower(*args).compile()
  if BACKEND != "xla":
    assert [*Program(program.as_text()).loops()] == []
  first = whole(program(*args))
  for _ in range(20):
    jax.tree.map(np.testing.assert_array_equal, whole(program(*args)), first)


def test_all_metrics_cost_one_sum_over_ranks():
  """XLA removes the sum from a program that uses no metric."""
  layer = make("dp2_ep2", balance="sequence")
  args = put(layer, *arrays(layer, 1, 4))

  def num_sums(program):
    hlo = jit_quickly(program).lower(*args).compile().as_text()
    return len(re.findall(r" all-reduce(?:-start)?\(", hlo))

  assert num_sums(layer) == num_sums(lambda *args: layer(*args)[0]) + 1


def test_vmap_makes_one_exchange():
  """Named scopes name the steps of the layer in profiles."""
  layer = make("dp2_ep2")
  params, x = arrays(layer, 1, 4)
  mapped = jax.vmap(layer, in_axes=(None, 1), out_axes=(1, None))
  lowered = jax.jit(mapped).lower(*put(layer, params, x))
  assert lowered.as_text().count("custom_call @ep_prepare") == 1
  names = lowered.as_text(debug_info=True)
  for scope in ("route", "experts", "metrics"):
    assert re.search(rf"[\"/]{scope}/", names)


# Under `jax.checkpoint`, the backward pass reuses the forward routing.


def whole_layer(layer, params, x):
  y, metrics = layer(params, x)
  return x + y, metrics.aux_loss


def with_route(route, layer, params, x):
  topk_idx, weights = route(x @ params["router"])
  matrices = {n: params[n] for n in ("w_up", "w_gate", "w_down")}
  y = ep.moe_layer(layer.ep_layer, x, topk_idx, weights, **matrices)
  return x + y, weights.sum()


def own_route(logits):
  topk_idx = ep.keep_routing(lax.top_k(logits, K)[1])
  return topk_idx, jax.nn.softmax(
    jnp.take_along_axis(logits, topk_idx, axis=-1)
  )


@pytest.mark.parametrize(
  "block, unroll, options",
  [
    (whole_layer, True, {}),
    (whole_layer, False, dict(token_chunks=2)),
    (whole_layer, True, CHUNK),
    (whole_layer, True, dict(deterministic=True)),
    (whole_layer, False, dict(num_groups=4, top_groups=2, **FAIR)),
    (
      functools.partial(with_route, functools.partial(ep.route_topk, top_k=K)),
      False,
      {},
    ),
    (functools.partial(with_route, own_route), True, {}),
  ],
)
def test_experts_are_chosen_once(block, unroll, options):
  """A second routing could differ: XLA may round bfloat16 in another way."""
  layer = make(**options)
  block = functools.partial(block, layer)

  def choices(block):
    """Counts the top-k, `ep_prepare` and exchanges of counts of a step."""

    def loss(params, x):
      def body(x, p):
        return block(p, x)

      x, aux = lax.scan(body, x, params, unroll=unroll)
      return jnp.mean(x**2) + aux.sum()

    init = jax.vmap(lambda key: ep.moe.init(key, layer.config))
    params = jax.eval_shape(init, jax.random.split(jax.random.key(0), 2))
    x = jax.ShapeDtypeStruct((R * 16, WIDTH), jnp.float32)
    jaxpr = str(jax.make_jaxpr(jax.grad(loss))(params, x))
    return [jaxpr.count(f"{n}[") for n in ("top_k", "ep_prepare", "all_to_all")]

  assert choices(jax.checkpoint(block)) == choices(block)


@pytest.mark.parametrize("options", [{}, CHUNK, dict(deterministic=True)])
def test_a_rank_returns_no_empty_array(options):
  """XLA of JAX 0.11.2 crashes if an empty array leaves a `shard_map`."""
  layer = make(**options)

  def of_gradients(params, x):
    return jnp.sum(jax.grad(lambda x: layer(params, x)[0].sum())(x) ** 2)

  lowered = jax.jit(jax.grad(of_gradients)).lower(*arrays(layer, 16))
  types = re.findall("^ *} : (.*)", lowered.as_text(), re.MULTILINE)
  assert types and not re.search("[<x]0x", "".join(types))


# Chunks


def chunked_case():
  """Returns a case of small whole numbers that needs three chunks."""
  chunked = layer("ep4", overflow="chunk", recv_capacity_per_rank=16)
  tokens = np.arange(R * T)[:, None]
  idx = np.where(tokens >= 2 * T, np.arange(K), (tokens * K + np.arange(K)) % E)
  case = Case(chunked, idx.astype(np.int32), whole=True)
  rng = np.random.default_rng(1)
  shapes = dict(w_up=(E, H, 9), w_gate=(E, H, 9), w_down=(E, 9, H))
  matrices = {
    n: rng.integers(-1, 2, s).astype(np.float32) for n, s in shapes.items()
  }
  weights = rng.integers(1, 4, case.topk_idx.shape).astype(np.float32)
  return case, (case.topk_idx, case.tokens(), weights, matrices)


def test_memory_of_chunks_follows_the_capacity():
  """The program has no array with rows for the worst case."""
  case, arrays = chunked_case()
  shapes = []
  for config in case.layer, layer():
    args = put_moe(config, *arrays, arrays[1])
    text = moe_step_of(config).lower(*args).as_text()
    found = re.findall(rf"tensor<(\d+)x(?:{H}|9)xf32>", text)
    shapes.append(set(map(int, found)))
  assert case.layer.capacity in shapes[0]
  assert layer().capacity in shapes[1] - shapes[0]


@has_no_limits
def test_token_chunks_need_less_memory():
  """XLA plans less than half of the temporary memory for 8 chunks."""
  config = ep.MoEConfig(hidden=64, inner=64, num_experts=E, top_k=K)
  here = group("ep4", max_tokens_per_rank=None, hidden_dim=64)
  peaks = []
  for num in 1, 8:
    layer = ep.MoE(dataclasses.replace(config, token_chunks=num), here)
    assert layer.ep_layer.capacity_for(64 // num) == 64 * 2 * R // num
    params, x = arrays(layer, 64)
    args = *put(layer, params, x, x), None, None
    compiled = step_of(layer).lower(*args).compile()
    peaks.append(compiled.memory_analysis().temp_size_in_bytes)
  assert peaks[1] < 0.49 * peaks[0]


@pytest.mark.parametrize(
  "options",
  [dict(token_chunks=9), dict(overflow="chunk", capacity_factor=0.44)],
)
def test_gradients_of_matrices_are_added_in_float32(options):
  """A sum in bfloat16 would lose each 1 that is added to 256."""
  config = ep.MoEConfig(
    *(H, 6, E, 1),
    gated=False,
    activation=jax.nn.relu,
    score="sigmoid",
    scale=2.0,
    normalize=False,
    **options,
  )
  layer = ep.MoE(config, group("ep4", max_tokens_per_rank=9))
  params = draw_params(config, np.zeros)
  params["w_up"][:, 0, 0] = 1
  params = {n: p.astype(jnp.bfloat16) for n, p in params.items()}
  x = np.zeros((R * 9, H), jnp.bfloat16)
  x[:9, 0] = [1, 1, 1, 1, 256, 1, 1, 1, 1]
  _, _, grads, _ = run_step(layer, params, x, np.ones_like(x))
  assert (grads["w_down"][0, 0] == 264).all()


# The shared expert. On GPUs, an exchange runs on a separate stream, and XLA may
# run beside it the operations that neither depend on it nor produce its input.
# The tests read the program that XLA would compile for GPUs, with the host
# engine instead of NCCL EP.

S = 24  # differs from all other sizes
SHARED = ep.MoEConfig(
  16, 8, E, K, shared_inner=S, activation=jax.nn.relu, normalize=False
)


class Body:
  """A computation of an HLO module, as a graph of instructions."""

  def __init__(self, text):
    self.types, self.operands, self.opcodes = {}, {}, {}
    line = r"^  (?:ROOT )?([\w.\-]+) = (\(.*?\)|\S+) ([a-z\-]+)\((.*?)\)"
    for name, type_, opcode, operands in re.findall(line, text, re.MULTILINE):
      self.types[name], self.opcodes[name] = type_, opcode
      self.operands[name] = re.findall(r"[\w.\-]+", operands)

  def waits(self, name, other):
    seen, todo = set(), [name]
    while todo:
      new = {*self.operands.get(todo.pop(), ())} - seen
      seen |= new
      todo += new
    return other in seen

  def places(self, op, names):
    """Returns how many of `names` are before, beside and after an exchange."""
    (call,) = (
      n
      for n, opcode in self.opcodes.items()
      if opcode == "call" and n.startswith(op + ".")
    )
    places = collections.Counter(
      "before"
      if self.waits(call, n)
      else "after"
      if self.waits(n, call)
      else "beside"
      for n in names
    )
    return tuple(places[k] for k in ("before", "beside", "after"))

  def products(self):
    """Returns the names of the shared expert's matrix products."""
    size = re.compile(rf"\b{S}\b")
    return [
      n
      for n, opcode in self.opcodes.items()
      if opcode == "dot"
      and any(size.search(self.types[x]) for x in [n, *self.operands[n]])
    ]


@functools.cache
def bodies(config):
  """Returns the computations of the forward and the backward pass."""
  sizes = dict(hidden_dim=16, backend="host")
  with bootstrap(make_mesh({"ep": 4}), **sizes) as group:
    layer = ep.MoE(config, group)
    params, x = arrays(layer, T)
    args = *put(layer, params, x, x), None, None
    traced = step_of(layer).trace(*args)
    lowered = traced.lower(lowering_platforms=("cuda",))
  text = lowered.compiler_ir("hlo").as_hlo_text()
  return [Body(x) for x in text.split("\n\n") if "_xla_stream" in x]


@pytest.fixture(name="on_gpus")
def lowers_as_for_gpus(monkeypatch):
  monkeypatch.setattr(host, "NativeConnection", HostEngine)


# The numbers of products of the shared expert before, beside and after each
# exchange. The forward pass has the products up, gate and down. The backward
# pass has the gradients of h, of tokens (two) and of matrices (three).
BESIDE = dict(
  ep_dispatch=(0, 2, 1),
  ep_combine=(2, 1, 0),
  ep_combine_bwd=(0, 2, 4),
  ep_dispatch_bwd=(1, 5, 0),
)


def test_each_half_is_beside_an_exchange(on_gpus):
  for op, places in BESIDE.items():
    body = bodies(SHARED)[op.endswith("bwd")]
    assert body.places(op, body.products()) == places
