// SPDX-License-Identifier: Apache-2.0

// What NCCL EP's high-throughput algorithm takes. It asserts, so that whatever
// is not checked here first ends the process, or makes its kernels write to the
// wrong place. Figures: the sources of NCCL EP 0.2.0, and the path through them
// that a group takes which has neither registered windows nor quantization.

#ifndef EP_FFI_BACKENDS_NCCL_LIMITS_H_
#define EP_FFI_BACKENDS_NCCL_LIMITS_H_

#include <cstdint>

#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/status.h"

namespace ep::nccl {

// What is fixed when a group is made.
struct Sizes {
  int64_t num_experts;
  int64_t ep_size;
  int64_t max_tokens;     // of a rank in one op
  int64_t capacity;       // of every layer, in rows
  int64_t max_row_bytes;  // of a token
  int64_t max_num_sms;    // 0: automatic

  int64_t num_local() const { return num_experts / ep_size; }
  // A multiple of four, whatever NVLink's domain is.
  int64_t max_dispatch_tokens() const { return (max_tokens + 3) / 4 * 4; }
};

// The properties of a machine that only a connected rank knows.
struct Machine {
  bool device_api;       // whether NCCL's kernels may be called by others
  int64_t nvlink_ranks;  // of the EP domain, in one NVLink domain
  int64_t shared_bytes;  // memory that a block of threads may have
  int64_t free_bytes;    // of the GPU's memory
};

// Returns the bytes that NCCL EP allocates for a group on each GPU.
int64_t GroupBytes(const Sizes& sizes, int64_t nvlink_ranks);

Status CheckSizes(const Sizes& sizes);
Status CheckMachine(const Sizes& sizes, const Machine& machine);
Status CheckLayer(const Sizes& sizes, const Layer& layer, int64_t num_tokens);
Status CheckRows(const Sizes& sizes, int64_t width, DType dtype);

}  // namespace ep::nccl

#endif  // EP_FFI_BACKENDS_NCCL_LIMITS_H_
