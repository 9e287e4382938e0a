// SPDX-License-Identifier: Apache-2.0

// 16-bit floating-point types, and their conversions from and to float32.
//
// The conversions have no branches, so that the compiler vectorizes loops that
// call them. They round to nearest, ties to even. A NaN stays a NaN.

#ifndef EP_FFI_CORE_FLOAT_TYPES_H_
#define EP_FFI_CORE_FLOAT_TYPES_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ep_ffi/core/backend.h"

#define EP_ALWAYS_INLINE inline __attribute__((always_inline))

namespace ep {

// Returns a mask of the exponent, whose bits are all 1 in infinities and NaNs.
inline uint32_t ExponentBits(DType dtype) {
  return dtype == DType::kFloat32    ? 0x7f800000
         : dtype == DType::kBFloat16 ? 0x7f80
                                     : 0x7c00;
}

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

EP_ALWAYS_INLINE float FloatFromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

EP_ALWAYS_INLINE uint32_t FloatToBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

EP_ALWAYS_INLINE float ToFloat(float value) { return value; }
EP_ALWAYS_INLINE float ToFloat(BFloat16 value) {
  return FloatFromBits(static_cast<uint32_t>(value.bits) << 16);
}
EP_ALWAYS_INLINE float ToFloat(Float16 value) {
  constexpr uint32_t kBias = (127 - 15) << 23;  // difference of exponent biases
  const uint32_t sign = (value.bits & 0x8000u) << 16;
  const int32_t magnitude = value.bits & 0x7fff;
  const uint32_t normal = (magnitude << 13) + kBias;
  const uint32_t subnormal =
      FloatToBits(static_cast<float>(magnitude) * 0x1p-24f);
  const uint32_t not_finite = normal + kBias;
  return FloatFromBits(sign | (magnitude < 0x400    ? subnormal
                               : magnitude < 0x7c00 ? normal
                                                    : not_finite));
}

EP_ALWAYS_INLINE void Round(float value, float* out) { *out = value; }
EP_ALWAYS_INLINE void Round(float value, BFloat16* out) {
  const uint32_t bits = FloatToBits(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40;
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  out->bits = static_cast<uint16_t>(is_nan ? quiet_nan : rounded);
}
EP_ALWAYS_INLINE void Round(float value, Float16* out) {
  constexpr uint32_t kBias = (127 - 15) << 23;
  const uint32_t sign = (FloatToBits(value) >> 16) & 0x8000;
  const uint32_t magnitude = FloatToBits(value) & 0x7fffffff;
  const uint32_t rebiased = magnitude - kBias;
  const uint32_t normal =
      std::min((rebiased + 0xfff + ((rebiased >> 13) & 1)) >> 13, 0x7c00u);
  // Adding 0.5 rounds to a multiple of 2^-24, as in subnormal float16.
  const uint32_t subnormal =
      FloatToBits(FloatFromBits(magnitude) + 0.5f) - FloatToBits(0.5f);
  out->bits =
      static_cast<uint16_t>(sign | (magnitude < 0x38800000u    ? subnormal
                                    : magnitude <= 0x7f800000u ? normal
                                                               : 0x7e00u));
}

}  // namespace ep

#endif  // EP_FFI_CORE_FLOAT_TYPES_H_
