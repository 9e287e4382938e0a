# SPDX-License-Identifier: Apache-2.0
"""Compares what a subject computes with what the oracle expects."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from ep.testing import _numbers


class Expected(NamedTuple):
  """An array of the oracle, and the unit of its errors.

  Attributes:
    value: in the dtype that the result must have.
    unit: returns the unit of a `Tolerance`, for each value or for all.
    where: returns the words that name the value at an index.
    least_limit: units that a value of any subject may be off, since the
      contract leaves the order of a sum open.
    source: the source of the value, for a message.
  """

  value: np.ndarray
  unit: Callable[[], np.ndarray | float]
  where: Callable[[tuple[int, ...]], str]
  least_limit: float = 0
  source: str = "the oracle"


def compare(
  what: str,
  got: np.ndarray,
  expected: Expected,
  *,
  limit: float = 0,
  only: np.ndarray | None = None,
  nan_bits: bool = False,
) -> float:
  """Returns the largest error in units, or raises `AssertionError`.

  Args:
    what: names the array in the error.
    limit: the most units that a value may be off, unless `expected` has more;
      0 demands its bits.
    only: a mask of the values that count, along the leading axes.
    nan_bits: whether NaNs must have the expected bits, too.
  """
  want, limit = expected.value, max(limit, expected.least_limit)
  if got.shape != want.shape or got.dtype != want.dtype:
    raise AssertionError(
      f"{what}: {got.dtype}{list(got.shape)}, but {want.dtype}"
      f"{list(want.shape)} is expected."
    )
  with np.errstate(invalid="ignore", over="ignore"):
    same = _numbers.bits(got) == _numbers.bits(want)
    if jnp.issubdtype(got.dtype, jnp.floating) and not nan_bits:
      same |= np.isnan(got) & np.isnan(want)
    error = np.where(same, 0, np.inf)
    if limit and not same.all():
      off = abs(got.astype(float) - want.astype(float))
      unit = np.maximum(expected.unit(), np.finfo(float).tiny)
      error = np.where(same, 0, off / unit)
    wrong = ~(error <= limit)  # NaN is wrong, too
  if only is not None:
    only = only.reshape(*only.shape, *[1] * (wrong.ndim - only.ndim))
    wrong, error = wrong & only, np.where(only, error, 0)
  if wrong.any():
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    values = f"{got[at]!s}, but {expected.source} has {want[at]!s}"
    off_by = f", off by {error[at]:.3g} ulps of {limit:g}" if limit else ""
    raise AssertionError(
      f"{what}: {expected.where(at)} is {values}{off_by}; {wrong.sum()} of"
      f" {wrong.size} values are wrong."
    )
  return float(error.max(initial=0))
