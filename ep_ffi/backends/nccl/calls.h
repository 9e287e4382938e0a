// SPDX-License-Identifier: Apache-2.0

// Calls NCCL EP's functions with the arguments of our ops.

#ifndef EP_FFI_BACKENDS_NCCL_CALLS_H_
#define EP_FFI_BACKENDS_NCCL_CALLS_H_

#include <cuda.h>
#include <nccl.h>
#include <nccl_ep.h>

#include <cstdint>

#include "ep_ffi/backends/nccl/libraries.h"
#include "ep_ffi/core/backend.h"

namespace ep::nccl {

// Each of these enqueues a call on a handle for top_k choices per token. They
// throw as NCCL EP does, so call them through CallNcclEp. They do not read
// `args.mem`.
//
// NCCL EP demands that a descriptor of slots has the rows of the group. It
// touches only the slots of choices in the routing, and of their padding. All
// of these are inside the capacity of the layer, so that a layer may have less
// than the group: the descriptor is then longer than the buffer.

// Calls ncclEpUpdateHandle. `choices` is [num_tokens, top_k].
ncclResult_t Update(const Libraries& nccl, ncclEpHandle_t handle,
                    const int64_t* choices, int64_t num_tokens, int64_t top_k,
                    CUstream stream);
// Calls ncclEpDispatch.
ncclResult_t Scatter(const Libraries& nccl, ncclEpHandle_t handle,
                     const ScatterArgs& args, int64_t top_k,
                     int64_t group_capacity, CUstream stream);
// Calls ncclEpCombine.
ncclResult_t Gather(const Libraries& nccl, ncclEpHandle_t handle,
                    const GatherArgs& args, int64_t top_k,
                    int64_t group_capacity, CUstream stream);

}  // namespace ep::nccl

#endif  // EP_FFI_BACKENDS_NCCL_CALLS_H_
