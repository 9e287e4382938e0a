// SPDX-License-Identifier: Apache-2.0

// Functions that all threads of a warp must call, with equal results on all.

#ifndef EP_FFI_BACKENDS_NCCL_WARP_H_
#define EP_FFI_BACKENDS_NCCL_WARP_H_

#include "kernels.h"

namespace ep::nccl {

constexpr uint32_t kAllLanes = 0xffffffff;

// Computes prefix sums. For each i < count, one thread calls load(i) once, and
// then store(i, load(0) + ... + load(i - 1)). Returns the sum of all loads; in
// the fake, only lane 0 gets this sum.
template <typename Load, typename Store>
__device__ int32_t WarpScan(int32_t lane, int32_t count, Load load,
                            Store store) {
  int32_t before = 0;
  for (int32_t first = 0; first < count; first += kWarp) {
    const int32_t i = first + lane;
    const int32_t value = i < count ? load(i) : 0;
    int32_t sum = value;
    for (int32_t step = 1; step < kWarp; step *= 2) {
      const int32_t below = __shfl_up_sync(kAllLanes, sum, step);
      if (lane >= step) sum += below;
    }
    if (i < count) store(i, before + sum - value);
    before += __shfl_sync(kAllLanes, sum, kWarp - 1);
  }
  return before;
}

// Returns the maximum of 0 and load(i) over i < count.
template <typename Load>
__device__ int32_t WarpMax(int32_t lane, int32_t count, Load load) {
  int32_t largest = 0;
  for (int32_t i = lane; i < count; i += kWarp) largest = max(largest, load(i));
  for (int32_t step = kWarp / 2; step > 0; step /= 2) {
    largest = max(largest, __shfl_xor_sync(kAllLanes, largest, step));
  }
  return largest;
}

// Returns the least i < count for which is(i) is true, or count.
template <typename Is>
__device__ int32_t WarpFind(int32_t lane, int32_t count, Is is) {
  int32_t found = count;
  for (int32_t i = lane; i < count && found == count; i += kWarp) {
    if (is(i)) found = i;
  }
  for (int32_t step = kWarp / 2; step > 0; step /= 2) {
    found = min(found, __shfl_xor_sync(kAllLanes, found, step));
  }
  return found;
}

}  // namespace ep::nccl

#endif  // EP_FFI_BACKENDS_NCCL_WARP_H_
