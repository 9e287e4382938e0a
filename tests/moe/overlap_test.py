# SPDX-License-Identifier: Apache-2.0
"""Each half of the shared expert can run beside an exchange of the layer.

On GPUs, an exchange runs on a separate stream, and XLA may run beside it the
operations that neither depend on it nor produce its input. The tests read the
program that XLA would compile for GPUs, with the host engine instead of NCCL
EP.
"""

import collections
import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

from conftest import make_mesh
import ep
from ep._src.backends import host
from groups import bootstrap, E, K, T
from layer_steps import draw_params, put, step_of
from nccl_testing import HostEngine

HIDDEN, S = 16, 24  # S differs from all other sizes
CONFIG = ep.MoEConfig(
  HIDDEN, 8, E, K, shared_inner=S, activation=jax.nn.relu, normalize=False
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
  sizes = dict(hidden_dim=HIDDEN, backend="host")
  with bootstrap(make_mesh({"ep": 4}), **sizes) as group:
    layer = ep.MoE(config, group)
    x = np.zeros((4 * T, HIDDEN), np.float32)
    args = *put(layer, draw_params(CONFIG, np.zeros), x, x), None, None
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
APART = dict(
  ep_dispatch=(0, 0, 3),
  ep_combine=(0, 0, 3),
  ep_combine_bwd=(3, 3, 0),
  ep_dispatch_bwd=(3, 3, 0),
)


@pytest.mark.parametrize(
  "overlap, weigh", [(True, "late"), (True, "early"), (False, "late")]
)
def test_each_half_is_beside_an_exchange(on_gpus, weigh, overlap):
  config = dataclasses.replace(CONFIG, weigh=weigh, overlap=overlap)
  for op, places in (BESIDE if overlap else APART).items():
    body = bodies(config)[op.endswith("bwd")]
    assert body.places(op, body.products()) == places


def test_losses_and_metrics_are_beside_combine(on_gpus):
  forward, _ = bodies(CONFIG)
  sums = [n for n, op in forward.opcodes.items() if op == "all-reduce"]
  assert forward.places("ep_combine", sums) == (0, len(sums), 0)
  assert sums
