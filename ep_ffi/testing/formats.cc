// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/testing/formats.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace ep::testing {
namespace {

struct Format {
  int fraction_bits;
  int exponent_bits;

  int min_exponent() const { return 2 - (1 << (exponent_bits - 1)); }
  uint32_t infinity() const {
    return ((1u << exponent_bits) - 1) << fraction_bits;
  }
  uint32_t sign() const { return 1u << (fraction_bits + exponent_bits); }
};

Format FormatOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return {23, 8};
    case DType::kBFloat16:
      return {7, 8};
    case DType::kFloat16:
      return {10, 5};
  }
  return {};
}

}  // namespace

double Decode(DType dtype, uint32_t bits) {
  const Format f = FormatOf(dtype);
  const double sign = bits & f.sign() ? -1 : 1;
  const uint32_t magnitude = bits & (f.sign() - 1);
  if (magnitude > f.infinity()) return std::nan("");
  if (magnitude == f.infinity()) {
    return sign * std::numeric_limits<double>::infinity();
  }
  const uint32_t one = 1u << f.fraction_bits;
  const uint32_t exponent = magnitude >> f.fraction_bits;
  const uint32_t fraction = magnitude & (one - 1);
  const int unit = f.min_exponent() - f.fraction_bits;  // subnormals' exponent
  if (exponent == 0) return sign * std::ldexp(fraction, unit);
  return sign * std::ldexp(one + fraction, unit + exponent - 1);
}

uint32_t Encode(DType dtype, double value) {
  const Format f = FormatOf(dtype);
  const uint32_t sign = std::signbit(value) ? f.sign() : 0;
  if (std::isnan(value)) {
    return f.infinity() | 1u << (f.fraction_bits - 1);
  }
  if (std::isinf(value)) return sign | f.infinity();
  if (value == 0) return sign;
  const int exponent = std::max(std::ilogb(value), f.min_exponent());
  if (exponent > -f.min_exponent() + 1) return sign | f.infinity();
  const double units =
      std::nearbyint(std::ldexp(std::abs(value), f.fraction_bits - exponent));
  // The leading one of a normal number adds 1 to the exponent, and so does the
  // carry when a number rounds up to the next power of two.
  const uint32_t magnitude =
      (static_cast<uint32_t>(exponent - f.min_exponent()) << f.fraction_bits) +
      static_cast<uint32_t>(units);
  return sign | std::min(magnitude, f.infinity());
}

double Load(DType dtype, const std::byte* array, int64_t index) {
  const int64_t width = ByteWidth(dtype);
  uint32_t bits = 0;  // little-endian
  std::memcpy(&bits, array + index * width, width);
  return Decode(dtype, bits);
}

void Store(DType dtype, double value, std::byte* array, int64_t index) {
  const int64_t width = ByteWidth(dtype);
  const uint32_t bits = Encode(dtype, value);
  std::memcpy(array + index * width, &bits, width);
}

}  // namespace ep::testing
