# SPDX-License-Identifier: Apache-2.0
"""Defines the oracle, which computes the ops with ep/_src/ops/reference.py."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from ep._src.ops import reference
from groups import ranks
from op_functions import Sizes


class Differentiated(Exception):
  """Raised if an oracle of NumPy arrays is called with traced arrays."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Oracle:
  """An implementation of `Ops` that applies the reference to each EP domain.

  The methods take NumPy arrays. As an argument of a jitted function the oracle
  is traced; its methods then take JAX arrays and are differentiable.
  """

  routings: tuple[reference.Routing, ...]  # one for each domain
  capacity: int = dataclasses.field(metadata=dict(static=True))
  lead: tuple[int, ...] = dataclasses.field(metadata=dict(static=True))

  def sizes(self):
    def fields(routing):
      return [getattr(routing, name) for name in Sizes._fields]

    return Sizes(*self._map(fields, "->rrrrrt"))

  def dispatch(self, tokens, weights, scales=None):
    call = functools.partial(reference.dispatch, capacity=self.capacity)
    rows, row_weights = self._map(call, "tt->rr", tokens, weights)
    if scales is None:
      return rows, row_weights
    row_scales, _ = self._map(call, "tt->rr", scales, weights)
    return rows, row_weights, row_scales

  def combine(self, rows, weights=None):
    arrays = (rows,) if weights is None else (rows, weights)
    return self._map(
      lambda *x: (reference.combine(*x),), "r" * len(arrays) + "->t", *arrays
    )[0]

  def dispatch_bwd(self, primals, cotangents):
    _, weights = primals
    g_tokens, g_weights = self._map(
      reference.dispatch_bwd, "rr->tt", *cotangents
    )
    return g_tokens, g_weights.astype(weights.dtype)

  def combine_bwd(self, primals, cotangent):
    call = functools.partial(reference.combine_bwd, capacity=self.capacity)
    (g,) = self._map(lambda *x: (call(*x),), "t->r", cotangent)
    if len(primals) == 1:
      return (g,)
    rows, weights = (x.astype(np.float32) for x in primals)
    g = g.astype(np.float32)
    grads = g * weights[..., None], (g * rows).sum(-1)
    return tuple(d.astype(x.dtype) for d, x in zip(grads, primals, strict=True))

  def _map(self, fn, kinds, *arrays):
    """Returns `fn(routing, *arrays)` for the arrays of each domain.

    `kinds` has a letter per array and per result, as in "tt->rr": "t" for
    tokens `[R * T, ...]` of the global view, "r" for rows `[R, ...]`.
    """
    traced = isinstance(self.routings[0].slot, jax.core.Tracer)
    if not traced and any(isinstance(x, jax.core.Tracer) for x in arrays):
      raise Differentiated
    xp = jnp if traced else np
    domains, ranks = len(self.routings), len(self.routings[0].slot)
    split = {
      "t": lambda x: x.reshape(domains, ranks, -1, x.shape[-1]),
      "r": lambda x: x.reshape(domains, ranks, *x.shape[1:]),
    }
    join = {
      "t": lambda x: x.reshape(*self.lead, x.shape[-1]),
      "r": lambda x: x.reshape(-1, *x.shape[2:]),
    }
    kinds_in, kinds_out = kinds.split("->")
    arrays = [
      split[k](xp.asarray(x)) for k, x in zip(kinds_in, arrays, strict=True)
    ]
    outs = [fn(*x) for x in zip(self.routings, *arrays, strict=True)]
    return tuple(
      join[k](xp.stack(x))
      for k, x in zip(kinds_out, zip(*outs, strict=True), strict=True)
    )


def make_oracle(layer, topk_idx, weights=None):
  """Returns the oracle of a routing `[R * T, K]`.

  The weights have the routing's shape, and decide drops by `layer.drop_by`.
  """
  sizes, ids = _sizes(layer, topk_idx), _of_domains(layer, topk_idx)
  rule = "slot" if weights is None else layer.drop_by or "fair"
  if rule == "slot":
    routings = [reference.prepare(x, **sizes) for x in ids]
  else:
    routings = [
      reference.prepare_assigned(
        x, reference.assign(x, w, drop_by=rule, **sizes), **sizes
      )
      for x, w in zip(ids, _of_domains(layer, weights), strict=True)
    ]
  return Oracle(tuple(routings), sizes["capacity"], topk_idx.shape[:-1])


def _sizes(layer, topk_idx):
  num_tokens = math.prod(topk_idx.shape[:-1]) // ranks(layer)
  return dict(
    num_experts=layer.group.num_experts,
    capacity=layer.capacity_for(num_tokens),
    alignment=layer.alignment,
  )


def _of_domains(layer, x):
  p = layer.group.ep_size
  return x.reshape(ranks(layer) // p, p, -1, x.shape[-1])
