// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/row_math.h"

#include <algorithm>
#include <cstring>

// Without these options, GCC does not vectorize a choice between floats, since
// it may not compute both; and it jams the loop over terms, which then adds
// them one element at a time.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3", "no-trapping-math", "no-loop-unroll-and-jam")
#endif

// On x86, GCC from version 12 on compiles the loops below for three generations
// of vector units, and the loader chooses one by the features of the processor.
// Elsewhere the baseline is good enough (NEON on ARM); and sanitizers do not
// work with it, since they start before the loader has chosen.
#if defined(__x86_64__) && __GNUC__ >= 12 && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define EP_VECTORIZED \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define EP_VECTORIZED
#endif

namespace ep::host {
namespace {

float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

uint32_t ToBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// The conversions have no branches, so that the compiler vectorizes them. They
// round to nearest, ties to even; a NaN stays one.

inline float ToFloat(float value) { return value; }
inline float ToFloat(BFloat16 value) {
  return FromBits(static_cast<uint32_t>(value.bits) << 16);
}
inline float ToFloat(Float16 value) {
  constexpr uint32_t kBias = (127 - 15) << 23;  // between the exponents
  const uint32_t sign = (value.bits & 0x8000u) << 16;
  const int32_t magnitude = value.bits & 0x7fff;
  const uint32_t normal = (magnitude << 13) + kBias;
  const uint32_t subnormal = ToBits(static_cast<float>(magnitude) * 0x1p-24f);
  const uint32_t not_finite = normal + kBias;
  return FromBits(sign | (magnitude < 0x400    ? subnormal
                          : magnitude < 0x7c00 ? normal
                                               : not_finite));
}

inline void Round(float value, float* out) { *out = value; }
inline void Round(float value, BFloat16* out) {
  const uint32_t bits = ToBits(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40;
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  out->bits = static_cast<uint16_t>(is_nan ? quiet_nan : rounded);
}
inline void Round(float value, Float16* out) {
  constexpr uint32_t kBias = (127 - 15) << 23;
  const uint32_t sign = (ToBits(value) >> 16) & 0x8000;
  const uint32_t magnitude = ToBits(value) & 0x7fffffff;
  const uint32_t rebiased = magnitude - kBias;
  const uint32_t normal =
      std::min((rebiased + 0xfff + ((rebiased >> 13) & 1)) >> 13, 0x7c00u);
  // Near 1/2, float32 has the spacing of subnormal float16.
  const uint32_t subnormal = ToBits(FromBits(magnitude) + 0.5f) - ToBits(0.5f);
  out->bits =
      static_cast<uint16_t>(sign | (magnitude < 0x38800000u    ? subnormal
                                    : magnitude <= 0x7f800000u ? normal
                                                               : 0x7e00u));
}

// Sums `kLanes` columns, from `begin` on.
template <int kLanes, typename T>
inline __attribute__((always_inline)) void SumLanes(const Term* terms,
                                                    size_t num_terms,
                                                    int64_t begin, T* out) {
  float sums[kLanes] = {};
  for (size_t i = 0; i < num_terms; ++i) {
    const T* row = reinterpret_cast<const T*>(terms[i].row) + begin;
    const float scale = terms[i].scale;
    for (int c = 0; c < kLanes; ++c) sums[c] += scale * ToFloat(row[c]);
  }
  // Adding 0 turns the -0 of a negative sum that underflows into +0.
  for (int c = 0; c < kLanes; ++c) Round(sums[c] + 0.0f, out + begin + c);
}

template <typename T>
inline __attribute__((always_inline)) void SumColumns(const Term* terms,
                                                      size_t num_terms,
                                                      int64_t width, T* out) {
  constexpr int kLanes = 64;  // their sums stay in registers
  int64_t begin = 0;
  for (; begin + kLanes <= width; begin += kLanes) {
    SumLanes<kLanes>(terms, num_terms, begin, out);
  }
  for (; begin < width; ++begin) SumLanes<1>(terms, num_terms, begin, out);
}

EP_VECTORIZED void SumFloat32(const Term* terms, size_t num_terms,
                              int64_t width, float* out) {
  SumColumns(terms, num_terms, width, out);
}
EP_VECTORIZED void SumBFloat16(const Term* terms, size_t num_terms,
                               int64_t width, BFloat16* out) {
  SumColumns(terms, num_terms, width, out);
}
EP_VECTORIZED void SumFloat16(const Term* terms, size_t num_terms,
                              int64_t width, Float16* out) {
  SumColumns(terms, num_terms, width, out);
}

}  // namespace

int64_t FindNotFinite(DType dtype, const std::byte* row, int64_t width) {
  // A number is not finite if its exponent has ones only.
  const auto find = [&](const auto* bits, auto exponent) -> int64_t {
    const auto* end = bits + width;
    const auto* found = std::find_if(bits, end, [&](auto element) {
      return (element & exponent) == exponent;
    });
    return found == end ? -1 : found - bits;
  };
  switch (dtype) {
    case DType::kFloat32:
      return find(reinterpret_cast<const uint32_t*>(row), uint32_t{0x7f800000});
    case DType::kBFloat16:
      return find(reinterpret_cast<const uint16_t*>(row), uint16_t{0x7f80});
    case DType::kFloat16:
      return find(reinterpret_cast<const uint16_t*>(row), uint16_t{0x7c00});
  }
  return -1;
}

void SumRows(DType dtype, const std::vector<Term>& terms, int64_t width,
             std::byte* out) {
  switch (dtype) {
    case DType::kFloat32:
      return SumFloat32(terms.data(), terms.size(), width,
                        reinterpret_cast<float*>(out));
    case DType::kBFloat16:
      return SumBFloat16(terms.data(), terms.size(), width,
                         reinterpret_cast<BFloat16*>(out));
    case DType::kFloat16:
      return SumFloat16(terms.data(), terms.size(), width,
                        reinterpret_cast<Float16*>(out));
  }
}

}  // namespace ep::host
