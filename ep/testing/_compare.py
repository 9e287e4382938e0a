# SPDX-License-Identifier: Apache-2.0
"""Compares results with the arrays of the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from ep.testing import _numbers

# A function that describes an index of an array.
Where = Callable[[tuple[int, ...]], str]


def at_index(at: tuple[int, ...]) -> str:
  return f"index {at}"


class Expected(NamedTuple):
  """An expected array, and the unit in which errors are measured.

  Attributes:
    value: the array, in the dtype of the result.
    unit: returns the unit of a `Tolerance`, for each value or for all.
    where: returns a description of an index, for error messages.
    limit: largest allowed error in units; 0 demands equal bits.
    source: names the oracle in an error message.
  """

  value: np.ndarray
  unit: Callable[[], np.ndarray | float]
  where: Where
  limit: float = 0
  source: str = "the oracle"


def compare(
  what: str,
  got: np.ndarray,
  expected: Expected,
  *,
  only: np.ndarray | None = None,
  nan_bits: bool = False,
) -> float:
  """Returns the largest error in units; fails above the limit.

  Args:
    what: names the array in an error message.
    only: a mask of the values to compare, along the leading axes.
    nan_bits: whether NaNs also must have the expected bits.
  """
  want, limit = expected.value, expected.limit
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
    wrong = ~(error <= limit)  # a NaN is wrong
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
