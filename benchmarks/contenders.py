# SPDX-License-Identifier: Apache-2.0
"""The contenders of the benchmark, and the ops that run on them.

A contender is made for a `Layout`: one of ep's backends, or code written in
JAX. It has these methods, which `jax.shard_map` calls with one rank's arrays
over the axis "ep":

  prepare(topk_idx) -> handle           a pytree
  dispatch(handle, tokens, topk_weights) -> rows, row_weights
  combine(handle, rows, weights=None) -> tokens

or the method `moe` of layers.py. `Workload.inputs` gives the shapes, and
ep/_src/ops/reference.py defines the results. Dispatch and combine are linear,
and both have a derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import contextlib
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from benchmarks import layers
from benchmarks.exchanges import Gathered, PaddedScatter
from benchmarks.workload import AXIS, Layout
import ep
from ep._src.group.bootstrap import BACKENDS

HAND_WRITTEN = "padded_scatter"  # the usual code in plain JAX
EP = ("host", "nccl", "xla")
PURE_XLA: dict[str, Callable[[Layout], Any]] = {
  "padded_scatter": PaddedScatter,
  "gathered": Gathered,
}
LAYERS: dict[str, Callable[[Layout], Any]] = {
  "one_hot": layers.OneHot,
  "sorted_ep_matmul": lambda layout: layers.JaxExperts(
    Gathered(layout), lambda _, topk_idx: layers.group_sizes(layout, topk_idx)
  ),
}
# Layers of ep whose experts the program of a user would write.
USERS = ("own_experts", "jax_experts")
# The names of all contenders, in the order of printed tables.
NAMES = (*EP, *PURE_XLA, *LAYERS, *USERS)


def is_pure_xla(name: str) -> bool:
  return name in PURE_XLA or name in LAYERS or name == "xla"


def ops_of(name: str, chosen: Sequence[str]) -> list[str]:
  """Returns the chosen ops that a contender implements."""
  known = OPS
  if name in PURE_XLA:
    known = EXCHANGES
  elif name in LAYERS or name in USERS:
    known = LAYER_OPS
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
    layer = ep.EpLayerConfig(group, tail=tail)
    if name == "own_experts":
      yield layers.OwnExperts(layer)
    elif name == "jax_experts":
      yield layers.JaxExperts(Ep(layer), lambda handle, _: handle.group_sizes)
    else:
      yield Ep(layer)


class Ep:
  """The contender that calls the public ops of ep."""

  dispatch = staticmethod(ep.ep_dispatch)
  combine = staticmethod(ep.ep_combine)

  def __init__(self, layer: ep.EpLayerConfig):
    self._layer = layer

  def prepare(self, topk_idx):
    return ep.ep_prepare(self._layer, topk_idx)

  def moe(self, topk_idx, tokens, topk_weights, w_gate, w_up, w_down):
    matrices = dict(w_gate=w_gate, w_up=w_up, w_down=w_down)
    return ep.moe_layer(self._layer, tokens, topk_idx, topk_weights, **matrices)


class Op(NamedTuple):
  """A measured op: a function of a contender and of named inputs.

  The names are those of `Workload.inputs`; "handle" is the result of the
  contender's prepare.
  """

  run: Callable[..., Any]
  inputs: tuple[str, ...]


def _method(name: str, *inputs: str) -> Op:
  """Returns the op that calls the contender's method of this name."""
  return Op(lambda contender, *args: getattr(contender, name)(*args), inputs)


def _dispatch_bwd(contender, handle, tokens, topk_weights, *cotangents):
  dispatch = functools.partial(contender.dispatch, handle)
  return jax.linear_transpose(dispatch, tokens, topk_weights)(cotangents)


def _combine_bwd(contender, handle, rows, tokens):
  combine = functools.partial(contender.combine, handle)
  return jax.linear_transpose(combine, rows)(tokens)[0]


def _round_trip(contender, handle, tokens, topk_weights):
  """Runs a layer without experts, whose weights multiply rows in combine.

  Without experts, XLA fuses the two gathers of a hand-written round trip, even
  through an optimization barrier, and never writes the received rows. A loop of
  0 rounds over the buffer makes XLA write them.
  """
  rows, weights = contender.dispatch(handle, tokens, topk_weights)
  rounds = jnp.isnan(topk_weights[0, 0]).astype(jnp.int32)  # always 0
  rows = lax.fori_loop(0, rounds, lambda i, rows: rows.at[i].mul(2), rows)
  return contender.combine(handle, rows, weights)


def _moe_grad(contender, topk_idx, *differentiated):
  _, vjp = jax.vjp(functools.partial(contender.moe, topk_idx), *differentiated)
  tokens, *_ = differentiated
  return vjp(tokens)  # the tokens are also the cotangent


EXCHANGES = {
  "prepare": _method("prepare", "topk_idx"),
  "dispatch": _method("dispatch", "handle", "tokens", "topk_weights"),
  "combine": _method("combine", "handle", "rows"),
  "dispatch_bwd": Op(
    _dispatch_bwd, ("handle", "tokens", "topk_weights", "rows", "row_weights")
  ),
  "combine_bwd": Op(_combine_bwd, ("handle", "rows", "tokens")),
  "round_trip": Op(_round_trip, ("handle", "tokens", "topk_weights")),
}
# A whole layer: the forward pass, and the forward pass with all gradients.
_MOE_INPUTS = (
  *("topk_idx", "tokens", "topk_weights"),
  *("w_gate", "w_up", "w_down"),
)
LAYER_OPS = {
  "moe": _method("moe", *_MOE_INPUTS),
  "moe_grad": Op(_moe_grad, _MOE_INPUTS),
}
OPS = EXCHANGES | LAYER_OPS
