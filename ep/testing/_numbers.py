# SPDX-License-Identifier: Apache-2.0
"""Draws special floating-point values: NaNs, infinities, denormal numbers."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np


def with_specials(rng: np.random.Generator, rows: np.ndarray) -> np.ndarray:
  """Puts special values into half of the rows `[..., H]`.

  A quarter of the rows has only zeros and numbers close to the smallest normal
  number. In another quarter, half of the values are special values of any kind;
  sums of these rows are mostly infinite or NaN.
  """
  values = special_values(rows.dtype)
  small = values[np.abs(values) < 1e-3]
  kind = rng.integers(4, size=(*rows.shape[:-1], 1))
  mixed = np.where(
    rng.random(rows.shape) < 0.5,
    rng.choice(bits(values), rows.shape),
    bits(rows),
  )
  smalls = rng.choice(bits(small), rows.shape)
  found = np.where(kind == 0, smalls, np.where(kind == 1, mixed, bits(rows)))
  return found.view(rows.dtype)


def special_values(dtype: np.dtype) -> np.ndarray:
  """Returns zeros, denormals, infinities and NaNs, with both signs."""
  infinity, least_normal, one = (
    int(bits(np.array(x, dtype))) for x in (np.inf, jnp.finfo(dtype).tiny, 1)
  )
  quiet = least_normal >> 1  # the first mantissa bit, set in quiet NaNs
  magnitudes = [0, 1, 5, least_normal - 1, least_normal, least_normal + 1]
  magnitudes += [2 * least_normal + 1, one, infinity - 1, infinity]
  magnitudes += [infinity + 1, infinity + quiet - 1, infinity + quiet + 1]
  sign = 1 << (8 * dtype.itemsize - 1)
  patterns = [x + s for s in (0, sign) for x in magnitudes]
  return np.array(patterns, f"u{dtype.itemsize}").view(dtype)


def are_whole(x: np.ndarray) -> bool:
  """Returns whether all numbers are whole, NaN or infinite."""
  return bool((np.isnan(x) | (np.trunc(x.astype(float)) == x)).all())


def bits(x: np.ndarray) -> np.ndarray:
  """Returns a view of the elements as unsigned integers of their size."""
  return x.view(f"u{x.dtype.itemsize}")
