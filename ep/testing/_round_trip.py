# SPDX-License-Identifier: Apache-2.0
"""Tests a transport: dispatch, experts that scale their rows, and combine.

An expert multiplies its rows by 1 or 2 and by their weights. So the result is
linear in the tokens and in the weights, and the oracle computes all derivatives
in NumPy, by the ops of ep/_src/ops/reference.py.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
import copy
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from ep._src.ops import reference
from ep._src.ops.reference import Array
from ep.testing import _numbers
from ep.testing._compare import Expected, Where
from ep.testing._declarations import Received, Setting, Transport
from ep.testing._trial import Oracle, Trial


class RoundTrip(Trial):
  """A transport, built for one setting."""

  def __init__(self, transport: Transport, setting: Setting):
    dispatch, combine = transport.build(setting)
    is_local = transport.view == "local"
    checked = functools.partial(
      _checked, setting, 1 if is_local else setting.ep_size
    )

    def outputs(x: Received, factor: jax.Array) -> tuple[Any, ...]:
      """Applies the experts; returns the arguments of `combine`."""
      if not transport.weighted:
        return _scaled(x.rows, factor * x.weights), x.state
      one = 0 * factor + 1  # NaN where `factor` is; see `poisoned`
      return _scaled(x.rows, factor), x.state, one * x.weights

    def of_rank(
      *calls: Any, scales: Sequence[int] = (1,)
    ) -> list[tuple[Any, Received]]:
      # Run every dispatch before the first combine, for `interleaved`.
      received = [
        checked(dispatch(tokens, topk_idx, weights), tokens.dtype)
        for (topk_idx, _), (tokens, weights) in calls
      ]
      return [
        (combine(*outputs(x, scale * factor)), x._replace(state=()))
        for scale in scales
        for ((_, factor), _), x in zip(calls, received, strict=True)
      ]

    def with_scales(topk_idx: Any, tokens: Any, *others: Any) -> Received:
      received = dispatch(tokens, topk_idx, *others)
      return checked(received, tokens.dtype)._replace(state=())

    ranks = PartitionSpec("ep")

    def on_ranks(fn: Callable[..., Any]) -> Callable[..., Any]:
      if not is_local:
        return fn
      return jax.shard_map(
        fn,
        mesh=setting.mesh,
        in_specs=ranks,
        out_specs=ranks,
        check_vma=False,
      )

    again = functools.partial(of_rank, scales=(1, -1))
    self._interleaved = jax.jit(on_ranks(again))
    self._with_scales = jax.jit(on_ranks(with_scales))
    function = on_ranks(of_rank)
    super().__init__(transport, setting, lambda *call: function(call)[0])

  def interleaved(self, *calls: tuple[RoundTripOracle, Any]) -> Any:
    """Returns the results of `forward` for each oracle and its inputs.

    One program runs all dispatches, then all combines, and then all combines
    again with negative rows.
    """
    placed = [tuple(self._place(x.route, inputs)) for x, inputs in calls]
    return self.finish(self._interleaved(*placed))

  def with_scales(self, oracle: RoundTripOracle, inputs: Any) -> Any:
    """Returns the received rows, weights and scales."""
    placed = self._place(oracle.route[0], *inputs)
    return self.finish(self._with_scales(*placed))

  def oracle(self, topk_idx: np.ndarray) -> RoundTripOracle:
    setting = self.setting
    idx = topk_idx.reshape(setting.ep_size, setting.tokens, setting.top_k)
    routing = reference.prepare(idx, **_sizes(setting))
    return RoundTripOracle(self.subject, setting, idx, routing)


class RoundTripOracle(Oracle):
  """The expected results of a transport, and the source of each row.

  Attributes:
    expert: `[P, C]`, the local expert of each row, and L in the tail.
    source: `[P, C, 3]`, the rank, token and choice of each row, or -1.
  """

  numbers = ("whole", "normal")

  def __init__(
    self,
    transport: Transport,
    setting: Setting,
    topk_idx: np.ndarray,
    routing: reference.Routing,
  ):
    self._idx = topk_idx
    self._routing = routing
    slots = np.arange(setting.capacity)
    ends = np.cumsum(routing.group_sizes, 1)
    self.expert = (slots >= ends[..., None]).sum(1)
    choices = np.argwhere(routing.kept)
    self.source = np.full((*self.expert.shape, 3), -1)
    self.source[routing.rank[routing.kept], routing.slot[routing.kept]] = (
      choices
    )
    ids = np.arange(setting.ep_size)[:, None] * setting.num_local_experts
    self._factor = (1 + (ids + self.expert) % 2).astype(np.float32)
    super().__init__(
      transport,
      setting,
      topk_idx.reshape(-1, setting.top_k),
      self._factor.reshape(-1),
    )

  @property
  def holds_token(self) -> np.ndarray:
    """A mask of all rows `[P * C]`: True if the row has a token."""
    return self.source[..., 0].reshape(-1) >= 0

  @property
  def in_tail(self) -> np.ndarray:
    """A mask of all rows `[P * C]`: True after the last segment of a rank."""
    in_tail: np.ndarray = self.expert == self._setting.num_local_experts
    return in_tail.reshape(-1)

  def poisoned(self) -> RoundTripOracle:
    """Returns an oracle whose experts return NaN for rows without a token.

    The expected results do not change.
    """
    other = copy.copy(self)
    topk_idx, factor = self.route
    nan = np.float32(np.nan)
    other.route = topk_idx, np.where(self.holds_token, factor, nan)
    return other

  def observed(self, received: Any, inputs: Any) -> RoundTripOracle:
    if self._subject.order != "any":
      return self
    setting, (tokens, _, *scales) = self._setting, inputs
    rows = received.rows
    if scales:  # rows are equal only with their scales
      rows = _side_by_side(rows, received.scales)
      tokens = _side_by_side(tokens, *scales)
    tokens = self._by_rank(tokens)
    rows = rows.reshape(*self.expert.shape, -1)
    rank, slot = (np.full_like(self._routing.rank, -1) for _ in range(2))
    for p, j in np.ndindex(self._routing.token_counts.shape):
      e = p * setting.num_local_experts + j
      choices = collections.defaultdict(list)
      for r, t, k in np.argwhere(self._idx == e):
        choices[tokens[r, t].tobytes()].append((r, t, k))
      start = int(self._routing.group_sizes[p, :j].sum())
      for c in range(start, start + int(self._routing.token_counts[p, j])):
        found = choices[rows[p, c].tobytes()]
        if not found:
          raise AssertionError(
            f"rows: rank {p}, expert {e}, row {c} is {rows[p, c]}, which is no"
            f" token that chose expert {e}, or one that is there already."
          )
        choice = found.pop()
        rank[choice], slot[choice] = p, c
    routing = self._routing._replace(rank=rank, slot=slot, kept=slot >= 0)
    return self._with(routing)

  def planned(self, inputs: Any) -> RoundTripOracle:
    setting, drop_by = self._setting, self._subject.drop_by
    needed = self._routing.max_recv_tokens.max()
    if drop_by == "slot" or needed <= setting.capacity:
      return self
    idx, weights, sizes = self._idx, self._by_rank(inputs[1]), _sizes(setting)
    kept = reference.assign(idx, weights, drop_by=drop_by, **sizes)
    return self._with(reference.prepare_assigned(idx, kept, **sizes))

  def _with(self, routing: reference.Routing) -> RoundTripOracle:
    return RoundTripOracle(self._subject, self._setting, self._idx, routing)

  def inputs(
    self, rng: np.random.Generator, numbers: str
  ) -> tuple[np.ndarray, np.ndarray]:
    """Draws tokens `[P * T, H]` and weights `[P * T, K]`.

    "normal": weights are powers of two, so that only sums round. "free":
    weights have full mantissas. "special": tokens and weights include NaNs and
    other special values. "special tokens": only tokens include such values, and
    weights are so small that no finite sum overflows.
    """
    setting, dtype = self._setting, self._setting.dtype
    n = setting.ep_size * setting.tokens
    shapes = (n, setting.hidden), (n, setting.top_k)
    if numbers == "whole":
      return (
        rng.integers(1, 5, shapes[0]).astype(dtype),
        rng.integers(1, 3, shapes[1]).astype(np.float32),
      )
    tokens = rng.standard_normal(shapes[0]).astype(dtype)
    powers = np.exp2(rng.integers(-2, 2, shapes[1])).astype(np.float32)
    if numbers == "normal":
      return tokens, powers
    if numbers == "special tokens":
      return _numbers.with_specials(rng, tokens), powers / 32
    weights = rng.random(shapes[1], np.float32)
    if numbers == "special":
      tokens = _numbers.with_specials(rng, tokens)
      weights = _numbers.with_specials(rng, weights)
    return tokens, weights

  def scaled_inputs(
    self, rng: np.random.Generator, row_dtype: str, scale_dtype: str
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draws rows and scales with random bits, and weights.

    A row has at least eight scales, so that all rows differ. A setting has one
    number of scales, because the transport compiles a program for each number.
    """
    tokens, weights = self.inputs(rng, "free")

    def any_bits(width: int, name: str) -> np.ndarray:
      dtype = jnp.dtype(name)
      shape = len(tokens), width * dtype.itemsize
      return rng.integers(0, 256, shape, np.uint8).view(dtype)

    rows = any_bits(tokens.shape[1], row_dtype)
    return rows, weights, any_bits(8 + tokens.shape[1] % 5, scale_dtype)

  def received(self, inputs: Any) -> dict[str, Expected]:
    """Returns the arrays that all ranks receive, by name."""
    tokens, weights, *scales = inputs
    rows, row_weights = self._dispatch((tokens, weights))
    arrays = dict(rows=rows, weights=row_weights)
    if scales:
      arrays["scales"], _ = self._dispatch((*scales, weights))
    expected = {x: self._exactly(arrays[x], self._where_row) for x in arrays}
    for name, where in dict(
      group_sizes=self._where_expert,
      token_counts=self._where_expert,
      dropped_counts=self._where_expert,
      total_recv_tokens=lambda at: f"rank {at[0]}",
      max_recv_tokens=lambda at: f"rank {at[0]}",
      kept=self._where_choice,
    ).items():
      expected[name] = self._exactly(getattr(self._routing, name), where)
    return expected

  def output(self, inputs: Any) -> Expected:
    return self._sums(self._output, inputs)[0]

  def pullback(self, inputs: Any, g: np.ndarray) -> dict[str, Expected]:
    """Returns the cotangents of the tokens and of the weights.

    The cotangent of a weight is a float32 sum over H, whose order the contract
    does not specify. The sum is exact for whole numbers.
    """
    tokens, weights = self._sums(self._pullback, *inputs, g)
    limit = self._limit(inputs, g, least=self._setting.hidden)
    weights = weights._replace(where=self._where_choice, limit=limit)
    return {"tokens": tokens, "weights": weights}

  def pushforward(self, inputs: Any, tangents: Any) -> Expected:
    weighted = self._subject.weighted
    fn = self._two_combines if weighted else self._one_combine
    return self._sums(fn, inputs, tangents)[0]

  def second_pullback(
    self, inputs: Any, g: np.ndarray, cotangents: Any
  ) -> dict[str, Expected]:
    # The output is linear in the tokens and in the weights.
    (tokens, weights), (d_tokens, d_weights) = inputs, cotangents
    return {
      "tokens": self.pullback((tokens, d_weights), g)["tokens"],
      "weights": self.pullback((d_tokens, weights), g)["weights"],
      "g": self._sums(self._one_combine, inputs, cotangents)[0],
    }

  def _output(self, inputs: Any) -> Sequence[Array]:
    return [self._combine(*self._dispatch(inputs))]

  def _pullback(
    self, tokens: np.ndarray, weights: np.ndarray, g: np.ndarray
  ) -> Sequence[Array]:
    rows, row_weights = self._dispatch((tokens, weights))
    g_rows = reference.combine_bwd(
      self._routing, self._by_rank(g), capacity=self._setting.capacity
    )
    g_row_weights = g_rows.astype(np.float32) * rows.astype(np.float32)
    if self._subject.weighted:  # The gradient of combine also rounds.
      g_rows = _scaled(_scaled(g_rows, row_weights), self._factor)
    else:
      g_rows = self._expert(g_rows, row_weights)
    return reference.dispatch_bwd(
      self._routing, g_rows, g_row_weights.sum(-1) * self._factor
    )

  def _two_combines(self, inputs: Any, tangents: Any) -> Sequence[Array]:
    rows, weights = self._dispatch(inputs)
    d_rows, d_weights = self._dispatch(tangents)
    return [self._combine(d_rows, weights) + self._combine(rows, d_weights)]

  def _one_combine(self, inputs: Any, tangents: Any) -> Sequence[Array]:
    rows, weights = self._dispatch(inputs)
    d_rows, d_weights = self._dispatch(tangents)
    d_rows = self._expert(d_rows, weights) + self._expert(rows, d_weights)
    return [reference.combine(self._routing, d_rows)]

  def _combine(self, rows: Array, weights: Array) -> Any:
    """Applies the experts, and sums their outputs."""
    if not self._subject.weighted:
      return reference.combine(self._routing, self._expert(rows, weights))
    rows = _scaled(rows, self._factor)
    return reference.combine(self._routing, rows, weights)

  def _dispatch(self, inputs: Any) -> tuple[Array, Array]:
    tokens, weights = map(self._by_rank, inputs)
    capacity = self._setting.capacity
    return reference.dispatch(self._routing, tokens, weights, capacity=capacity)

  def _expert(self, rows: Array, weights: Array) -> Any:
    return _scaled(rows, self._factor * weights)

  def _sums(
    self, fn: Callable[..., Sequence[Array]], *args: Any
  ) -> list[Expected]:
    """Returns `fn(*args)`; `fn` of absolute values gives the error units."""
    magnitudes = functools.cache(lambda: fn(*jax.tree.map(np.abs, args)))

    def unit(i: int) -> np.ndarray:
      magnitude = _flat(magnitudes()[i])
      return float(jnp.finfo(magnitude.dtype).eps) * magnitude.astype(float)

    limit = self._limit(args)
    return [
      Expected(_flat(x), functools.partial(unit, i), self._where_token, limit)
      for i, x in enumerate(fn(*args))
    ]

  def _exactly(self, value: Array, where: Where) -> Expected:
    return Expected(_flat(value), lambda: 0.0, where)

  def _by_rank(self, x: np.ndarray) -> np.ndarray:
    return x.reshape(self._setting.ep_size, -1, *x.shape[1:])

  def _where_row(self, at: tuple[int, ...]) -> str:
    rank, c = divmod(at[0], self._setting.capacity)
    j = int(self.expert[rank, c])
    if j == self._setting.num_local_experts:
      return f"rank {rank}, row {c} in the tail{_column(at)}"
    e = rank * self._setting.num_local_experts + j
    source, token, _ = self.source[rank, c]
    of = "padding" if source < 0 else f"token {token} of rank {source}"
    return f"rank {rank}, expert {e}, row {c} ({of}){_column(at)}"

  def _where_expert(self, at: tuple[int, ...]) -> str:
    rank = at[0] // self._setting.num_local_experts
    return f"rank {rank}, expert {at[0]}"


def _checked(
  setting: Setting, ranks: int, received: Received, of_rows: np.dtype
) -> Received:
  """Checks the arrays of `ranks` ranks, and returns them."""
  rows, experts = ranks * setting.capacity, ranks * setting.num_local_experts
  for name, shape, dtype in (
    ("rows", (rows, setting.hidden), of_rows),
    ("weights", (rows,), np.dtype("float32")),
    ("group_sizes", (experts,), np.dtype("int32")),
  ):
    x = getattr(received, name)
    if x.shape != shape or x.dtype != dtype:
      raise AssertionError(
        f"dispatch returned {name} {x.dtype}{list(x.shape)}; it has to return"
        f" {dtype}{list(shape)}."
      )
  return received


def _sizes(setting: Setting) -> dict[str, int]:
  return dict(
    num_experts=setting.num_experts,
    capacity=setting.capacity,
    alignment=setting.alignment,
  )


def _side_by_side(*arrays: np.ndarray) -> np.ndarray:
  return np.concatenate([x.view(np.uint8) for x in arrays], axis=1)


def _flat(x: Array) -> np.ndarray:
  """Concatenates the arrays of all ranks."""
  return np.asarray(x).reshape(-1, *x.shape[2:])


def _column(at: tuple[int, ...]) -> str:
  return f", column {at[1]}" if len(at) > 1 else ""


def _scaled(rows: Any, factor: Any) -> Any:
  """Returns the rows times their factors, rounded once to the rows' dtype."""
  return (rows.astype(jnp.float32) * factor[..., None]).astype(rows.dtype)
