# SPDX-License-Identifier: Apache-2.0
"""Checks what users pass as arrays, dtypes and functions of arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ep._src.base import arguments


def array(what: str, name: str, value: Any) -> jax.Array:
  """Returns an argument as `jnp.asarray` does, but cuts no integer to 32 bits.

  The integers of NumPy and Python have 64 bits, of which JAX drops half unless
  jax_enable_x64 is set.

  Raises, with a message that begins with `what`:
    ValueError: such an integer does not fit into 32 bits.
  """
  for part in jax.tree.leaves(value):
    if isinstance(part, jax.Array) or not arguments.is_integral(part):
      continue
    for x in map(int, [np.min(part, initial=0), np.max(part, initial=0)]):
      arguments.check(
        -arguments.INT32_MAX <= x <= arguments.INT32_MAX,
        what,
        f"{name} holds {x}, but tokens, rows and experts are counted in 32"
        " bits; pass numbers below 2^31.",
      )
  return jnp.asarray(value)


def integers(what: str, name: str, value: Any) -> jax.Array:
  """Returns an argument that is an array of integers as int32.

  A value that is known only when the program runs, and does not fit, becomes
  the nearest int32, which is not a valid id or number of rows either.

  Raises, with a message that begins with `what`:
    TypeError: it holds no integers.
    ValueError: as in `array`.
  """
  x = array(what, name, value)
  if not jnp.issubdtype(x.dtype, jnp.integer):
    raise TypeError(
      f"{what}: {name} is {x.dtype}, but integers are expected; convert it."
    )
  return int32(x)


def float32(what: str, name: str, value: Any) -> jax.Array:
  """Returns an argument that is an array of float32, or raises `TypeError`."""
  x = jnp.asarray(value)
  if x.dtype != jnp.float32:
    raise TypeError(
      f"{what}: {name} is {x.dtype}, but float32 is expected: other dtypes"
      " round its small steps; keep it in float32."
    )
  return x


def int32(x: jax.Array) -> jax.Array:
  """Returns integers of any type as the nearest int32."""
  has, room = jnp.iinfo(x.dtype), jnp.iinfo(jnp.int32)
  return x.clip(max(has.min, room.min), min(has.max, room.max)).astype(
    jnp.int32
  )


def iota(n: int) -> jax.Array:
  """Returns 0, 1... n - 1 as int32, also under jax_enable_x64."""
  return jnp.arange(n, dtype=jnp.int32)


def dtype(what: str, name: str, value: Any) -> np.dtype:
  """Returns what names a dtype as that dtype, or raises `TypeError`."""
  try:
    return jnp.dtype(value)
  except TypeError:
    raise arguments.wrong_type(what, name, value, "a dtype") from None


def function(what: str, name: str, value: Any) -> None:
  """Raises `TypeError` unless an argument is a function that has a hash."""
  if not callable(value):
    expected = "a function of an array"
    if isinstance(value, str) and hasattr(jax.nn, value):
      expected += f", like jax.nn.{value},"
    raise arguments.wrong_type(what, name, value, expected)
  try:
    hash(value)
  except TypeError:
    raise TypeError(
      f"{what}: {name} is a {type(value).__name__} without a hash, but programs"
      " are kept by their functions; pass a function."
    ) from None
