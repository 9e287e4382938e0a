// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/matmul/kernels.h"

#include <algorithm>
#include <utility>

#include "ep_ffi/core/float_types.h"

// Each function of kernels_inl.h has a target attribute. Separate files with
// options per instruction set would be wrong: the linker keeps one copy of an
// inline function of several files, and might keep the copy that only a new
// processor can run.
//
// Only this file allows fused multiply-add, which rounds once. GCC vectorizes a
// selection of floats only with the other options, because computing both
// alternatives might trap.
#if defined(__clang__)
#pragma clang fp contract(fast)
#define EP_SHUFFLE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define EP_SHUFFLE(x, y, ...) __builtin_shuffle(x, y, IntVector{__VA_ARGS__})
#pragma GCC optimize("O3", "no-trapping-math", "fp-contract=fast")
#endif

namespace ep {
namespace {

constexpr int64_t kVectors = 3;  // vectors per panel

#if defined(__x86_64__)
namespace avx512 {
constexpr char kName[] = "AVX-512";
constexpr int kLanes = 16, kRows = 8;
#define EP_TARGET \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))
#include "ep_ffi/matmul/kernels_inl.h"
#undef EP_TARGET
}  // namespace avx512

namespace avx2 {
constexpr char kName[] = "AVX2";
constexpr int kLanes = 8, kRows = 4;
#define EP_TARGET __attribute__((target("avx2,fma")))
#include "ep_ffi/matmul/kernels_inl.h"
#undef EP_TARGET
}  // namespace avx2
#endif

namespace baseline {
#if defined(__aarch64__)
constexpr char kName[] = "NEON";
constexpr int kLanes = 4, kRows = 8;
#else
constexpr char kName[] = "baseline";  // the only kernels that do not fuse
constexpr int kLanes = 4, kRows = 4;
#endif
#define EP_TARGET
#include "ep_ffi/matmul/kernels_inl.h"
#undef EP_TARGET
}  // namespace baseline

}  // namespace

const std::vector<const Kernels*>& SupportedKernels() {
  static const auto* const kernels = [] {
    auto* found = new std::vector<const Kernels*>();
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool has_fma = __builtin_cpu_supports("fma");
    if (has_fma && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
      found->push_back(&avx512::kKernels);
    }
    if (has_fma && __builtin_cpu_supports("avx2")) {
      found->push_back(&avx2::kKernels);
    }
#endif
    found->push_back(&baseline::kKernels);
    return found;
  }();
  return *kernels;
}

}  // namespace ep
