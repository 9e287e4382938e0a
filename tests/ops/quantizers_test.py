# SPDX-License-Identifier: Apache-2.0
"""Quantizers give the bits that the numeric contract specifies.

The oracle computes block by block, in float64 or in NumPy's float32, and
converts to float8 with ml_dtypes. The quantizers do neither.
"""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from conftest import assert_shards_equal
import ep
from ep.testing import _numbers
from parameters import DTYPES

BLOCKS = {"mxfp8": 32, "fp8_block128": 128}
FORMATS = pytest.mark.parametrize("format", BLOCKS)
LARGEST = 448.0

quantize = jax.jit(ep.quant.quantize, static_argnums=1)
dequantize = jax.jit(ep.quant.dequantize, static_argnums=2)


def quantized(x, format):
  """Returns the rows and scales of `x` [..., H], block by block."""
  scale_of = {"mxfp8": e8m0_scale, "fp8_block128": float32_scale}[format]
  blocks = x.astype(np.float32).reshape(-1, BLOCKS[format])
  rows, scales = zip(*(of_block(b, scale_of) for b in blocks), strict=True)
  lead = x.shape[:-1]
  return np.stack(rows).reshape(x.shape), np.stack(scales).reshape(*lead, -1)


def of_block(block, scale_of):
  finite = np.isfinite(block)
  denormal = np.abs(block) < np.finfo(np.float32).tiny
  numbers = np.where(denormal, np.copysign(np.float32(0), block), block)
  scale, ratios = scale_of(np.where(finite, numbers, 0))
  ratios = np.clip(ratios, -LARGEST, LARGEST).astype(ml_dtypes.float8_e4m3fn)
  bits = np.where(finite, ratios.view(np.uint8), np.uint8(0x7F))
  return bits.view(ml_dtypes.float8_e4m3fn), scale


def e8m0_scale(numbers):
  largest = float(np.abs(numbers).max())
  exponent = -117
  while math.ldexp(LARGEST, exponent) < largest:
    exponent += 1
  scale = np.float64(2.0**exponent)
  ratios = numbers.astype(np.float64) / scale  # exact
  return scale.astype(ml_dtypes.float8_e8m0fnu), ratios.astype(np.float32)


def float32_scale(numbers):
  largest = np.maximum(np.abs(numbers).max(), np.float32(2.0**-100))
  factor = np.float32(LARGEST) / largest
  return largest * np.float32(1 / LARGEST), numbers * factor


def dequantized(rows, scales, dtype):
  every = np.arange(256, dtype=np.uint8).view(rows.dtype).astype(np.float64)
  least = 2.0**-126 / every[every > 0].min()
  factors = scales.astype(np.float32)
  factors = np.where(np.abs(factors) < least, np.float32(0), factors)
  blocks = rows.astype(np.float32).reshape(*scales.shape, -1)
  return (blocks * factors[..., None]).reshape(rows.shape).astype(dtype)


def padded(x, length):
  shape = length - len(x), *x.shape[1:]
  return np.concatenate([x, np.zeros(shape, x.dtype)])


def check(x, format):
  """Checks all blocks of `x`, in a program that all tests share."""
  x = padded(x.reshape(-1), -(-x.size // 256) * 256).reshape(-1, 256)
  with np.errstate(all="ignore"):
    want = quantized(x, format)
    back = dequantized(*want, x.dtype)

  def run(fn, arrays, static):
    out = fn(*(padded(array, 512) for array in arrays), static)
    return jax.tree.map(lambda y: jax.device_put(np.asarray(y)[: len(x)]), out)

  got = run(quantize, [x], format)
  jax.tree.map(assert_shards_equal, got, want)
  assert_shards_equal(got[0], want[0], nan_bits=True)
  assert_shards_equal(run(dequantize, want, x.dtype), back)


def normal(shape, dtype, seed=0):
  return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@FORMATS
@DTYPES
def test_normal_numbers_of_every_size(format, dtype):
  x = normal((300, 256), np.float64)
  range_ = (-24, 15) if dtype == jnp.float16 else (-149, 127)
  exponents = np.linspace(*range_, len(x))
  with np.errstate(all="ignore"):
    check((x * 2.0 ** exponents[:, None]).astype(dtype), format)


@FORMATS
@DTYPES
def test_special_numbers(format, dtype):
  """Blocks contain a few, or only, denormals, zeros, infinities or NaNs."""
  rng = np.random.default_rng(0)
  check(_numbers.with_specials(rng, normal((200, 256), dtype)), format)
  alone = np.repeat(_numbers.special_values(jnp.dtype(dtype))[:, None], 128, 1)
  check(alone, format)


@FORMATS
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_every_number_of_16_bits(format, dtype):
  """Blocks contain adjacent numbers, and then shuffled numbers."""
  in_order = np.arange(1 << 16, dtype=np.uint16)
  mixed = np.random.default_rng(0).permutation(in_order)
  for bits in in_order, mixed:
    check(bits.reshape(-1, 128).view(dtype), format)


@FORMATS
def test_ties_and_neighbors_of_ties(format):
  """Tests float8 numbers, their midpoints, and the nearest float32 numbers."""
  codes = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
  floats = codes.astype(np.float32)
  points = np.concatenate([floats, (floats[1:] + floats[:-1]) / 2])
  beside = [np.nextafter(points, np.float32(s * 1e9)) for s in (-1, 1)]
  points = np.concatenate([points, *beside]).clip(-LARGEST, LARGEST)
  block = BLOCKS[format]
  x = np.full((len(points), block), LARGEST, np.float32)
  x[:, 1], x[:, 2] = points, -points
  check(x, format)
  check(x / np.float32(3), format)


@FORMATS
def test_scales_round_up(format):
  """The largest number of a block is around 1.75 times a power of two."""
  sizes = 1.75 * 2.0 ** np.arange(-126, 127)
  x = np.repeat(sizes[:, None].astype(np.float32), 128, 1)
  for way in (-np.inf, np.inf):
    check(np.nextafter(x, np.float32(way)), format)
  check(x, format)


@pytest.mark.parametrize(
  "row_type", ["float8_e4m3fn", "float8_e5m2", "int8", "uint8"]
)
@pytest.mark.parametrize(
  "scale_type", ["float32", "bfloat16", "float8_e8m0fnu"]
)
def test_dequantize_of_every_row_and_scale_type(row_type, scale_type):
  """The product of row and scale is never denormal, even for tiny scales."""
  rows = np.tile(np.arange(256, dtype=np.uint8), (80, 1)).view(row_type)
  scales = 2.0 ** np.linspace(-149, 127, 320).reshape(80, 4)
  if scale_type != "float8_e8m0fnu":
    scales *= np.where(np.arange(4) % 2, -1, 1)
  scales = scales.astype(np.float32).astype(scale_type)
  with np.errstate(all="ignore"):
    want = dequantized(rows, scales, np.float32)
  assert_shards_equal(dequantize(rows, scales, np.float32), want)
  # XLA folds constants without flushing denormals.
  folded = jax.jit(lambda: ep.quant.dequantize(rows, scales, np.float32))
  assert_shards_equal(folded(), want)


@FORMATS
def test_no_derivative(format):
  x = jnp.asarray(normal((2, 128), jnp.float32))

  def there_and_back(x):
    return dequantize(*quantize(x, format), x.dtype).sum()

  grad = jax.jit(jax.grad(there_and_back))(x)
  np.testing.assert_array_equal(grad, np.zeros_like(x))
