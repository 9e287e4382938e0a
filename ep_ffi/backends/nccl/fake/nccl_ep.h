// SPDX-License-Identifier: Apache-2.0

#ifndef EP_FFI_BACKENDS_NCCL_FAKE_NCCL_EP_H_
#define EP_FFI_BACKENDS_NCCL_FAKE_NCCL_EP_H_

#include <nccl.h>
#include <nccl_ep.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ep_ffi/backends/nccl/fake/checks.h"
#include "ep_ffi/backends/nccl/fake/communicator.h"
#include "ep_ffi/core/plan.h"

struct ncclEpGroup {
  ncclComm_t comm;
  std::shared_ptr<ep::nccl::fake::Member> member;
  ncclEpGroupConfig_t config;
  uint64_t id;  // equal on all ranks
  std::atomic<int> num_handles{0};

  // Returns the sizes of the group, with zero for the sizes of a routing.
  ep::PlanDims dims() const {
    ep::PlanDims dims = {};
    dims.num_experts = config.num_experts;
    dims.ep_size = member->clique().size();
    dims.capacity = config.max_recv_tokens_per_rank;
    return dims;
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

// The header of a handle's memory. The rank's choices [num_tokens, num_topk]
// follow. The memory has no pointers, so XLA may copy it.
struct Routing {
  uint64_t magic;
  uint64_t group;
  uint64_t update;  // number of the update, equal on all its ranks
  int64_t num_topk;
  int64_t alignment;
  int64_t num_tokens;

  // Returns whether the routing is all zeros, so that this rank sends no rows.
  bool IsEmpty() const { return magic == 0; }
  int64_t num_choices() const { return num_tokens * num_topk; }
  const int64_t* choices() const {
    return reinterpret_cast<const int64_t*>(this + 1);
  }
};

constexpr uint64_t kRoutingMagic = 0x656b6166702d6570;  // "ep-pfake"

// Requires that the group may be used in the current context.
void RequireGroup(Contract& contract, ncclEpGroup_t group);
// Requires that an op may use the handle on this stream.
void RequireHandle(Contract& contract, ncclEpHandle_t handle,
                   cudaStream_t stream);

// Exchanges pointers with all ranks. Returns false if a rank contributes null,
// which means that its call violated the contract.
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

// Requires that the caller initialized a struct with the macro of the header.
template <typename Struct>
bool RequireStruct(Contract& contract, const std::string& name,
                   const Struct* given) {
  if (!contract.Require(given, name, " is null")) return false;
  contract.Require(given->size == sizeof(Struct), name, ".size = ", given->size,
                   ", expected ", sizeof(Struct));
  contract.Require(given->magic == NCCL_EP_MAGIC, name, ".magic is wrong");
  return contract.kept();
}

// A tensor with one dimension, [rows], or two, [rows, columns].
struct Tensor {
  ncclDataType_t type = ncclInt8;
  std::byte* data = nullptr;
  int64_t rows = 0;
  int64_t columns = 1;

  template <typename T>
  T* As() const {
    return reinterpret_cast<T*>(data);
  }
};

// Reads a descriptor, which must have one of these types and, if `rows` is not
// negative, these sizes.
inline Tensor OpenTensor(Contract& contract, const std::string& name,
                         const ncclEpTensor_t* given, unsigned ndim,
                         const std::vector<ncclDataType_t>& types,
                         int64_t rows = -1, int64_t columns = 1) {
  if (!contract.Require(given, name, " is missing")) return {};
  contract.Require(given->size == sizeof(*given), name, ".size = ", given->size,
                   ", expected ", sizeof(*given));
  contract.Require(given->magic == NCCL_EP_TENSOR_MAGIC, name,
                   ".magic is not a tensor's");
  contract.Require(given->ndim == ndim, name, " has ", given->ndim,
                   " dimensions, expected ", ndim);
  contract.Require(
      std::find(types.begin(), types.end(), given->datatype) != types.end(),
      name, ".datatype = ", given->datatype);
  if (!contract.kept()) return {};
  Tensor tensor = {given->datatype, static_cast<std::byte*>(given->data),
                   static_cast<int64_t>(given->sizes[0]),
                   ndim == 2 ? static_cast<int64_t>(given->sizes[1]) : 1};
  contract.Require(tensor.data || tensor.rows * tensor.columns == 0, name,
                   ".data is null");
  contract.Require(
      rows < 0 || (tensor.rows == rows && tensor.columns == columns), name,
      " is [", tensor.rows, ", ", tensor.columns, "], expected [", rows, ", ",
      columns, "]");
  return tensor;
}

}  // namespace ep::nccl::fake

#endif  // EP_FFI_BACKENDS_NCCL_FAKE_NCCL_EP_H_
