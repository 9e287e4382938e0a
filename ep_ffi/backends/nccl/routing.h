// SPDX-License-Identifier: Apache-2.0

// The layout of EpHandle.mem: our routing arrays, then NCCL EP's handle.

#ifndef EP_FFI_BACKENDS_NCCL_ROUTING_H_
#define EP_FFI_BACKENDS_NCCL_ROUTING_H_

#include <cstddef>
#include <cstdint>

#include "ep_ffi/backends/nccl/communicator.h"
#include "ep_ffi/backends/nccl/device.h"
#include "ep_ffi/backends/nccl/kernels.h"
#include "ep_ffi/backends/nccl/limits.h"
#include "ep_ffi/core/backend.h"

namespace ep::nccl {

// Returns the bytes of our routing arrays in EpHandle.mem.
int64_t RoutingBytes(const Sizes& sizes, const Layer& layer,
                     int64_t num_tokens);

// Returns the routing whose arrays are in `mem`. All other pointers are null.
Routing RoutingIn(const Sizes& sizes, const Layer& layer, int64_t num_tokens,
                  int32_t rank, std::byte* mem);

// Enqueues the kernels of ep_prepare and the all-gather of counts between them.
// The kernels write routing.choices, which NCCL EP can use without checks.
Status EnqueueRouting(const Device& device, const Communicator& communicator,
                      CUstream stream, Routing routing);

}  // namespace ep::nccl

#endif  // EP_FFI_BACKENDS_NCCL_ROUTING_H_
