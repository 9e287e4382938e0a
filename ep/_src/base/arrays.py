# SPDX-License-Identifier: Apache-2.0
"""Checks arguments that are arrays, dtypes or functions; converts arrays.

Each error message begins with `what`, the name of the public function.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from ep._src.base import arguments

# The value of rows after the last slab, where XLA must write these rows.
TAILS = {"unspecified": 0, "zero": 0, "nan": jnp.nan}


def array(what: str, name: str, value: Any) -> jax.Array:
  """Converts an argument like `jnp.asarray`, but truncates no integer.

  Integers of NumPy and Python have 64 bits. Without jax_enable_x64, JAX drops
  the upper 32 bits without an error.

  Raises:
    TypeError: the argument is None.
    ValueError: an integer of NumPy or Python does not fit into 32 bits.
  """
  if value is None:
    raise arguments.wrong_type(what, name, value, "an array")
  for leaf in jax.tree.leaves(value):
    if isinstance(leaf, jax.Array) or hasattr(leaf, "__jax_array__"):
      continue
    if not isinstance(leaf, int) and np.asarray(leaf).dtype.kind not in "iu":
      continue
    for x in map(int, [np.min(leaf, initial=0), np.max(leaf, initial=0)]):
      arguments.check(
        -arguments.INT32_MAX <= x <= arguments.INT32_MAX,
        what,
        f"{name} holds {x}, but tokens, rows and experts are counted in 32"
        " bits; pass numbers below 2^31.",
      )
  return jnp.asarray(value)


def integers(what: str, name: str, value: Any) -> jax.Array:
  """Returns an array of integers as int32.

  A traced value that does not fit becomes the nearest int32, which is no valid
  id or number of rows.

  Raises:
    TypeError: the argument is no array of integers.
    ValueError: as in `array`.
  """
  x = array(what, name, value)
  check_kind(what, name, x, jnp.integer)
  return int32(x)


def float32(what: str, name: str, value: Any) -> jax.Array:
  """Returns an array of float32; raises `TypeError` for other dtypes."""
  x = jnp.asarray(value)
  if x.dtype != jnp.float32:
    raise TypeError(
      f"{what}: {name} is {x.dtype}, but float32 is expected: other dtypes"
      " round its small steps; keep it in float32."
    )
  return x


def shaped(
  what: str, name: str, value: Any, shape: tuple[int, ...], kind: Any
) -> Any:
  """Returns an array of a shape and a kind of dtype; None for None.

  Raises:
    TypeError: as in `check_kind`.
    ValueError: the array has another shape; or as in `array`.
  """
  if value is None:
    return None
  x = array(what, name, value)
  check_kind(what, name, x, kind)
  arguments.check(
    x.shape == shape,
    what,
    f"{name} has shape {x.shape}, but {shape} is expected.",
  )
  return x


_KINDS = {
  jnp.floating: "floats",
  jnp.integer: "integers",
  jnp.bool_: "bools",
}


def check_kind(what: str, name: str, x: jax.Array, kind: Any) -> None:
  """Raises `TypeError` unless an array has a dtype of a kind of `_KINDS`."""
  if not jnp.issubdtype(x.dtype, kind):
    cure = f"pass {name} != 0" if kind is jnp.bool_ else "convert it"
    raise TypeError(
      f"{what}: {name} is {x.dtype}, but {_KINDS[kind]} are expected; {cure}."
    )


def int32(x: jax.Array) -> jax.Array:
  """Returns integers of any type as the nearest int32."""
  old, new = jnp.iinfo(x.dtype), jnp.iinfo(jnp.int32)
  return x.clip(max(old.min, new.min), min(old.max, new.max)).astype(jnp.int32)


def expanded(x: jax.Array, ndim: int) -> jax.Array:
  """Returns `x` with axes of size 1 appended, so that it has `ndim` axes."""
  return x.reshape(*x.shape, *[1] * (ndim - x.ndim))


def cut(rows: jax.Array, num_used: jax.Array, tail: str = "zero") -> jax.Array:
  """Returns the rows, with zeros or NaNs after the first `num_used`."""
  if tail == "unspecified":
    return rows
  used = lax.iota(jnp.int32, rows.shape[0]) < num_used
  filler = jnp.full_like(rows, TAILS[tail])
  return jnp.where(expanded(used, rows.ndim), rows, filler)


# If negative indices are allowed, JAX adds operations to handle them.
read_rows = functools.partial(
  lax.dynamic_slice_in_dim, allow_negative_indices=False
)
write_rows = functools.partial(
  lax.dynamic_update_slice_in_dim, axis=0, allow_negative_indices=False
)


def dtype(what: str, name: str, value: Any) -> np.dtype:
  """Returns a dtype; raises `TypeError` unless `value` names one."""
  try:
    result: np.dtype = jnp.dtype(value)
    return result
  except TypeError:
    raise arguments.wrong_type(what, name, value, "a dtype") from None


def function(what: str, name: str, value: Any) -> Any:
  """Returns a hashable function; raises `TypeError` for other values."""
  if not callable(value):
    expected = "a function of an array"
    if isinstance(value, str) and hasattr(jax.nn, value):
      expected += f", like jax.nn.{value},"
    raise arguments.wrong_type(what, name, value, expected)
  try:
    hash(value)
  except TypeError:
    raise TypeError(
      f"{what}: {name} is a {type(value).__name__} without a hash, but JAX"
      " caches programs by their functions; pass a function."
    ) from None
  return value
