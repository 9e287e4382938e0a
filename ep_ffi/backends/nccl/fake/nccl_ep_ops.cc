// SPDX-License-Identifier: Apache-2.0

// The collectives of the fake NCCL EP. Each checks its arguments when it is
// called, and computes when its stream runs it.

#include <nccl.h>
#include <nccl_ep.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <set>
#include <string>
#include <vector>

#include "ep_ffi/backends/nccl/fake/checks.h"
#include "ep_ffi/backends/nccl/fake/communicator.h"
#include "ep_ffi/backends/nccl/fake/fake.h"
#include "ep_ffi/backends/nccl/fake/nccl_ep.h"
#include "ep_ffi/backends/nccl/fake/transfers.h"

namespace ep::nccl::fake {
namespace {

// Opens a descriptor of rows that dispatch and combine accept.
Tensor OpenRows(Contract& contract, const std::string& name,
                const ncclEpTensor_t* given, const ncclEpGroup& group) {
  const Tensor rows = OpenTensor(contract, name, given, 2,
                                 {ncclFloat32, ncclBfloat16, ncclFloat16});
  const int64_t bytes = rows.columns * (rows.type == ncclFloat32 ? 4 : 2);
  contract.Require(rows.columns > 0 && rows.columns % 8 == 0 &&
                       bytes % 16 == 0 && bytes <= group.config.max_token_bytes,
                   name, " has rows of ", rows.columns, " elements, ", bytes,
                   " bytes");
  return rows;
}

DType DTypeOf(ncclDataType_t type) {
  switch (type) {
    case ncclBfloat16:
      return DType::kBFloat16;
    case ncclFloat16:
      return DType::kFloat16;
    default:
      return DType::kFloat32;
  }
}

// Copies a rank's choices to the handle's memory, and -1 for invalid ones.
void CopyChoices(Contract& contract, const ncclEpGroup& group,
                 const Tensor& topk_idx, int64_t* out) {
  for (int64_t t = 0; t < topk_idx.rows; ++t) {
    std::set<int64_t> seen;
    for (int64_t i = t * topk_idx.columns; i < (t + 1) * topk_idx.columns;
         ++i) {
      const int64_t id = topk_idx.As<int64_t>()[i];
      const bool valid =
          id < 0 || (id < group.config.num_experts && seen.insert(id).second);
      contract.Require(valid, "topk_idx[", t, ", ", i % topk_idx.columns,
                       "] = ", id, " is out of range or repeated");
      out[i] = valid ? id : -1;
    }
  }
}

// Runs ncclEpUpdateHandle on the stream. An enqueued op owns a copy of its
// handle, which may be destroyed before the op runs.
void Update(const ncclEpHandle& handle, const Tensor& topk_idx) {
  Contract contract("ncclEpUpdateHandle");
  const ncclEpGroup& group = *handle.group;
  Member& member = *group.member;
  std::memset(handle.mem, 0, handle.bytes);
  Routing* mine = new (handle.mem)
      Routing{kRoutingMagic,   group.id,         0,
              handle.num_topk, handle.alignment, topk_idx.rows};
  CopyChoices(contract, group, topk_idx, reinterpret_cast<int64_t*>(mine + 1));
  Routings routings;
  if (!ExchangeAll(member, StrCat("ncclEpUpdateHandle of group ", group.id),
                   mine, &routings, &mine->update)) {
    return;
  }
  const int64_t total =
      SlotsOf(routings, member.rank(), group.num_local()).size();
  const bool fits = contract.Require(
      total <= group.config.max_recv_tokens_per_rank, "traps, for rank ",
      member.rank(), " receives ", total, " rows");
  member.clique().Exchange(member.rank(), "the end of ncclEpUpdateHandle",
                           nullptr, nullptr);
  // Without a routing, the next op does not write out of bounds.
  if (!fits) mine->magic = 0;
}

bool IsZero(const ncclEpHandle& handle) {
  return std::all_of(handle.mem, handle.mem + handle.bytes,
                     [](std::byte byte) { return byte == std::byte{0}; });
}

// Writes other bytes into a handle's scratch memory each time, and never the
// zeros that it begins with.
void OverwriteScratch(const ncclEpHandle& handle) {
  static std::atomic<int> last{0};
  std::memset(handle.mem + handle.bytes - kScratchBytes, 1 + ++last % 255,
              kScratchBytes);
}

// The parameters that dispatch and combine have in common.
struct Move {
  std::string name;
  bool combines;
  int64_t num_tokens;  // of the op's arguments
  ncclDataType_t type;
  int64_t width;
};

// Runs dispatch or combine on the stream.
void Run(const ncclEpHandle& handle, const Move& move, Transfer transfer) {
  Contract contract(move.name);
  const ncclEpGroup& group = *handle.group;
  Member& member = *group.member;
  const auto* routing = reinterpret_cast<const Routing*>(handle.mem);
  transfer.routing = routing;
  contract.Require(routing->magic == kRoutingMagic || IsZero(handle),
                   "handle_mem has no routing");
  if (contract.kept() && !routing->IsEmpty()) {
    contract.Require(routing->group == group.id &&
                         routing->num_topk == handle.num_topk &&
                         routing->alignment == handle.alignment,
                     "handle opened with other attributes");
    contract.Require(routing->num_tokens == move.num_tokens, "of ",
                     move.num_tokens, " tokens, but the routing has ",
                     routing->num_tokens);
  }
  std::vector<const Transfer*> ranks;
  if (!ExchangeAll(member,
                   StrCat(move.name, " of group ", group.id, ", ", move.width,
                          " elements of type ", move.type),
                   contract.kept() ? &transfer : nullptr, &ranks, nullptr)) {
    return;
  }
  const bool match =
      std::all_of(ranks.begin(), ranks.end(), [&](const Transfer* rank) {
        return rank->routing->IsEmpty() || routing->IsEmpty() ||
               rank->routing->update == routing->update;
      });
  const RowShape shape = {move.width, DTypeOf(move.type), group.num_local()};
  if (!contract.Require(match, "ranks bring routings of different updates")) {
    // All ranks come here, since they compare the same routings.
  } else if (move.combines) {
    Combine(ranks, member.rank(), shape);
  } else {
    Dispatch(ranks, member.rank(), shape);
  }
  member.clique().Exchange(member.rank(), "the end of " + move.name, nullptr,
                           nullptr);
  OverwriteScratch(handle);
}

// The descriptors of dispatch or combine.
struct Sides {
  const ncclEpTensor_t *tokens, *weights;
  const ncclEpTensor_t *slots, *slot_weights;
};

// Checks the descriptors, and enqueues the call.
ncclResult_t EnqueueMove(Contract& contract, const ncclEpHandle& handle,
                         bool combines, ncclEpPassDir_t direction,
                         const Sides& sides, cudaStream_t stream) {
  const ncclEpGroup& group = *handle.group;
  const int64_t num_slots = group.config.max_recv_tokens_per_rank;
  const bool backward = direction == NCCL_EP_BWD_PASS;
  const std::string token_side = combines ? "outputs" : "inputs";
  const std::string slot_side = combines ? "inputs" : "outputs";
  const Tensor tokens =
      OpenRows(contract, token_side + ".tokens", sides.tokens, group);
  const Tensor slots = OpenTensor(contract, slot_side + ".tokens", sides.slots,
                                  2, {tokens.type}, num_slots, tokens.columns);
  Tensor weights, slot_weights;
  if (combines == backward) {
    weights = OpenTensor(contract, token_side + ".topk_weights", sides.weights,
                         2, {ncclFloat32}, tokens.rows, handle.num_topk);
    slot_weights = OpenTensor(contract, slot_side + ".topk_weights",
                              sides.slot_weights, 1, {ncclFloat32}, num_slots);
  } else {
    contract.Require(!sides.weights && !sides.slot_weights, "the ",
                     backward ? "backward" : "forward",
                     " pass forbids topk_weights");
  }
  if (!contract.kept()) return ncclInvalidArgument;
  const Move move = {contract.function() + (backward ? " (backward)" : ""),
                     combines, tokens.rows, tokens.type, tokens.columns};
  Transfer transfer = {nullptr, tokens.data, weights.As<float>(), slots.data,
                       slot_weights.As<float>()};
  if (combines) {
    transfer = {nullptr, slots.data, slot_weights.As<float>(), tokens.data,
                weights.As<float>()};
  }
  return Member::Enqueue(
      group.member, contract, stream,
      [handle, move, transfer] { Run(handle, move, transfer); });
}

}  // namespace

extern "C" {

ncclResult_t ncclEpUpdateHandle(ncclEpHandle_t handle,
                                const ncclEpTensor_t* topk_idx,
                                const ncclEpLayoutInfo_t* layout_info,
                                cudaStream_t stream) {
  Contract contract("ncclEpUpdateHandle");
  RequireHandle(contract, handle, stream);
  contract.Require(!layout_info, "the fake does not support layout_info");
  // NCCL EP takes narrower ones too, but a handle that is opened later on the
  // same memory reads them back as 64 bits wide.
  const Tensor choices =
      OpenTensor(contract, "topk_idx", topk_idx, 2, {ncclInt64});
  if (!contract.kept()) return ncclInvalidArgument;
  const ncclEpGroup& group = *handle->group;
  contract.Require(choices.rows <= group.config.max_dispatch_tokens_per_rank &&
                       choices.columns == handle->num_topk,
                   "topk_idx is [", choices.rows, ", ", choices.columns, "]");
  if (!contract.kept()) return ncclInvalidArgument;
  return Member::Enqueue(group.member, contract, stream,
                         [copy = *handle, choices] { Update(copy, choices); });
}

ncclResult_t ncclEpDispatch(ncclEpHandle_t handle,
                            const ncclEpDispatchInputs_t* inputs,
                            const ncclEpDispatchOutputs_t* outputs,
                            const ncclEpLayoutInfo_t* layout_info,
                            const ncclEpDispatchConfig_t* config,
                            cudaStream_t stream) {
  Contract contract("ncclEpDispatch");
  RequireHandle(contract, handle, stream);
  RequireStruct(contract, "inputs", inputs);
  RequireStruct(contract, "outputs", outputs);
  RequireStruct(contract, "config", config);
  contract.Require(!layout_info, "layout_info is for low latency");
  if (!contract.kept()) return ncclInvalidArgument;
  contract.Require(!config->send_only && !config->round_scales &&
                       config->quant_recipe == NCCL_EP_DISP_QUANT_NONE &&
                       !inputs->scales && !outputs->scales,
                   "the fake supports neither stages nor scales");
  contract.Require(!outputs->topk_idx, "topk_idx has no meaning for slots");
  return EnqueueMove(contract, *handle, /*combines=*/false,
                     config->pass_direction,
                     {inputs->tokens, inputs->topk_weights, outputs->tokens,
                      outputs->topk_weights},
                     stream);
}

ncclResult_t ncclEpCombine(ncclEpHandle_t handle,
                           const ncclEpCombineInputs_t* inputs,
                           const ncclEpCombineOutputs_t* outputs,
                           const ncclEpCombineConfig_t* config,
                           cudaStream_t stream) {
  Contract contract("ncclEpCombine");
  RequireHandle(contract, handle, stream);
  RequireStruct(contract, "inputs", inputs);
  RequireStruct(contract, "outputs", outputs);
  RequireStruct(contract, "config", config);
  if (!contract.kept()) return ncclInvalidArgument;
  contract.Require(!config->send_only &&
                       config->quant_recipe == NCCL_EP_COMB_QUANT_NONE &&
                       !inputs->scales,
                   "the fake supports neither stages nor scales");
  return EnqueueMove(contract, *handle, /*combines=*/true,
                     config->pass_direction,
                     {outputs->tokens, outputs->topk_weights, inputs->tokens,
                      inputs->topk_weights},
                     stream);
}

}  // extern "C"

}  // namespace ep::nccl::fake
