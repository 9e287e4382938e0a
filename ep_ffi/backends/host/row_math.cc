#include "ep_ffi/backends/host/row_math.h"

#include <algorithm>
#include <cstring>

// On x86 the loops below are compiled for three generations of vector units
// and chosen when the library is loaded. Elsewhere (NEON) the baseline does.
// Sanitizers run before such a choice can be made.
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define EP_VECTORIZED                                                  \
  __attribute__((                                                      \
      target_clones("arch=skylake-avx512", "arch=haswell", "default"), \
      optimize("O3")))
#else
#define EP_VECTORIZED
#endif

namespace ep::host {
namespace {

// Columns that are summed at a time: their float32 sums stay in the L1 cache.
constexpr int64_t kBlock = 1024;

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

inline float ToFloat(float value) { return value; }
inline float ToFloat(_Float16 value) { return value; }
inline float ToFloat(BFloat16 value) {
  return FromBits(static_cast<uint32_t>(value.bits) << 16);
}

inline void Round(float value, float* out) { *out = value; }
inline void Round(float value, _Float16* out) {
  *out = static_cast<_Float16>(value);
}
inline void Round(float value, BFloat16* out) {  // to nearest, ties to even
  const uint32_t bits = ToBits(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40;
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  out->bits = static_cast<uint16_t>(is_nan ? quiet_nan : rounded);
}

template <typename T>
inline __attribute__((always_inline)) void SumBlock(const Term* terms,
                                                    size_t num_terms,
                                                    int64_t begin, int64_t n,
                                                    T* out) {
  float sums[kBlock];
  std::fill(sums, sums + n, 0.0f);
  for (size_t i = 0; i < num_terms; ++i) {
    const T* row = reinterpret_cast<const T*>(terms[i].row) + begin;
    const float scale = terms[i].scale;
    for (int64_t c = 0; c < n; ++c) sums[c] += scale * ToFloat(row[c]);
  }
  for (int64_t c = 0; c < n; ++c) Round(sums[c], out + begin + c);
}

EP_VECTORIZED void SumFloat32(const Term* terms, size_t num_terms,
                              int64_t begin, int64_t n, float* out) {
  SumBlock(terms, num_terms, begin, n, out);
}
EP_VECTORIZED void SumBFloat16(const Term* terms, size_t num_terms,
                               int64_t begin, int64_t n, BFloat16* out) {
  SumBlock(terms, num_terms, begin, n, out);
}
EP_VECTORIZED void SumFloat16(const Term* terms, size_t num_terms,
                              int64_t begin, int64_t n, _Float16* out) {
  SumBlock(terms, num_terms, begin, n, out);
}

}  // namespace

int64_t FindNotFinite(DType dtype, const std::byte* row, int64_t width) {
  // An exponent of ones only.
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
  for (int64_t begin = 0; begin < width; begin += kBlock) {
    const int64_t n = std::min(kBlock, width - begin);
    switch (dtype) {
      case DType::kFloat32:
        SumFloat32(terms.data(), terms.size(), begin, n,
                   reinterpret_cast<float*>(out));
        break;
      case DType::kBFloat16:
        SumBFloat16(terms.data(), terms.size(), begin, n,
                    reinterpret_cast<BFloat16*>(out));
        break;
      case DType::kFloat16:
        SumFloat16(terms.data(), terms.size(), begin, n,
                   reinterpret_cast<_Float16*>(out));
        break;
    }
  }
}

}  // namespace ep::host
