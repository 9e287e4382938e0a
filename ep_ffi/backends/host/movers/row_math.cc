// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/movers/row_math.h"

#include <algorithm>

#include "ep_ffi/core/float_types.h"

// Without these options, GCC does not vectorize a selection between two floats
// (computing both might trap), and does not keep the loop over terms outermost.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3", "no-trapping-math", "no-loop-unroll-and-jam")
#endif

// On x86, GCC 12 or newer compiles these loops for three generations of vector
// units, and the loader selects one. Elsewhere the baseline suffices (NEON on
// ARM). Sanitizers start before the loader selects, so they need the baseline.
#if defined(__x86_64__) && __GNUC__ >= 12 && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define EP_VECTORIZED \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define EP_VECTORIZED
#endif

namespace ep::host {
namespace {

// Sums the terms in the `kLanes` columns from `begin` on.
template <int kLanes, typename T>
EP_ALWAYS_INLINE void SumLanes(const Term* terms, size_t num_terms,
                               int64_t begin, T* out) {
  float sums[kLanes] = {};
  for (size_t i = 0; i < num_terms; ++i) {
    const T* row = reinterpret_cast<const T*>(terms[i].row) + begin;
    const float scale = terms[i].scale;
    for (int c = 0; c < kLanes; ++c) sums[c] += scale * ToFloat(row[c]);
  }
  // Adding 0 turns the -0 of an underflowing negative sum into +0.
  for (int c = 0; c < kLanes; ++c) Round(sums[c] + 0.0f, out + begin + c);
}

template <typename T>
EP_ALWAYS_INLINE void SumColumns(const Term* terms, size_t num_terms,
                                 int64_t width, T* out) {
  constexpr int kLanes = 64;  // the sums of 64 columns stay in registers
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
  const auto find = [&](const auto* bits) -> int64_t {
    const auto exponent = ExponentBits(dtype);
    const auto* end = bits + width;
    const auto* found = std::find_if(bits, end, [&](uint32_t element) {
      return (element & exponent) == exponent;
    });
    return found == end ? -1 : found - bits;
  };
  return dtype == DType::kFloat32
             ? find(reinterpret_cast<const uint32_t*>(row))
             : find(reinterpret_cast<const uint16_t*>(row));
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
