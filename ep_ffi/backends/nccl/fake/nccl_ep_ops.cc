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
#include "ep_ffi/backends/nccl/fake/descriptors.h"
#include "ep_ffi/backends/nccl/fake/fake.h"
#include "ep_ffi/backends/nccl/fake/nccl_ep.h"
#include "ep_ffi/backends/nccl/fake/transfers.h"

namespace ep::nccl::fake {
namespace {

// Opens a descriptor of rows that dispatch and combine accept.
Tensor OpenRows(Contract& contract, const char* name,
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

// An enqueued op owns a copy of its handle, which may be destroyed before the
// op runs.
using HandleCopy = ncclEpHandle;

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

struct Counters {
  Tensor slab_sizes, slab_offsets, total;
};

void Count(const Tensor& tensor, int64_t i, int64_t value) {
  if (!tensor.data) return;
  if (tensor.type == ncclInt32) tensor.As<int32_t>()[i] = value;
  if (tensor.type == ncclInt64) tensor.As<int64_t>()[i] = value;
}

// Runs ncclEpUpdateHandle on the stream.
void Update(const HandleCopy& handle, const Tensor& topk_idx,
            const Counters& counters) {
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
  const Slots slots = SlotsOf(routings, member.rank(), group.num_local());
  const int64_t total = slots.sources.size();
  const bool fits = contract.Require(
      total <= group.config.max_recv_tokens_per_rank, "traps, for rank ",
      member.rank(), " receives ", total, " rows");
  int64_t offset = 0;
  for (size_t j = 0; j < slots.slab_sizes.size(); ++j) {
    Count(counters.slab_sizes, j, slots.slab_sizes[j]);
    Count(counters.slab_offsets, j, offset);
    offset += slots.slab_sizes[j];
  }
  Count(counters.total, 0, total);
  member.clique().Exchange(member.rank(), "the end of ncclEpUpdateHandle",
                           nullptr, nullptr);
  // Without a routing, the next op does not write out of bounds.
  if (!fits) mine->magic = 0;
}

bool IsZero(const HandleCopy& handle) {
  return std::all_of(handle.mem, handle.mem + handle.bytes,
                     [](std::byte byte) { return byte == std::byte{0}; });
}

// Writes other bytes into a handle's scratch memory each time, and never the
// zeros that it begins with.
void OverwriteScratch(const HandleCopy& handle) {
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
void Run(const HandleCopy& handle, const Move& move, Transfer transfer) {
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

}  // namespace

extern "C" {

ncclResult_t ncclEpUpdateHandle(ncclEpHandle_t handle,
                                const ncclEpTensor_t* topk_idx,
                                const ncclEpLayoutInfo_t* layout_info,
                                cudaStream_t stream) {
  Contract contract("ncclEpUpdateHandle");
  RequireHandle(contract, handle, stream);
  // NCCL EP takes narrower ones too, but a handle that is opened later on the
  // same memory reads them back as 64 bits wide.
  const Tensor choices =
      OpenTensor(contract, "topk_idx", topk_idx, 2, {ncclInt64});
  if (!contract.kept()) return ncclInvalidArgument;
  const ncclEpGroup& group = *handle->group;
  contract.Require(choices.rows <= group.config.max_dispatch_tokens_per_rank &&
                       choices.columns == handle->num_topk,
                   "topk_idx is [", choices.rows, ", ", choices.columns, "]");
  Counters counters;
  if (layout_info && RequireStruct(contract, "layout_info", layout_info)) {
    contract.Require(!layout_info->src_rank_counters,
                     "src_rank_counters are for low latency");
    std::set<ncclDataType_t> types;
    const auto open = [&](const char* name, const ncclEpTensor_t* given,
                          int64_t size, Tensor* out) {
      if (!given) return;
      *out = OpenTensor(contract, name, given, 1, {ncclInt32, ncclInt64}, size);
      types.insert(out->type);
    };
    open("expert_counters", layout_info->expert_counters, group.num_local(),
         &counters.slab_sizes);
    open("expert_offsets", layout_info->expert_offsets, group.num_local(),
         &counters.slab_offsets);
    open("recv_total_counter", layout_info->recv_total_counter, 1,
         &counters.total);
    contract.Require(types.size() <= 1, "counters are of several types");
  }
  if (!contract.kept()) return ncclInvalidArgument;
  return Member::Enqueue(
      group.member, contract, stream,
      [copy = *handle, choices, counters] { Update(copy, choices, counters); });
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
  if (config) RequireStruct(contract, "config", config);
  contract.Require(!layout_info, "layout_info is for low latency");
  if (!contract.kept()) return ncclInvalidArgument;
  const ncclEpGroup& group = *handle->group;
  if (config) {
    contract.Require(!config->send_only && !config->round_scales &&
                         config->quant_recipe == NCCL_EP_DISP_QUANT_NONE,
                     "the fake supports neither stages nor quantization");
  }
  contract.Require(!inputs->scales && !outputs->scales, "scales of no recipe");
  contract.Require(!outputs->topk_idx, "topk_idx has no meaning for slots");

  const int64_t num_slots = group.config.max_recv_tokens_per_rank;
  const Tensor tokens =
      OpenRows(contract, "inputs.tokens", inputs->tokens, group);
  const Tensor slots = OpenTensor(contract, "outputs.tokens", outputs->tokens,
                                  2, {tokens.type}, num_slots, tokens.columns);
  const bool backward = config && config->pass_direction == NCCL_EP_BWD_PASS;
  Tensor weights, slot_weights;
  if (backward) {
    contract.Require(!inputs->topk_weights && !outputs->topk_weights,
                     "the backward pass forbids topk_weights");
  } else {
    weights = OpenTensor(contract, "inputs.topk_weights", inputs->topk_weights,
                         2, {ncclFloat32}, tokens.rows, handle->num_topk);
    slot_weights =
        OpenTensor(contract, "outputs.topk_weights", outputs->topk_weights, 1,
                   {ncclFloat32}, num_slots);
  }
  if (!contract.kept()) return ncclInvalidArgument;
  const Move move = {backward ? "ncclEpDispatch (backward)" : "ncclEpDispatch",
                     /*combines=*/false, tokens.rows, tokens.type,
                     tokens.columns};
  const Transfer transfer = {nullptr, tokens.data, weights.As<float>(),
                             slots.data, slot_weights.As<float>()};
  return Member::Enqueue(
      group.member, contract, stream,
      [copy = *handle, move, transfer] { Run(copy, move, transfer); });
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
  if (config) RequireStruct(contract, "config", config);
  if (!contract.kept()) return ncclInvalidArgument;
  const ncclEpGroup& group = *handle->group;
  if (config) {
    contract.Require(
        !config->send_only && config->quant_recipe == NCCL_EP_COMB_QUANT_NONE,
        "the fake supports neither stages nor quantization");
  }
  contract.Require(!inputs->scales, "scales of no recipe");

  const int64_t num_slots = group.config.max_recv_tokens_per_rank;
  const Tensor tokens =
      OpenRows(contract, "outputs.tokens", outputs->tokens, group);
  const Tensor slots = OpenTensor(contract, "inputs.tokens", inputs->tokens, 2,
                                  {tokens.type}, num_slots, tokens.columns);
  const bool backward = config && config->pass_direction == NCCL_EP_BWD_PASS;
  Tensor weights, slot_weights;
  if (backward) {
    slot_weights =
        OpenTensor(contract, "inputs.topk_weights", inputs->topk_weights, 1,
                   {ncclFloat32}, num_slots);
    weights =
        OpenTensor(contract, "outputs.topk_weights", outputs->topk_weights, 2,
                   {ncclFloat32}, tokens.rows, handle->num_topk);
  } else {
    contract.Require(!inputs->topk_weights && !outputs->topk_weights,
                     "the forward pass forbids topk_weights");
  }
  if (!contract.kept()) return ncclInvalidArgument;
  const Move move = {backward ? "ncclEpCombine (backward)" : "ncclEpCombine",
                     /*combines=*/true, tokens.rows, tokens.type,
                     tokens.columns};
  const Transfer transfer = {nullptr, slots.data, slot_weights.As<float>(),
                             tokens.data, weights.As<float>()};
  return Member::Enqueue(
      group.member, contract, stream,
      [copy = *handle, move, transfer] { Run(copy, move, transfer); });
}

}  // extern "C"

}  // namespace ep::nccl::fake
