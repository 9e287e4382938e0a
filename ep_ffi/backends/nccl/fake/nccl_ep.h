// SPDX-License-Identifier: Apache-2.0

// Groups and handles of the fake NCCL EP, and what the use of them requires.

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

#include "ep_ffi/backends/nccl/fake/checks.h"
#include "ep_ffi/backends/nccl/fake/communicator.h"

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

// Requires that the group may be used in the current context.
void RequireGroup(Contract& contract, ncclEpGroup_t group);
// Requires that an op may use the handle on this stream.
void RequireHandle(Contract& contract, ncclEpHandle_t handle,
                   cudaStream_t stream);

// Exchanges pointers with all ranks. Returns false unless each contributed one:
// a rank contributes null if its call violated the contract.
template <typename T>
bool ExchangeAll(Member& member, const std::string& purpose, const T* mine,
                 std::vector<const T*>* all, uint64_t* number) {
  Clique::Exchanged exchanged;
  if (!member.clique().Exchange(member.rank(), purpose, mine, &exchanged))
    return false;
  for (const void* theirs : exchanged.contributions) {
    if (!theirs) return false;
    all->push_back(static_cast<const T*>(theirs));
  }
  if (number) *number = exchanged.number;
  return true;
}

}  // namespace ep::nccl::fake

#endif  // EP_FFI_BACKENDS_NCCL_FAKE_NCCL_EP_H_
