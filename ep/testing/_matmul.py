# SPDX-License-Identifier: Apache-2.0
"""Tests a grouped matmul against an oracle that loops over the groups.

The function under test is bilinear, so results and all derivatives are sums of
products of two arrays. The oracle computes these sums in float64.
"""

from __future__ import annotations

from collections.abc import Callable
import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ep.testing._compare import Expected
from ep.testing._declarations import GroupedMatmul, Setting
from ep.testing._trial import Oracle, Trial


class MatmulTrial(Trial):
  """A grouped matmul for one setting; G is never F, so faults cannot hide."""

  def __init__(self, subject: GroupedMatmul, setting: Setting):
    self.dtype = np.dtype(subject.result_dtype or setting.dtype)
    of_c, of_f, of_g = subject.multiples
    c, f = _up(setting.capacity, of_c), _up(setting.hidden, of_f)
    g = _up(f + 1, of_g)
    self.sizes = c, f, g

    def function(route: Any, inputs: Any) -> tuple[jax.Array, tuple[()]]:
      (group_sizes,), (rows, matrices) = route, inputs
      return subject.matmul(rows, matrices, group_sizes), ()

    super().__init__(subject, setting, function)

  def _program(self, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the program for `fn`, with zeros in rows that are unspecified."""

    def specified(route: Any, *args: Any) -> Any:
      used = (jnp.arange(self.sizes[0]) < route[0].sum())[:, None]
      return jax.tree.map(
        lambda x: jnp.where(used, x, 0) if x.ndim == 2 else x, fn(route, *args)
      )

    return fn if self.subject.tail == "zero" else specified

  def oracle(self, topk_idx: np.ndarray) -> MatmulOracle:
    counts = np.bincount(
      topk_idx[topk_idx >= 0], minlength=self.setting.num_experts
    )
    group_sizes = _up(counts, self.setting.alignment)
    return MatmulOracle(self, group_sizes)


class MatmulOracle(Oracle):
  """The expected products and derivatives for one list of group sizes.

  Rows after the last group hold numbers that no result may depend on.
  """

  numbers = ("whole", "normal")
  result = "the product"

  def __init__(self, trial: MatmulTrial, group_sizes: np.ndarray):
    route = group_sizes.astype(np.int32)
    super().__init__(trial.subject, trial.setting, route)
    self._sizes, self._dtype = trial.sizes, trial.dtype
    ends = np.cumsum(group_sizes)
    self._groups = [*map(slice, ends - group_sizes, ends)]
    rows, groups = np.arange(trial.sizes[0]), np.arange(len(group_sizes))
    self._group = (rows[:, None] >= ends).sum(1)  # of each row
    self._nan_rows = rows < 0  # none
    self._nan_matrices = groups < 0

  def poisoned(self) -> MatmulOracle:
    """Returns an oracle with NaNs in the rows after the last group."""
    other = copy.copy(self)
    other._nan_rows = self._group == len(self._groups)
    return other

  def with_nans(self) -> MatmulOracle:
    """Returns an oracle with NaNs in last rows of groups, and in matrices."""
    other = copy.copy(self)
    last = [x.stop - 1 for x in self._groups[::3] if x.start < x.stop]
    other._nan_rows = np.isin(np.arange(self._sizes[0]), last)
    other._nan_matrices = np.arange(len(self._groups)) % 3 == 1
    return other

  def inputs(
    self, rng: np.random.Generator, numbers: str
  ) -> tuple[np.ndarray, np.ndarray]:
    c, f, g = self._sizes
    shape, dtype = (len(self._groups), f, g), self._setting.dtype
    return (
      _draw(rng, numbers, (c, f), dtype, self._nan_rows),
      _draw(rng, numbers, shape, dtype, self._nan_matrices),
    )

  def cotangent(self, rng: np.random.Generator, numbers: str) -> np.ndarray:
    c, _, g = self._sizes
    return _draw(rng, numbers, (c, g), self._dtype, self._nan_rows)

  def by_name(self, grads: Any) -> dict[str, Any]:
    return dict(zip(("rows", "matrices"), grads, strict=True))

  def output(self, inputs: Any) -> Expected:
    return self._sum(self._dtype, (self._expand, *inputs))

  def pullback(self, inputs: Any, g: np.ndarray) -> dict[str, Expected]:
    rows, matrices = inputs
    dtype = self._setting.dtype
    return {
      "rows": self._sum(dtype, (self._contract, g, matrices)),
      "matrices": self._sum(dtype, (self._outer, rows, g)),
    }

  def pushforward(self, inputs: Any, tangents: Any) -> Expected:
    (rows, matrices), (d_rows, d_matrices) = inputs, tangents
    return self._sum(
      self._dtype,
      (self._expand, d_rows, matrices),
      (self._expand, rows, d_matrices),
    )

  def second_pullback(
    self, inputs: Any, g: np.ndarray, cotangents: Any
  ) -> dict[str, Expected]:
    # A pullback is linear in each input.
    return self.pullback(cotangents, g) | {
      "g": self.pushforward(inputs, cotangents)
    }

  def _expand(self, rows: np.ndarray, matrices: np.ndarray) -> np.ndarray:
    out = np.zeros((len(rows), matrices.shape[2]))
    for group, matrix in zip(self._groups, matrices, strict=True):
      out[group] = rows[group] @ matrix
    return out

  def _contract(self, g: np.ndarray, matrices: np.ndarray) -> np.ndarray:
    return self._expand(g, matrices.swapaxes(1, 2))

  def _outer(self, rows: np.ndarray, g: np.ndarray) -> np.ndarray:
    return np.stack([rows[group].T @ g[group] for group in self._groups])

  def _sum(
    self,
    dtype: np.dtype,
    *terms: tuple[Callable[..., np.ndarray], np.ndarray, np.ndarray],
  ) -> Expected:
    """Returns a sum of products; each may be rounded before it is added.

    The contract does not specify the order of the float32 sums of a product. If
    the n terms of such a sum are independent, the standard deviation of its
    rounding error is below sqrt(n) / 6 float32 units.
    """

    def total(of: Callable[[np.ndarray], np.ndarray]) -> Any:
      return sum(
        product(*(of(x.astype(float)) for x in pair))
        for product, *pair in terms
      )

    with np.errstate(invalid="ignore", over="ignore"):
      value = total(np.asarray).astype(dtype)
    eps, float32_eps = (float(jnp.finfo(x).eps) for x in (dtype, np.float32))
    longest = max(
      x.shape[1] if y.ndim == 3 else self.route[0].max() for _, x, y in terms
    )
    more = len(terms) - 1
    least = more + longest**0.5 * float32_eps / eps
    limit = max(more, self._limit([x[1:] for x in terms], least=least))
    return Expected(value, lambda: eps * total(np.abs), self._where, limit)

  def _where(self, at: tuple[int, ...]) -> str:
    if len(at) == 3:
      rows = self.route[0][at[0]]
      return f"group {at[0]} of {rows} rows, row {at[1]}, column {at[2]}"
    j = self._group[at[0]]
    of = f"of group {j}" if j < len(self._groups) else "after the last group"
    return f"row {at[0]} ({of}), column {at[1]}"


def _up(size: Any, multiple: int) -> Any:
  """Rounds sizes up."""
  return -(-size // multiple) * multiple


def _draw(
  rng: np.random.Generator,
  numbers: str,
  shape: tuple[int, ...],
  dtype: np.dtype,
  is_nan: np.ndarray,
) -> np.ndarray:
  """Draws an array, with NaNs at the indices `is_nan` of its first axis.

  Most sums of "whole" numbers are too large for the mantissa of bfloat16.
  """
  if numbers == "whole":
    x = rng.integers(-4, 12, shape).astype(dtype)
  else:
    x = rng.standard_normal(shape).astype(dtype)
  x[is_nan] = np.nan
  return x
