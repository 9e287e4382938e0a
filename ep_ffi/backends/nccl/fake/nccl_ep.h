// SPDX-License-Identifier: Apache-2.0

// Groups and handles of the fake NCCL EP, and what using them demands.

#ifndef EP_FFI_BACKENDS_NCCL_FAKE_NCCL_EP_H_
#define EP_FFI_BACKENDS_NCCL_FAKE_NCCL_EP_H_

#include <nccl.h>
#include <nccl_ep.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ep_ffi/backends/nccl/fake/communicator.h"
#include "ep_ffi/backends/nccl/fake/driver.h"
#include "ep_ffi/backends/nccl/fake/ledger.h"

struct ncclEpGroup {
  ncclComm_t comm;
  std::shared_ptr<ep::nccl::fake::Member> member;
  ncclEpGroupConfig_t config;
  uint64_t id;  // equal on all ranks
  std::atomic<int> num_handles{0};

  int64_t num_local() const {
    return config.num_experts / member->clique().size();
  }
};

struct ncclEpHandle {
  ncclEpGroup_t group;
  int64_t num_topk;
  int64_t alignment;
  std::byte* mem;
  int64_t bytes;
};

namespace ep::nccl::fake {

// Loads kernels; returns whether they were not loaded before.
bool LoadOnce(int device, const std::string& kernels);

void DemandGroup(Contract& contract, ncclEpGroup_t group);
// That an op may use the handle, on this stream.
void DemandHandle(Contract& contract, ncclEpHandle_t handle,
                  cudaStream_t stream);

// Launches a variant of its kernels, which is what differs from other launches.
// Before it is first launched on a device, it is compiled and loaded onto that.
template <typename... Parts>
void DemandKernels(Contract& contract, CUstream stream, const Parts&... parts) {
  const bool is_new = LoadOnce(stream->context()->device,
                               StrCat(contract.function(), " ", parts...));
  contract.Demand(!is_new || !stream->IsRecording(),
                  "loads kernels while the stream is captured");
}

// Meets all ranks. False unless each brought something; null says that a
// rank's part is in violation of its contract.
template <typename T>
bool MeetAll(Member& member, const std::string& purpose, const T* mine,
             std::vector<const T*>* all, uint64_t* number) {
  Clique::Met met;
  if (!member.clique().Meet(member.rank(), purpose, mine, &met)) return false;
  for (const void* brought : met.brought) {
    if (!brought) return false;
    all->push_back(static_cast<const T*>(brought));
  }
  if (number) *number = met.number;
  return true;
}

}  // namespace ep::nccl::fake

#endif  // EP_FFI_BACKENDS_NCCL_FAKE_NCCL_EP_H_
