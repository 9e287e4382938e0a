// SPDX-License-Identifier: Apache-2.0

// EpHandle.mem of this backend: our view of a routing, then NCCL EP's.

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

// Bytes of our part; NCCL EP's begins there.
int64_t RoutingBytes(const Sizes& sizes, const Layer& layer,
                     int64_t num_tokens);

// Our part of `mem`. The fields that are not parts of it are left zero.
Routing RoutingIn(const Sizes& sizes, const Layer& layer, int64_t num_tokens,
                  int32_t rank, std::byte* mem);

// Enqueues ep_prepare's kernels and the exchange of counts between them. After
// it, routing.choices is what NCCL EP may see.
Status EnqueueRouting(const Device& device, const Communicator& communicator,
                      CUstream stream, Routing routing);

}  // namespace ep::nccl

#endif  // EP_FFI_BACKENDS_NCCL_ROUTING_H_
