// SPDX-License-Identifier: Apache-2.0

// The limits of NCCL EP's high-throughput algorithm. Beyond a limit, NCCL EP
// terminates the process or its kernels write out of bounds, so this backend
// checks the limits first. The numbers come from the sources of NCCL EP 0.2.0,
// for groups without quantization.

#ifndef EP_FFI_BACKENDS_NCCL_LIMITS_H_
#define EP_FFI_BACKENDS_NCCL_LIMITS_H_

#include <cstdint>

#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/plan.h"
#include "ep_ffi/core/status.h"

namespace ep::nccl {

// The supported versions of NCCL, as ncclGetVersion returns them.
//
// NCCL EP was built with the headers of 2.30.7, and compiles its kernels with
// the same headers. A newer NCCL writes ncclDevComm in the layout of its
// caller's headers. Nobody has checked NCCL's structs for the network, so ranks
// in several NVLink domains need 2.30.7. With an older NCCL, ncclEpCreateGroup
// terminates the process.
inline constexpr int kOldestNccl = 23007;  // ran on one H100
inline constexpr int kNewestNccl = 23203;  // not yet run; nor was 2.31.2

struct Sizes {
  int64_t num_experts;
  int64_t ep_size;
  int64_t max_tokens;  // tokens of a rank in one op
  int64_t capacity;    // receive rows of a rank, the maximum over layers
  int64_t max_row_bytes;
  int64_t max_num_sms;  // 0: automatic

  int64_t num_local() const { return LocalExperts(num_experts, ep_size); }
  int64_t num_expert_slots() const { return ep_size * num_local(); }
  // NCCL EP's experts of a rank: L, rounded up so that all ranks together have
  // a multiple of 4. The added experts are empty.
  int64_t nccl_ep_local() const;
  // Rounds max_tokens up to a multiple of 4, which every NVLink domain accepts.
  int64_t max_dispatch_tokens() const { return (max_tokens + 3) / 4 * 4; }
};

// The properties of a machine that only a connected rank knows.
struct Machine {
  bool device_api;       // whether other libraries may use NCCL on the device
  int64_t nvlink_ranks;  // ranks of the EP domain in each NVLink domain
  int64_t shared_bytes;  // limit of a thread block's shared memory
  int64_t free_bytes;    // free memory of the GPU
  int nccl_version;
};

// Return an error that names the limit if the arguments exceed a limit.
Status CheckNccl(int version);
Status CheckSizes(const Sizes& sizes);
Status CheckMachine(const Sizes& sizes, const Machine& machine);
Status CheckLayer(const Sizes& sizes, const Layer& layer, int64_t num_tokens);
Status CheckRows(const Sizes& sizes, int64_t width, DType dtype);

}  // namespace ep::nccl

#endif  // EP_FFI_BACKENDS_NCCL_LIMITS_H_
