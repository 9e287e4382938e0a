# SPDX-License-Identifier: Apache-2.0
"""Quantizers: rows of floats as rows of one byte, with a scale per block.

Every compiler gives the same bits, because what it may compute in its own way
is not left to it. Maxima, exponents and roundings are operations on whole
numbers: a cast to float8 may round twice, a float operation may flush a
denormal, and a division by a constant may become a product. What is left are a
product and a sum for each element, which nothing can fuse, and for scales of
float32 a quotient and a product for each block. None of them overflows or
underflows where it matters.
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

# The least positive number of each dtype of rows.
_LEAST = {
  "float8_e4m3fn": 2.0**-9,
  "float8_e5m2": 2.0**-16,
  "int8": 1.0,
  "uint8": 1.0,
}
ROW_DTYPES = tuple(_LEAST)
SCALE_DTYPES = ("float32", "bfloat16", "float8_e8m0fnu")

_SIGN, _INFINITY, _LEAST_NORMAL = 1 << 31, 0x7F800000, 1 << 23  # of float32
_LARGEST = 448  # of float8_e4m3fn
_NAN = 0x7F  # of float8_e4m3fn


class Format(NamedTuple):
  """A way to quantize.

  Attributes:
    block: consecutive elements of a row that share a scale.
    scales: returns the scales of blocks, and the float32 numbers by which it
      multiplies their elements, given the largest finite magnitude of each
      block as the bits of a float32.
  """

  block: int
  scales: Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def quantize(x: jax.Array, format: str) -> tuple[jax.Array, jax.Array]:
  """Rounds rows to float8_e4m3fn, with a scale for each block of elements.

  The element x of a block with the scale s becomes the multiple of s that is
  nearest to x among those that float8_e4m3fn can hold, ties to even, up to
  rounding in x / s. With a, the largest finite magnitude of the block:

    "mxfp8": blocks of 32, s the least power of two with a / s <= 448, but at
      least 2^-117, as a float8_e8m0fnu. x / s is exact.
    "fp8_block128": blocks of 128, s = max(a, 2^-100) * float32(1 / 448) and
      x / s = x * (448 / max(a, 2^-100)), rounded to float32 after each
      operation.

  An infinity or a NaN becomes NaN and does not count in a. Denormal float32
  numbers are zeros of their sign. The result has the same bits on every
  backend, and no derivative.

  Args:
    x: float32, bfloat16 or float16 [..., H], H a multiple of the block.
    format: "mxfp8" or "fp8_block128".

  Returns:
    rows: float8_e4m3fn [..., H].
    scales: float8_e8m0fnu [..., H / 32], or float32 [..., H / 128].

  Raises:
    ValueError, TypeError: the format, shape or dtype is none of these.
  """
  x = jnp.asarray(x)
  op = "ep.quant.quantize"
  check_format(op, "format", format)
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
  float32, which some compilers would flush to zero: the result has the same
  bits on every backend, except those of a NaN. It has no derivative.

  Args:
    rows: float8_e4m3fn, float8_e5m2, int8 or uint8 [..., H].
    scales: float32, bfloat16 or float8_e8m0fnu [..., S], where S divides H: a
      block is H / S consecutive elements.
    dtype: of the result.

  Returns:
    [..., H].

  Raises:
    ValueError, TypeError: a shape or dtype is none of these.
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
  """Returns what `dequantize` does, given the `factors` of the scales."""
  is_default = rows.dtype == jnp.float8_e4m3fn
  blocks = _blocks(_values(rows) if is_default else rows, factors.shape[-1])
  products = blocks * factors[..., None]
  return lax.stop_gradient(products.astype(dtype).reshape(rows.shape))


def check_format(what: str, field: str, format: str) -> None:
  """Raises `ValueError` unless `format` is a quantizer's."""
  arguments.check(
    isinstance(format, str) and format in FORMATS,
    what,
    f"{field} = {format!r}, but it must be one of {tuple(FORMATS)}.",
  )


def check_width(what: str, width: int, format: str) -> None:
  """Raises `ValueError` unless rows of so many elements have whole blocks."""
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
  """Raises unless these are rows [..., H] of one byte, and scales [..., S]."""
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
    rows.ndim > 0
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

  It takes maxima of columns first, which compilers for CPUs vectorize. The
  barrier keeps XLA from making one reduction of both.
  """
  *lead, width = blocks.shape
  columns = blocks.reshape(*lead, width // 16, 16).max(-2)
  return lax.optimization_barrier(columns).max(-1)


def _nearest(ratios: jax.Array) -> jax.Array:
  """Returns the bits of the float8_e4m3fn nearest to float32 in [0, 448].

  From 2^-6 on, they are the upper bits of the float32, rounded, less a
  constant; a carry goes to the exponent. Below, float8 has a fixed spacing,
  2^-9, which float32 has from 2^14 on, so that a sum with 2^14 rounds. Both
  parts are computed for the ratio or for 2^-6, if that is nearer to the part,
  and the code of 2^-6, which is then in the sum twice, is taken off. The
  minimum of whole numbers keeps compilers from fusing the product that made a
  ratio with the sum.
  """
  bits = lax.bitcast_convert_type(ratios, jnp.uint32)
  normal = jnp.maximum(bits, _bits(2.0**-6))
  normal = normal + (0x7FFFF + (normal >> 20 & 1)) >> 20
  small = _float(jnp.minimum(bits, _bits(2.0**-6))) + np.float32(2.0**14)
  small = lax.bitcast_convert_type(small, jnp.uint32) - _bits(2.0**14)
  return normal + small - (_bits(2.0**-6) >> 20)


def _values(rows: jax.Array) -> jax.Array:
  """Returns float8_e4m3fn as float32, in fewer steps than XLA:CPU.

  The bits of a magnitude are those of a float32 that is twice as large, less a
  constant. If the number has no leading one, that float32 has one, 2^-6.
  """
  bits = lax.bitcast_convert_type(rows, jnp.uint8).astype(jnp.uint32)
  magnitude = bits & 0x7F
  twice = _float((magnitude << 20) + _bits(2.0**-6))
  least = np.float32(2.0**-6)
  values = jnp.where(magnitude < 8, twice - least, twice * np.float32(0.5))
  values = jnp.where(magnitude == _NAN, np.float32(np.nan), values)
  return jnp.where(bits > magnitude, -values, values)


def _e8m0_scales(largest: jax.Array) -> tuple[jax.Array, jax.Array]:
  # 448 is 1.75 * 2^8. So the least power of two that is no less than a / 448,
  # for a = 1.m * 2^n, is 2^(n - 8), or 2^(n - 7) if 1.m > 1.75. The sum has a
  # carry to the exponent then.
  exponent = jnp.maximum(largest + 0x1FFFFF >> 23, _LEAST_E8M0 + 8) - 8
  scales = lax.bitcast_convert_type(
    exponent.astype(jnp.uint8), jnp.float8_e8m0fnu
  )
  return scales, _float(np.uint32(254) - exponent << 23)


def _float32_scales(largest: jax.Array) -> tuple[jax.Array, jax.Array]:
  floored = _float(jnp.maximum(largest, _bits(2.0**-100)))
  return floored * np.float32(1 / _LARGEST), np.float32(_LARGEST) / floored


def factors(scales: jax.Array, row_dtype: jnp.dtype) -> jax.Array:
  """Returns scales as float32, and those that count as zero as zeros."""
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


# The exponent of 2^-117 as float8_e8m0fnu has it. The least positive
# float8_e4m3fn, 2^-9, times that is the least normal float32.
_LEAST_E8M0 = np.uint32(127 - 117)

FORMATS = {
  "fp8_block128": Format(128, _float32_scales),
  "mxfp8": Format(32, _e8m0_scales),
}
