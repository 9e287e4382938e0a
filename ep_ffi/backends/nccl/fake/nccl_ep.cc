// SPDX-License-Identifier: Apache-2.0

// Groups and handles of the fake NCCL EP. The fake implements the
// high-throughput algorithm with the expert-major layout. The checks of the
// fake match the assertions, traps and silent errors of 0.2.0.

#include "ep_ffi/backends/nccl/fake/nccl_ep.h"

#include <nccl.h>
#include <nccl_ep.h>

#include "ep_ffi/backends/nccl/fake/driver.h"
#include "ep_ffi/backends/nccl/fake/fake.h"

namespace ep::nccl::fake {
namespace {

constexpr int64_t kMaxTopK = 32;
constexpr uintptr_t kMemAlignment = 16;

bool IsPowerOfTwo(int64_t value) {
  return value > 0 && (value & (value - 1)) == 0;
}

int64_t AlignmentOf(const ncclEpHandleConfig_t* config) {
  return std::max<int64_t>(config->dispatch_output_per_expert_alignment, 1);
}

// Returns the size of a handle in bytes: a routing and scratch memory.
int64_t BytesOf(const ncclEpGroup& group, int64_t num_topk) {
  const int64_t bytes =
      sizeof(Routing) +
      group.config.max_dispatch_tokens_per_rank * num_topk * sizeof(int64_t);
  return (bytes + 1023) / 1024 * 1024 + kScratchBytes;
}

void RequireHandleAttributes(Contract& contract, ncclEpLayout_t layout,
                             const ncclEpHandleConfig_t* config, int num_topk) {
  contract.Require(layout == NCCL_EP_LAYOUT_EXPERT_MAJOR, "layout = ", layout);
  RequireStruct(contract, "config", config);
  contract.Require(IsPowerOfTwo(AlignmentOf(config)),
                   "alignment = ", AlignmentOf(config));
  contract.Require(num_topk >= 1 && num_topk <= kMaxTopK,
                   "num_topk = ", num_topk);
}

void RequireConfig(Contract& contract, const ncclEpGroupConfig_t& c,
                   int num_ranks, int nvlink_ranks) {
  const int64_t num_experts = c.num_experts;
  contract.Require(c.algorithm == NCCL_EP_ALGO_HIGH_THROUGHPUT,
                   "algorithm = ", c.algorithm);
  contract.Require(num_experts > 0 && num_experts % num_ranks == 0 &&
                       num_experts / num_ranks * nvlink_ranks % 4 == 0,
                   "num_experts = ", num_experts, " on ", num_ranks,
                   " ranks, of which NVLink connects ", nvlink_ranks);
  contract.Require(c.max_dispatch_tokens_per_rank > 0 &&
                       c.max_dispatch_tokens_per_rank % 4 == 0,
                   "max_dispatch_tokens = ", c.max_dispatch_tokens_per_rank);
  contract.Require(c.max_recv_tokens_per_rank >= c.max_dispatch_tokens_per_rank,
                   "max_recv_tokens_per_rank = ", c.max_recv_tokens_per_rank);
  contract.Require(c.max_token_bytes > 0 && c.max_token_bytes % 16 == 0,
                   "max_token_bytes = ", c.max_token_bytes);
}

}  // namespace

void RequireGroup(Contract& contract, ncclEpGroup_t group) {
  if (!contract.Require(LiveObjects<ncclEpGroup>::Get().Has(group),
                        "no such group")) {
    return;
  }
  contract.Require(LiveObjects<ncclComm>::Get().Has(group->comm),
                   "the group's communicator is gone");
  RequireContext(contract, group->member->device());
}

void RequireHandle(Contract& contract, ncclEpHandle_t handle,
                   cudaStream_t stream) {
  if (!contract.Require(LiveObjects<ncclEpHandle>::Get().Has(handle),
                        "no such handle")) {
    return;
  }
  RequireGroup(contract, handle->group);
  RequireStream(contract, stream);
  contract.Require(
      !IsInHandler() || HandlerMemHolds(handle->mem, handle->bytes),
      "the handle was opened on a stale address");
}

extern "C" {

ncclResult_t ncclEpCreateGroup(ncclEpGroup_t* group, ncclComm_t comm,
                               const ncclEpGroupConfig_t* config) {
  Contract contract("ncclEpCreateGroup");
  contract.RequireNoHandler();
  if (contract.Require(LiveObjects<ncclComm>::Get().Has(comm),
                       "no such communicator")) {
    RequireContext(contract, comm->member->device());
  }
  if (!RequireStruct(contract, "config", config)) return ncclInvalidArgument;
  Member& member = *comm->member;
  const int size = member.clique().size();
  const int nvlink_ranks = TheMachine().nvlink_ranks;
  const int version = TheMachine().nccl_version;
  contract.Require(version == 23007 || (version > 23007 && nvlink_ranks == 0),
                   "NCCL ", version,
                   " may write structs for the network that NCCL "
                   "EP's kernels cannot read");
  contract.Require(TheMachine().device_api, "NCCL has no device API");
  if (nvlink_ranks > 0 && nvlink_ranks < size) {
    contract.Require(TheMachine().gin, "NCCL EP requires GIN");
    contract.Require(TheMachine().num_hosts > 1,
                     "NCCL EP's kernels would use a null pointer");
  }
  RequireConfig(contract, *config, size,
                nvlink_ranks > 0 ? nvlink_ranks : size);
  // The name of the exchange contains all settings, so that ranks must agree.
  std::vector<const ncclEpGroupConfig_t*> configs;
  uint64_t id = 0;
  if (!ExchangeAll(member,
                   StrCat("ncclEpCreateGroup of ", config->num_experts, ", ",
                          config->max_dispatch_tokens_per_rank, ", ",
                          config->max_recv_tokens_per_rank, ", ",
                          config->max_token_bytes, ", ", config->max_num_sms),
                   contract.kept() ? config : nullptr, &configs, &id)) {
    return ncclInvalidArgument;
  }
  ++comm->num_groups;
  *group = LiveObjects<ncclEpGroup>::Get().Add(
      new ncclEpGroup{comm, comm->member, *config, id});
  return ncclSuccess;
}

ncclResult_t ncclEpGroupDestroy(ncclEpGroup_t group) {
  Contract contract("ncclEpGroupDestroy");
  contract.RequireNoHandler();
  RequireGroup(contract, group);
  if (!contract.kept()) return ncclInvalidArgument;
  contract.Require(group->num_handles == 0, "handles are open on it");
  contract.Require(!group->member->IsBusy(), "its operations have not ended");
  if (!contract.kept()) return ncclInvalidUsage;
  --group->comm->num_groups;
  LiveObjects<ncclEpGroup>::Get().Remove(group);
  delete group;
  return ncclSuccess;
}

ncclResult_t ncclEpHandleMemSize(ncclEpGroup_t group, ncclEpLayout_t layout,
                                 const ncclEpHandleConfig_t* config,
                                 size_t* size, int num_topk) {
  Contract contract("ncclEpHandleMemSize");
  RequireGroup(contract, group);
  RequireHandleAttributes(contract, layout, config, num_topk);
  if (!contract.kept()) return ncclInvalidArgument;
  *size = BytesOf(*group, num_topk);
  return ncclSuccess;
}

ncclResult_t ncclEpInitHandle(ncclEpHandle_t* handle, ncclEpGroup_t group,
                              ncclEpLayout_t layout,
                              const ncclEpHandleConfig_t* config, int num_topk,
                              const ncclEpTensor_t* handle_mem) {
  Contract contract("ncclEpInitHandle");
  RequireGroup(contract, group);
  RequireHandleAttributes(contract, layout, config, num_topk);
  const Tensor mem =
      OpenTensor(contract, "handle_mem", handle_mem, 1, {ncclUint8});
  if (!contract.kept()) return ncclInvalidArgument;
  contract.Require(mem.rows >= BytesOf(*group, num_topk), "handle_mem has ",
                   mem.rows, " bytes, expected ", BytesOf(*group, num_topk));
  contract.Require(reinterpret_cast<uintptr_t>(mem.data) % kMemAlignment == 0,
                   "handle_mem is not aligned");
  if (!contract.kept()) return ncclInvalidArgument;
  ++group->num_handles;
  *handle = LiveObjects<ncclEpHandle>::Get().Add(
      new ncclEpHandle{group, num_topk, AlignmentOf(config), mem.data,
                       BytesOf(*group, num_topk)});
  return ncclSuccess;
}

ncclResult_t ncclEpHandleDestroy(ncclEpHandle_t handle) {
  Contract contract("ncclEpHandleDestroy");
  if (!contract.Require(LiveObjects<ncclEpHandle>::Get().Remove(handle),
                        "no such handle")) {
    return ncclInvalidArgument;
  }
  RequireGroup(contract, handle->group);
  --handle->group->num_handles;
  delete handle;
  return ncclSuccess;
}

}  // extern "C"

}  // namespace ep::nccl::fake
