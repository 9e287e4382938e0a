# SPDX-License-Identifier: Apache-2.0
"""The shared expert runs in halves beside the exchanges of a layer.

On GPUs an exchange has a stream of its own, and XLA may run beside it what
neither waits for it nor makes what it moves. That is seen in the program that
XLA would compile for GPUs, with the host engine in NCCL EP's place.
"""

import collections
import dataclasses
import re

import jax
from jax.experimental.multihost_utils import process_allgather
import jax.numpy as jnp
import numpy as np
import pytest

from cases import jit_quickly
from conftest import assert_shards_equal, make_mesh, to_global
import ep
from ep._src.backends import host
from ep._src.moe import round_trip, shared
from groups import bootstrap, E, K, T
from nccl_testing import HostEngine

HIDDEN, S = 16, 24  # no other size is S
CONFIG = ep.MoEConfig(
  HIDDEN, 8, E, K, shared_inner=S, activation=jax.nn.relu, normalize=False
)


class Body:
  """A computation of a HLO module, as a graph of instructions."""

  def __init__(self, text):
    self.types, self.operands, self.opcodes = {}, {}, {}
    line = r"^  (?:ROOT )?([\w.\-]+) = (\(.*?\)|\S+) ([a-z\-]+)\((.*?)\)"
    for name, type_, opcode, operands in re.findall(line, text, re.MULTILINE):
      self.types[name], self.opcodes[name] = type_, opcode
      self.operands[name] = re.findall(r"[\w.\-]+", operands)

  def waits(self, name, other):
    """Returns whether `name` depends on `other`."""
    seen, todo = set(), [name]
    while todo:
      for operand in self.operands.get(todo.pop(), ()):
        if operand not in seen:
          seen.add(operand)
          todo.append(operand)
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
    """Returns the products of the shared expert."""
    size = re.compile(rf"\b{S}\b")
    return [
      n
      for n, opcode in self.opcodes.items()
      if opcode == "dot"
      and any(size.search(self.types[x]) for x in [n, *self.operands[n]])
    ]


def run(layer):
  """Returns a function to the loss, the output and gradients of a layer."""

  def loss(params, tokens):
    y, metrics = layer(params, tokens)
    return (y * jnp.round(tokens)).sum() + metrics.z_loss, y

  return jax.value_and_grad(loss, (0, 1), has_aux=True)


def arrays(group):
  """Returns parameters and tokens of small whole numbers, for exact sums."""
  rng = np.random.default_rng(0)
  types = jax.eval_shape(lambda: ep.moe.init(jax.random.key(0), CONFIG))
  shapes = {n: x.shape for n, x in types.items()}, (4 * T, HIDDEN)
  return jax.tree.map(
    lambda shape: to_global(
      rng.integers(-1, 2, shape).astype(np.float32), group.mesh
    ),
    shapes,
    is_leaf=lambda x: isinstance(x, tuple) and isinstance(x[0], int),
  )


def bodies(config):
  """Returns the forward and the backward pass on one rank."""
  sizes = dict(hidden_dim=HIDDEN, backend="host")
  with bootstrap(make_mesh({"ep": 4}), **sizes) as group:
    layer = ep.MoE(config, group)
    traced = jax.jit(run(layer)).trace(*arrays(group))
    lowered = traced.lower(lowering_platforms=("cuda",))
  text = lowered.compiler_ir("hlo").as_hlo_text()
  return [Body(x) for x in text.split("\n\n") if "_xla_stream" in x]


@pytest.fixture(name="on_gpus")
def lowers_as_for_gpus(monkeypatch):
  monkeypatch.setattr(host, "HostConnection", HostEngine)


# How many of the products of the shared expert, up, gate and down, are before,
# beside and after an exchange. In the backward pass these are the gradients of
# h, of tokens (two) and of matrices (three), which nothing waits for.
BESIDE = dict(
  ep_dispatch=(0, 2, 1),
  ep_combine=(2, 1, 0),
  ep_combine_bwd=(0, 2, 4),
  ep_dispatch_bwd=(1, 5, 0),
)
APART = dict(
  ep_dispatch=(0, 0, 3),
  ep_combine=(0, 0, 3),
  ep_combine_bwd=(3, 3, 0),
  ep_dispatch_bwd=(3, 3, 0),
)


def order(config):
  forward, backward = bodies(config)
  return {
    op: body.places(op, body.products())
    for body, ops in [
      (forward, ("ep_dispatch", "ep_combine")),
      (backward, ("ep_combine_bwd", "ep_dispatch_bwd")),
    ]
    for op in ops
  }


@pytest.mark.parametrize("weigh", ["late", "early"])
@pytest.mark.parametrize("overlap", [True, False])
def test_each_half_is_beside_an_exchange(on_gpus, weigh, overlap):
  config = dataclasses.replace(CONFIG, weigh=weigh, overlap=overlap)
  assert order(config) == (BESIDE if overlap else APART)


def test_a_false_dependence_is_seen(on_gpus, monkeypatch):
  """The test above sees a shared expert that waits for dispatch."""

  def dispatch(handle, tokens, weights):
    rows, weights = round_trip_dispatch(handle, tokens, weights)
    tied.append(rows)
    return rows, weights

  def hidden(self, x):
    return shared_hidden(self, shared.together(x, tied.pop())[0])

  tied = []
  round_trip_dispatch = round_trip.ep_dispatch
  shared_hidden = shared.SharedExpert.hidden
  monkeypatch.setattr(round_trip, "ep_dispatch", dispatch)
  monkeypatch.setattr(shared.SharedExpert, "hidden", hidden)
  assert order(CONFIG)["ep_dispatch"] == (0, 0, 3)


def test_losses_and_metrics_are_beside_combine(on_gpus):
  forward, _ = bodies(CONFIG)
  sums = [n for n, op in forward.opcodes.items() if op == "all-reduce"]
  assert forward.places("ep_combine", sums) == (0, len(sums), 0)
  assert sums


@pytest.mark.parametrize("weigh", ["late", "early"])
def test_the_option_changes_no_bit(weigh):
  config = dataclasses.replace(CONFIG, weigh=weigh)
  with bootstrap(make_mesh({"ep": 4}), hidden_dim=HIDDEN) as group:
    on, off = (
      jit_quickly(run(ep.MoE(dataclasses.replace(config, overlap=o), group)))
      for o in (True, False)
    )
    args = arrays(group)
    for got, expected in zip(
      *map(jax.tree.leaves, (on(*args), off(*args))), strict=True
    ):
      assert_shards_equal(got, process_allgather(expected, tiled=True))
