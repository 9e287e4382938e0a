# SPDX-License-Identifier: Apache-2.0
"""The contenders of the benchmark: ep's backends and code written in JAX.

A contender is made for a `Layout` and has these methods, which `jax.shard_map`
calls with one rank's arrays over the axis "ep":

  prepare(topk_idx) -> handle           a pytree
  dispatch(handle, tokens, topk_weights) -> rows, row_weights
  combine(handle, rows, weights=None) -> tokens
  dispatch_bwd(handle, rows, row_weights) -> tokens, topk_weights
  combine_bwd(handle, tokens) -> rows

`Workload.inputs` gives the shapes, and ep/_src/ops/reference.py defines the
results. The hand-written contenders define their derivatives as gathers,
because JAX would turn the derivative of a gather into a scatter-add.

layers.py has the contenders that compute whole MoE layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import layers, ops
from benchmarks.exchanges import Gathered, PaddedGather, PaddedScatter
from benchmarks.workload import AXIS, Layout
import ep
from ep._src.group.bootstrap import BACKENDS

HAND_WRITTEN = "padded_scatter"  # the usual code in plain JAX
EP = ("host", "nccl", "xla")
PURE_XLA: dict[str, Callable[[Layout], Any]] = {
  "padded_scatter": PaddedScatter,
  "padded_gather": PaddedGather,
  "gathered": Gathered,
}
LAYERS: dict[str, Callable[[Layout], Any]] = {
  "masked": layers.Masked,
  "one_hot": layers.OneHot,
  "sorted_ep_matmul": lambda layout: layers.Sorted(layout, Gathered(layout)),
}
# Layers whose experts the program of a user would write.
USERS = ("own_experts", "jax_experts")


def names() -> tuple[str, ...]:
  """Returns the names of all contenders, in the order of printed tables."""
  return (*EP, *PURE_XLA, *LAYERS, *USERS)


def is_pure_xla(name: str) -> bool:
  return name in PURE_XLA or name in LAYERS or name == "xla"


def ops_of(name: str, chosen: Sequence[str]) -> list[str]:
  """Returns the chosen ops that a contender implements."""
  known = ops.ALL
  if name in PURE_XLA:
    known = ops.OPS
  elif name in LAYERS or name in USERS:
    known = ops.LAYERS
  return [op for op in chosen if op in known]


def why_not(name: str, mesh: jax.sharding.Mesh) -> str | None:
  """Returns why a contender cannot run on the mesh, or None if it can."""
  if name in EP:
    try:
      BACKENDS[name].check_mesh(mesh, AXIS)
    except ValueError as error:
      return str(error)
  return None


@contextlib.contextmanager
def make(name: str, mesh: jax.sharding.Mesh, layout: Layout, dtype):
  """Makes a contender, and closes it when the context ends. Collective."""
  if build := (PURE_XLA | LAYERS).get(name):
    yield build(layout)
    return
  with ep.ep_bootstrap(
    mesh,
    num_experts=layout.shape.num_experts,
    max_tokens_per_rank=layout.shape.tokens,
    hidden_dim=layout.shape.hidden,
    top_k=layout.shape.top_k,
    recv_capacity_per_rank=layout.capacity,
    max_token_dtype=dtype,
    backend=name if name in EP else None,
  ) as group:
    tail = "zero" if layout.zero_tail else "unspecified"
    of_layer = dict(own_experts=OwnExperts, jax_experts=JaxExperts)
    contender = of_layer.get(name, Ep)
    yield contender(ep.EpLayerConfig(group, tail=tail), layout)


class Ep:
  """The contender that calls the public ops of ep."""

  def __init__(self, layer: ep.EpLayerConfig, layout: Layout):
    self._layer = layer
    self._layout = layout

  def prepare(self, topk_idx):
    return ep.ep_prepare(self._layer, topk_idx)

  def dispatch(self, handle, tokens, topk_weights):
    return ep.ep_dispatch(handle, tokens, topk_weights)

  def combine(self, handle, rows, weights=None):
    return ep.ep_combine(handle, rows, weights)

  def moe(self, topk_idx, tokens, topk_weights, w_gate, w_up, w_down):
    return ep.moe_layer(
      self._layer,
      tokens,
      topk_idx,
      topk_weights,
      w_gate=w_gate,
      w_up=w_up,
      w_down=w_down,
    )

  # Dispatch and combine are linear: `jax.linear_transpose` needs only shapes.

  def dispatch_bwd(self, handle, rows, row_weights):
    shape = self._layout.shape
    return jax.linear_transpose(
      functools.partial(ep.ep_dispatch, handle),
      jax.ShapeDtypeStruct((shape.tokens, shape.hidden), rows.dtype),
      jax.ShapeDtypeStruct((shape.tokens, shape.top_k), jnp.float32),
    )((rows, row_weights))

  def combine_bwd(self, handle, tokens):
    shape = self._layout.capacity, self._layout.shape.hidden
    (rows,) = jax.linear_transpose(
      functools.partial(ep.ep_combine, handle),
      jax.ShapeDtypeStruct(shape, tokens.dtype),
    )(tokens)
    return rows


class OwnExperts(Ep):
  """Passes a function that computes the experts of `ep` to `moe_layer`."""

  def moe(self, topk_idx, tokens, topk_weights, *matrices):
    return ep.moe_layer(
      self._layer,
      tokens,
      topk_idx,
      topk_weights,
      experts=_gated_experts,
      params=matrices,
    )


def _gated_experts(segments, matrices, rows):
  w_gate, w_up, w_down = matrices

  @jax.checkpoint
  def down(gate, up):
    return segments.matmul(segments.map(_hidden, gate, up), w_down)

  return down(*segments.matmul(rows, [w_gate, w_up]))


def _hidden(gate, up):
  return jax.nn.silu(gate) * up


class JaxExperts(Ep):
  """The contender that calls JAX between the ops, as the tutorial does."""

  def moe(self, topk_idx, tokens, topk_weights, w_gate, w_up, w_down):
    handle = self.prepare(topk_idx)
    rows, weights = self.dispatch(handle, tokens, topk_weights)
    dot = functools.partial(ep.grouped_matmul, group_sizes=handle.group_sizes)
    rows = dot(layers.inner(dot, rows, w_gate, w_up), w_down)
    return self.combine(handle, rows, weights)
