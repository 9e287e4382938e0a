# SPDX-License-Identifier: Apache-2.0
"""The expert networks, and one exchange: dispatch, experts, combine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, Literal

import jax
from jax import lax
import jax.numpy as jnp

from ep._src.base import arguments, compat
from ep._src.base.group import Sizes
from ep._src.matmul.grouped_matmul import grouped_matmuls
from ep._src.matmul.implementations import Implementation
from ep._src.ops.combine import combine
from ep._src.ops.dispatch import dispatch
from ep._src.ops.handle import Routing
from ep._src.ops.prepare import keep_routing
from ep._src.ops.row_map import map_used_rows, weighted

Activation = Callable[[jax.Array], jax.Array]
Weigh = Literal["late", "early", "input"]


@dataclasses.dataclass(frozen=True, eq=False)
class Segments:
  """Computes on the rows that a rank received, for experts that you write.

  `moe_layer(experts=)` passes the segments to a function of yours. An expert
  segment is the rows of one of the rank's L experts. The methods take and
  return arrays [C, ...], with a row for each slot of the capacity C, but visit
  only blocks of used rows. The methods return zeros in the rows that pad a
  segment. Rows after the last segment, even NaNs, affect no other row.

  You may also pass these arrays to JAX operations, which compute all C rows. If
  several calls read an array, JAX adds all C rows of its gradients. A function
  whose value or derivative at 0 is not finite belongs into `map`: after a JAX
  operation, NaNs of padding rows reach the gradients of matrices.
  """

  _sizes: Sizes
  _routing: Routing
  _dtype: Any
  _by_source: jax.Array | None = None  # int32 [L, P], rows from each rank
  _implementation: Implementation = None  # of the products

  @property
  def group_sizes(self) -> jax.Array:
    """int32 [L], the rows of each segment, as `lax.ragged_dot` takes them."""
    return self._routing.group_sizes

  def matmul(self, rows: jax.Array, matrices: Any) -> Any:
    """Returns rows [C, F] times the matrix [F, G] of each row's expert.

    Args:
      rows: [C, F].
      matrices: [L, F, G], or a pytree of such arrays with different G. One call
        for all matrices of one shape that multiply the same rows adds the
        gradients of the used rows only.

    Returns:
      [C, G] for each array of `matrices`.

    Raises:
      ValueError: a shape does not fit.
    """
    leaves, tree = jax.tree.flatten(matrices)
    C, L = self._sizes.C, self._sizes.L
    for matrix in leaves:
      arguments.check(
        (rows.ndim, matrix.ndim) == (2, 3)
        and (C, L, rows.shape[1]) == (len(rows), *matrix.shape[:2]),
        "Segments.matmul",
        f"got rows {rows.shape} and matrices {matrix.shape}; expected [{C}, F]"
        f" and [{L}, F, G].",
      )
    places: dict[Any, list[int]] = {}
    for i, matrix in enumerate(leaves):
      places.setdefault(matrix.shape, []).append(i)
    outs = [*leaves]
    for same in places.values():
      products = grouped_matmuls(
        rows,
        [leaves[i] for i in same],
        self._routing.group_sizes,
        segments=self._by_source,
        implementation=self._implementation,
      )
      for i, product in zip(same, products, strict=True):
        outs[i] = product
    return jax.tree.unflatten(tree, outs)

  def map(self, fn: Callable[..., Any], *arrays: jax.Array) -> Any:
    """Returns `fn(*arrays)`, where `fn` maps each row independently.

    Args:
      fn: maps blocks [B, ...] of each array, for any B, to an array [B, ...] or
        a sequence of arrays. If `fn` closes over traced values, it computes all
        C rows.
      *arrays: [C, ...]. Rows that pad a segment have no gradient, even if the
        value or a derivative of `fn` at 0 is not finite.

    Returns:
      The results of `fn`, with C rows instead of B.

    Raises:
      ValueError: an array has not C rows.
    """
    sizes, C = self._routing.group_sizes, self._sizes.C
    arguments.check(
      all(x.shape[:1] == (C,) for x in arrays),
      "Segments.map",
      f"got arrays of shapes {', '.join(str(x.shape) for x in arrays)};"
      f" expected [{C}, ...]. Segments.spread makes rows of parameters.",
    )
    return map_used_rows(fn, sizes, *arrays, is_padding=self._is_padding())

  def spread(self, values: Any, weights: jax.Array | None = None) -> Any:
    """Returns [C, F], the values of each row's expert, such as a bias.

    Args:
      values: [L, F], or a pytree of such arrays.
      weights: [C] or None, factors of the rows.
    """
    if weights is None:
      weights = jnp.ones(self._sizes.C)
    if (is_padding := self._is_padding()) is not None:
      weights = jnp.where(is_padding > 0, 0, weights)
    columns = jax.tree.map(lambda x: x[:, None], values)
    return self.matmul(weights[:, None].astype(self._dtype), columns)

  def _is_padding(self) -> jax.Array | None:
    """Returns int32 [C], 1 for the rows that pad a segment; None if none do."""
    if self._sizes.alignment == 1:
      return None
    routing = self._routing
    end = jnp.cumsum(routing.group_sizes)
    start = end - routing.group_sizes + routing.token_counts
    steps = jnp.zeros(self._sizes.C, jnp.int32)
    steps = steps.at[start].add(1, mode="drop").at[end].add(-1, mode="drop")
    return jnp.cumsum(steps)


Network = Callable[[Segments, Any, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Experts:
  """The network of an expert, whose formula `ep.MoE.__call__` has.

  An expert has gates and biases if its parameters do.

  Attributes:
    activation: elementwise.
    up_activation: elementwise; None is the identity.
    weigh: which rows routing weights multiply: outputs ("late"); h ("early"),
      where only rounding differs; or x ("input"), which is another function.
    deterministic: whether gradients of parameters are summed by source rank,
      in the order that ordered_sum.py defines.
    network: a function of the user, which replaces the network above.
    implementation: of the grouped matmuls.
  """

  activation: Activation = jax.nn.silu
  up_activation: Activation | None = None
  weigh: Weigh = "late"
  deterministic: bool = False
  network: Network | None = None
  implementation: Implementation = None

  def is_traced(self) -> bool:
    """Returns whether an activation closes over traced values.

    Programs with such activations must not be cached, or tracers would leak.
    """
    block = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    return any(
      isinstance(value, jax.core.Tracer)
      for fn in (self.activation, self.up_activation)
      if fn is not None
      for value in jax.make_jaxpr(fn)(block).consts
    )

  def hidden(self, up: jax.Array, gate: jax.Array | None = None) -> jax.Array:
    """Returns h, the hidden activations, given the two products plus biases."""
    if gate is None:
      return self.activation(up)
    if self.up_activation is not None:
      up = self.up_activation(up)
    return self.activation(gate) * up


@dataclasses.dataclass(frozen=True)
class SharedExpert:
  """The expert that all tokens visit, in halves: `hidden`, then `output`.

  Attributes:
    experts: the network of an expert.
    params: shared_up, shared_down, and shared_gate if there are gates.
    mask: bool [...]; the output is 0 where it is False.
  """

  experts: Experts
  params: Mapping[str, jax.Array]
  mask: jax.Array | None = None

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.output(self.hidden(x))

  @jax.named_scope("shared_experts")
  def hidden(self, x: jax.Array) -> jax.Array:
    """Returns the hidden activations [..., S] of tokens [..., H]."""
    names = ["up", "gate"] if "shared_gate" in self.params else ["up"]
    products = (self._of_tokens(self._product(x, name)) for name in names)
    return self._of_tokens(self.experts.hidden(*products))

  @jax.named_scope("shared_experts")
  def output(self, hidden: jax.Array) -> jax.Array:
    """Returns the outputs [..., H] for hidden activations [..., S]."""
    return self._of_tokens(self._product(hidden, "down"))

  def _of_tokens(self, rows: jax.Array) -> jax.Array:
    """Returns rows that are zero, with zero cotangents, for masked tokens."""
    if self.mask is None:
      return rows
    return jnp.where(self.mask[..., None], rows, 0)

  def _product(self, x: jax.Array, name: str) -> jax.Array:
    return x @ self.params["shared_" + name].astype(x.dtype)


def round_trip(
  sizes: Sizes,
  routing: Routing,
  experts: Experts,
  params: Any,
  tokens: jax.Array,
  topk_idx: jax.Array,
  topk_weights: jax.Array,
  shared: SharedExpert | None = None,
) -> jax.Array:
  """Sends tokens to their experts and sums the outputs.

  `routing` is of these tokens, and `sizes.tail` is unspecified. The output of
  the shared expert is added. XLA may run `shared.hidden` during dispatch and
  `shared.output` during combine, and their gradients during the gradient of the
  same exchange.
  """
  by_source = None
  if experts.deterministic:
    by_source = _rows_by_source(sizes, routing, topk_idx)
  segments = Segments(
    sizes, routing, tokens.dtype, by_source, experts.implementation
  )
  exchange = routing.mem, routing.group_sizes
  rows, row_weights = dispatch.of_rank(sizes, *exchange, tokens, topk_weights)
  if shared is not None:
    rows, hidden = _together(rows, shared.hidden(tokens))
  with jax.named_scope("experts"):
    if experts.weigh == "input":
      rows = map_used_rows(weighted, routing.group_sizes, rows, row_weights)
    early = row_weights if experts.weigh == "early" else None
    rows = _apply(experts, segments, params, rows, early)
  weights = row_weights if experts.weigh == "late" else None
  if weights is not None and not sizes.connection.weighs:
    # Multiply here, not in combine: otherwise the gradient of combine includes
    # the gradient of the product, and XLA does not overlap the exchange and the
    # shared expert.
    rows = map_used_rows(weighted, routing.group_sizes, rows, weights)
    weights = None
  if shared is not None:
    rows, hidden = _together(rows, hidden)
  out: jax.Array = combine.of_rank(
    sizes, tokens.shape[:-1], *exchange, rows, weights
  )
  if shared is None:
    return out
  # XLA would fuse the sum with the last product, which would wait for `out`.
  out, of_shared = _together(out, shared.output(hidden))
  return out + of_shared


def _together(*xs: jax.Array) -> tuple[jax.Array, ...]:
  """Returns the arrays; XLA computes all of them before it uses any of them.

  The same holds for their cotangents. So if one array is the result of an
  exchange, XLA computes the other arrays during the exchange.
  """
  return tuple(lax.optimization_barrier(compat.vary_together(*xs)))


def _rows_by_source(
  sizes: Sizes, routing: Routing, topk_idx: jax.Array
) -> jax.Array:
  """Returns int32 [L, P], the rows of each local expert from each rank."""
  axis = sizes.group.axis_name
  ids = jnp.where(routing.kept, topk_idx, sizes.V).ravel()
  sent = jnp.bincount(ids, length=sizes.V).reshape(sizes.P, -1)
  (sent,) = compat.vary_together(sent, axes=[axis])
  received: jax.Array = lax.all_to_all(sent, axis, split_axis=0, concat_axis=0)
  return keep_routing(received.astype(jnp.int32).T)


def _apply(
  experts: Experts,
  segments: Segments,
  params: Any,
  rows: jax.Array,
  weights: jax.Array | None,
) -> jax.Array:
  """Returns the experts' outputs, times `weights` unless these are None."""
  out: jax.Array
  if experts.network is not None:
    out = experts.network(segments, params, rows)
    given = getattr(out, "shape", None), getattr(out, "dtype", None)
    arguments.check(
      given == (rows.shape, rows.dtype),
      "moe_layer",
      f"experts returned {given[1]}{given[0]}, but an array like the rows,"
      f" {rows.dtype}{rows.shape}, is expected.",
    )
    return out
  names = ["up", "gate"] if "w_gate" in params else ["up"]
  has_biases = "b_up" in params

  # Hidden rows are as large as `products`, but cheap to recompute: do not save.
  @jax.checkpoint
  def leave(products: Sequence[jax.Array]) -> jax.Array:
    blocks = [*products]
    if has_biases:
      blocks += segments.spread([params["b_" + n] for n in names])
    if weights is not None:
      blocks.append(weights)
    hidden = segments.map(_Hidden(experts, len(names), has_biases), *blocks)
    product: jax.Array = segments.matmul(hidden, params["w_down"])
    return product

  out = leave(segments.matmul(rows, [params["w_" + n] for n in names]))
  if has_biases:
    bias = segments.spread(params["b_down"], weights)
    out = segments.map(jnp.add, out, bias)
  return out


@dataclasses.dataclass(frozen=True)
class _Hidden:
  """Maps blocks of the products x @ w to hidden rows.

  The operands are the products, then optionally their biases, and weights.
  """

  experts: Experts
  num_products: int
  has_biases: bool

  def __call__(self, *operands: jax.Array) -> jax.Array:
    n = self.num_products
    products, others = [*operands[:n]], [*operands[n:]]
    if self.has_biases:
      products = [*map(jnp.add, products, others[:n])]
      others = others[n:]
    hidden = self.experts.hidden(*products)
    return weighted(hidden, *others) if others else hidden
