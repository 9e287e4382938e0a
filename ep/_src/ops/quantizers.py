# SPDX-License-Identifier: Apache-2.0
"""Quantizers from float rows to fp8 rows with a scale per block, and back.

All compilers give the same bits, because maxima, exponents and roundings are
integer operations. With float operations, a cast to float8 might round twice, a
compiler might flush denormals, or turn a division by a constant into a product.
The remaining float operations are a product and a sum for each element, which
no compiler can fuse, and for float32 scales a quotient and a product for each
block. Overflows and underflows of these operations do not change a result.
"""

from __future__ import annotations

from collections.abc import Callable
import math
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from ep._src.base import arguments

# The least positive number of each dtype of quantized rows.
_LEAST = {
  "float8_e4m3fn": 2.0**-9,
  "float8_e5m2": 2.0**-16,
  "int8": 1.0,
  "uint8": 1.0,
}
ROW_DTYPES = tuple(_LEAST)
SCALE_DTYPES = ("float32", "bfloat16", "float8_e8m0fnu")

_SIGN, _INFINITY, _LEAST_NORMAL = 1 << 31, 0x7F800000, 1 << 23  # float32 bits
_LARGEST = 448  # the largest finite float8_e4m3fn
_NAN = 0x7F  # the bits of a NaN of float8_e4m3fn


class Format(NamedTuple):
  """A quantized format: its block size and its function for scales.

  Attributes:
    block: the number of consecutive elements of a row that share a scale.
    scales: maps the largest finite magnitude of each block, as the bits of a
      float32, to the blocks' scales and the float32 factors of their elements.
  """

  block: int
  scales: Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def quantize(x: jax.Array, format: str) -> tuple[jax.Array, jax.Array]:
  """Rounds rows to float8_e4m3fn, with a scale for each block of elements.

  An element x of a block with the scale s becomes x / s, rounded to the nearest
  float8_e4m3fn, ties to even. With a, the largest finite magnitude of a block:

    "mxfp8": blocks of 32, s the least power of two with a / s <= 448, but at
      least 2^-117, as a float8_e8m0fnu. x / s is exact.
    "fp8_block128": blocks of 128, s = max(a, 2^-100) * float32(1 / 448) and
      x / s = x * (448 / max(a, 2^-100)), rounded to float32 after each
      operation.

  An infinity or a NaN becomes NaN and is ignored in a. Denormal float32 numbers
  become zeros of the same sign. The result has the same bits on every backend,
  and no derivative.

  Args:
    x: float32, bfloat16 or float16 [..., H], H a multiple of the block.
    format: "mxfp8" or "fp8_block128".

  Returns:
    rows: float8_e4m3fn [..., H].
    scales: float8_e8m0fnu [..., H / 32], or float32 [..., H / 128].

  Raises:
    ValueError, TypeError: the format, shape or dtype is not listed above.
  """
  x = jnp.asarray(x)
  op = "ep.quant.quantize"
  arguments.one_of(*FORMATS)(op, "format", format)
  if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
    raise TypeError(
      f"{op}: x is {x.dtype}, but float32, bfloat16 or float16 is expected;"
      " convert it."
    )
  check_width(op, math.prod(x.shape[-1:]), format)
  block, scales_of = FORMATS[format]
  bits = lax.bitcast_convert_type(_blocks(x, x.shape[-1] // block), jnp.uint32)
  magnitude = bits & ~np.uint32(_SIGN)
  is_finite = magnitude < _INFINITY
  magnitude = jnp.where(magnitude >= _LEAST_NORMAL, magnitude, 0)
  scales, factors = scales_of(_largest(jnp.where(is_finite, magnitude, 0)))
  codes = _nearest(_float(magnitude) * factors[..., None])
  codes = jnp.where(is_finite, codes | (bits >> 24 & 0x80), _NAN)
  rows = lax.bitcast_convert_type(codes.astype(jnp.uint8), jnp.float8_e4m3fn)
  return rows.reshape(x.shape), scales


def dequantize(
  rows: jax.Array, scales: jax.Array, dtype: jax.typing.DTypeLike
) -> jax.Array:
  """Returns each element times the scale of its block.

  The product is rounded to float32 and then to `dtype`. A scale counts as zero
  if its magnitude is below 2^-117 for rows of float8_e4m3fn, 2^-110 for
  float8_e5m2, or 2^-126 for int8 and uint8. So no product is a denormal
  float32, which some compilers would flush to zero. The result has the same
  bits on every backend, except for NaNs, and no derivative.

  Args:
    rows: float8_e4m3fn, float8_e5m2, int8 or uint8 [..., H].
    scales: float32, bfloat16 or float8_e8m0fnu [..., S], where S divides H: a
      block is H / S consecutive elements.
    dtype: the dtype of the result.

  Returns:
    The dequantized rows [..., H].

  Raises:
    ValueError, TypeError: a shape or dtype is not listed above.
  """
  rows, scales = jnp.asarray(rows), jnp.asarray(scales)
  op = "ep.quant.dequantize"
  check_bytes(op, "rows", rows, scales)
  num_blocks = scales.shape[-1]
  arguments.check(
    rows.shape[-1] % num_blocks == 0,
    op,
    f"rows have {rows.shape[-1]} elements and {num_blocks} scales, which must"
    " divide them; pass a scale for each block of a row.",
  )
  return multiply(rows, factors(scales, rows.dtype), dtype)


def multiply(
  rows: jax.Array, factors: jax.Array, dtype: jax.typing.DTypeLike
) -> jax.Array:
  """Returns rows [..., H] times the factors [..., S] of their blocks."""
  is_default = rows.dtype == jnp.float8_e4m3fn
  blocks = _blocks(_values(rows) if is_default else rows, factors.shape[-1])
  products = blocks * factors[..., None]
  return lax.stop_gradient(products.astype(dtype).reshape(rows.shape))


def check_width(what: str, width: int, format: str) -> None:
  """Raises `ValueError` unless the format's block size divides `width`."""
  block = FORMATS[format].block
  arguments.check(
    width > 0 and width % block == 0,
    what,
    f"rows have {width} elements, but {format!r} has a scale for each {block};"
    f" take a hidden size that is a multiple of {block}.",
  )


def check_bytes(
  what: str, name: str, rows: jax.Array, scales: jax.Array
) -> None:
  """Raises unless `rows` are fp8 or int8 [..., H], and `scales` [..., S]."""
  if rows.dtype.name not in ROW_DTYPES:
    raise TypeError(
      f"{what}: {name} is {rows.dtype}, but rows with scales are one of"
      f" {ROW_DTYPES}; quantize them, as with ep.quant.quantize."
    )
  if scales.dtype.name not in SCALE_DTYPES:
    raise TypeError(
      f"{what}: scales is {scales.dtype}, but it must be one of"
      f" {SCALE_DTYPES}; convert it."
    )
  arguments.check(
    rows.ndim == scales.ndim > 0
    and rows.shape[:-1] == scales.shape[:-1]
    and scales.shape[-1] > 0,
    what,
    f"scales has shape {scales.shape}, but [..., S] is expected for {name} of"
    f" shape {rows.shape}, at least one scale for each row.",
  )


def _blocks(rows: jax.Array, count: int) -> jax.Array:
  """Returns rows [..., H] as float32 [..., count, H / count]."""
  *lead, width = rows.shape
  return rows.astype(jnp.float32).reshape(*lead, count, width // count)


def _largest(blocks: jax.Array) -> jax.Array:
  """Returns the maximum of each block [..., B].

  CPU compilers vectorize the maximum over groups of 16 columns. The barrier
  keeps XLA from merging it with the second maximum.
  """
  *lead, width = blocks.shape
  columns = blocks.reshape(*lead, width // 16, 16).max(-2)
  largest: jax.Array = lax.optimization_barrier(columns).max(-1)
  return largest


def _nearest(ratios: jax.Array) -> jax.Array:
  """Returns the bits of the float8_e4m3fn nearest to each ratio in [0, 448].

  From 2^-6 on, the float8 bits are the rounded upper bits of the float32, minus
  a constant; a carry increments the exponent. Below 2^-6, float8 has the
  spacing 2^-9, like float32 above 2^14, so adding 2^14 rounds. `normal` clips
  the ratio to at least 2^-6, `small` to at most 2^-6, and their sum contains
  the bits of 2^-6 once too often. The integer minimum keeps compilers from
  fusing the addition with the product that made the ratio.
  """
  bits = lax.bitcast_convert_type(ratios, jnp.uint32)
  normal = jnp.maximum(bits, _bits(2.0**-6))
  normal = normal + (0x7FFFF + (normal >> 20 & 1)) >> 20
  small = _float(jnp.minimum(bits, _bits(2.0**-6))) + np.float32(2.0**14)
  small = lax.bitcast_convert_type(small, jnp.uint32) - _bits(2.0**14)
  return normal + small - (_bits(2.0**-6) >> 20)


def _values(rows: jax.Array) -> jax.Array:
  """Casts float8_e4m3fn to float32, in fewer steps than XLA:CPU.

  The shifted bits of a magnitude plus a constant are a float32 twice as large.
  For a denormal float8, this float32 is too large by 2^-6.
  """
  bits = lax.bitcast_convert_type(rows, jnp.uint8).astype(jnp.uint32)
  magnitude = bits & 0x7F
  twice = _float((magnitude << 20) + _bits(2.0**-6))
  least = np.float32(2.0**-6)
  values = jnp.where(magnitude < 8, twice - least, twice * np.float32(0.5))
  values = jnp.where(magnitude == _NAN, np.float32(np.nan), values)
  return jnp.where(bits > magnitude, -values, values)


def _e8m0_scales(largest: jax.Array) -> tuple[jax.Array, jax.Array]:
  # 448 is 1.75 * 2^8. So for a block maximum a = 1.m * 2^n, the least power of
  # two that is at least a / 448 is 2^(n - 8), or 2^(n - 7) if 1.m > 1.75. If
  # 1.m > 1.75, adding 0x1FFFFF carries into the exponent.
  exponent = jnp.maximum(largest + 0x1FFFFF >> 23, _LEAST_E8M0 + 8) - 8
  scales = lax.bitcast_convert_type(
    exponent.astype(jnp.uint8), jnp.float8_e8m0fnu
  )
  return scales, _float(np.uint32(254) - exponent << 23)


def _float32_scales(largest: jax.Array) -> tuple[jax.Array, jax.Array]:
  floored = _float(jnp.maximum(largest, _bits(2.0**-100)))
  return floored * np.float32(1 / _LARGEST), np.float32(_LARGEST) / floored


def factors(scales: jax.Array, row_dtype: jnp.dtype) -> jax.Array:
  """Returns scales as float32; scales too small for `row_dtype` become 0."""
  least = np.float32(2.0**-126 / _LEAST[row_dtype.name])
  if scales.dtype == jnp.float8_e8m0fnu:
    exponent = lax.bitcast_convert_type(scales, jnp.uint8).astype(jnp.uint32)
    nan = np.uint32(0x7FC00000)
    floats = _float(jnp.where(exponent == 255, nan, exponent << 23))
  else:
    floats = scales.astype(jnp.float32)
  return jnp.where(jnp.abs(floats) < least, 0, floats)


def _bits(x: float) -> np.uint32:
  return np.float32(x).view(np.uint32)


def _float(bits: jax.Array) -> jax.Array:
  return lax.bitcast_convert_type(bits, jnp.float32)


# The exponent of 2^-117 in float8_e8m0fnu. The least positive float8_e4m3fn,
# 2^-9, times 2^-117 is the least normal float32.
_LEAST_E8M0 = np.uint32(127 - 117)

FORMATS = {
  "fp8_block128": Format(128, _float32_scales),
  "mxfp8": Format(32, _e8m0_scales),
}
