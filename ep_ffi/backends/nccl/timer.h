// SPDX-License-Identifier: Apache-2.0

// The clock of a GPU.

#ifndef EP_FFI_BACKENDS_NCCL_TIMER_H_
#define EP_FFI_BACKENDS_NCCL_TIMER_H_

#include "kernels.h"

namespace ep::nccl {

// Returns the nanoseconds since 1970, as far as the GPU was told.
__device__ inline uint64_t Nanoseconds() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

}  // namespace ep::nccl

#endif  // EP_FFI_BACKENDS_NCCL_TIMER_H_
