// SPDX-License-Identifier: Apache-2.0

// The collectives of the fake NCCL EP. Each collective checks its arguments
// when it is called, and computes its result in the stream.

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
#include "ep_ffi/core/plan.h"
#include "ep_ffi/testing/oracle.h"

namespace ep::nccl::fake {
namespace {

using testing::IsScatter;

// Reads a descriptor of rows, as dispatch and combine require it.
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

// Copies a rank's choices to the handle's memory, with -1 for invalid choices.
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

using Routings = std::vector<const Routing*>;

// Returns the layout of the ranks' routings. The routing of `rank` must not be
// empty. Adds the sizes of the routing to `dims`, the sizes of the group.
testing::Layout LayOut(const Routings& routings, int32_t rank, PlanDims* dims) {
  dims->num_tokens = routings[rank]->num_tokens;
  dims->top_k = routings[rank]->num_topk;
  dims->alignment = routings[rank]->alignment;
  testing::Choices choices;
  for (const Routing* routing : routings) {
    const int64_t* begin = routing->choices();
    choices.emplace_back(begin, begin + routing->num_choices());
    choices.back().resize(dims->num_choices(), -1);
  }
  return testing::LayOut(*dims, choices);
}

// The inputs and outputs of one rank. Dispatch reads token rows and writes
// slots; combine reads slots and writes token rows. Weights may be null.
struct Transfer {
  const Routing* routing;
  const std::byte* rows;
  const float* weights;
  std::byte* out_rows;
  float* out_weights;
};

// Writes the outputs of `rank`, except the rows past the used slots. Rounds
// each sum once, unlike NCCL EP.
void Run(Op op, const std::vector<const Transfer*>& ranks, int32_t rank,
         PlanDims dims, const testing::RowType& type) {
  const Transfer& mine = *ranks[rank];
  if (mine.routing->IsEmpty()) return;
  Routings routings;
  for (const Transfer* transfer : ranks) routings.push_back(transfer->routing);
  const testing::Layout layout = LayOut(routings, rank, &dims);
  std::vector<testing::RankData> inputs(ranks.size());
  for (size_t r = 0; r < ranks.size(); ++r) {
    const Transfer& theirs = *ranks[r];
    const int64_t slots = layout.total_recv_tokens[r];
    const int64_t rows = IsScatter(op) ? dims.num_tokens : slots;
    const int64_t weights = IsScatter(op) ? dims.num_choices() : slots;
    inputs[r].rows.resize(rows * type.bytes());
    if (mine.out_weights) inputs[r].weights.resize(weights);
    if (theirs.routing->IsEmpty()) continue;
    std::copy_n(theirs.rows, rows * type.bytes(), inputs[r].rows.begin());
    if (!mine.out_weights) continue;
    std::copy_n(theirs.weights, weights, inputs[r].weights.begin());
  }
  testing::RankData outputs =
      testing::ApplyOn(rank, op, dims, layout, type, inputs);
  const int64_t slots = layout.total_recv_tokens[rank];
  const int64_t rows = IsScatter(op) ? slots : dims.num_tokens;
  const int64_t weights = IsScatter(op) ? slots : dims.num_choices();
  std::copy_n(outputs.rows.begin(), rows * type.bytes(), mine.out_rows);
  if (!mine.out_weights) return;
  outputs.weights.resize(weights);  // empty if no rank has slots
  std::copy_n(outputs.weights.begin(), weights, mine.out_weights);
}

// Runs ncclEpUpdateHandle on the stream. Copies the handle, because the caller
// may destroy the handle before the stream runs the op.
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
  PlanDims dims = group.dims();
  const int64_t total =
      LayOut(routings, member.rank(), &dims).total_recv_tokens[member.rank()];
  const bool fits = contract.Require(
      total <= group.config.max_recv_tokens_per_rank, "traps, for rank ",
      member.rank(), " receives ", total, " rows");
  member.clique().Exchange(member.rank(), "the end of ncclEpUpdateHandle",
                           nullptr, nullptr);
  // Invalidate the routing, so that the next op does not write out of bounds.
  if (!fits) mine->magic = 0;
}

bool IsZero(const ncclEpHandle& handle) {
  return std::all_of(handle.mem, handle.mem + handle.bytes,
                     [](std::byte byte) { return byte == std::byte{0}; });
}

// Writes nonzero bytes, different at each call, to a handle's scratch memory.
void OverwriteScratch(const ncclEpHandle& handle) {
  static std::atomic<int> last{0};
  std::memset(handle.mem + handle.bytes - kScratchBytes, 1 + ++last % 255,
              kScratchBytes);
}

// The parameters that dispatch and combine have in common.
struct Move {
  Op op;
  std::string name;
  int64_t num_tokens;  // token rows in the op's arguments
  testing::RowType type;
};

// Runs dispatch or combine on the stream.
void RunMove(const ncclEpHandle& handle, const Move& move, Transfer transfer) {
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
  if (!ExchangeAll(
          member,
          StrCat(move.name, " of group ", group.id, ", ", move.type.width,
                 " elements of type ", static_cast<int>(move.type.dtype)),
          contract.kept() ? &transfer : nullptr, &ranks, nullptr)) {
    return;
  }
  const bool match =
      std::all_of(ranks.begin(), ranks.end(), [&](const Transfer* rank) {
        return rank->routing->IsEmpty() || routing->IsEmpty() ||
               rank->routing->update == routing->update;
      });
  // All ranks get the same result, because they compare the same routings.
  if (contract.Require(match, "ranks bring routings of different updates")) {
    Run(move.op, ranks, member.rank(), group.dims(), move.type);
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

ncclResult_t EnqueueMove(Contract& contract, const ncclEpHandle& handle, Op op,
                         const Sides& sides, cudaStream_t stream) {
  const ncclEpGroup& group = *handle.group;
  const int64_t num_slots = group.config.max_recv_tokens_per_rank;
  const bool combines = !IsScatter(op);
  const bool backward = op == Op::kDispatchBwd || op == Op::kCombineBwd;
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
  const Move move = {op,
                     contract.function() + (backward ? " (backward)" : ""),
                     tokens.rows,
                     {tokens.columns, DTypeOf(tokens.type)}};
  Transfer transfer = {nullptr, tokens.data, weights.As<float>(), slots.data,
                       slot_weights.As<float>()};
  if (combines) {
    transfer = {nullptr, slots.data, slot_weights.As<float>(), tokens.data,
                weights.As<float>()};
  }
  return Member::Enqueue(
      group.member, contract, stream,
      [handle, move, transfer] { RunMove(handle, move, transfer); });
}

}  // namespace

extern "C" {

ncclResult_t ncclEpUpdateHandle(ncclEpHandle_t handle,
                                const ncclEpTensor_t* topk_idx,
                                const ncclEpLayoutInfo_t*,
                                cudaStream_t stream) {
  Contract contract("ncclEpUpdateHandle");
  RequireHandle(contract, handle, stream);
  // NCCL EP accepts narrower choices, but a handle that the caller opens later
  // on the same memory reads them as 64 bits wide.
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
                            const ncclEpLayoutInfo_t*,
                            const ncclEpDispatchConfig_t* config,
                            cudaStream_t stream) {
  Contract contract("ncclEpDispatch");
  RequireHandle(contract, handle, stream);
  RequireStruct(contract, "inputs", inputs);
  RequireStruct(contract, "outputs", outputs);
  RequireStruct(contract, "config", config);
  if (!contract.kept()) return ncclInvalidArgument;
  const bool backward = config->pass_direction == NCCL_EP_BWD_PASS;
  return EnqueueMove(contract, *handle,
                     backward ? Op::kCombineBwd : Op::kDispatch,
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
  const bool backward = config->pass_direction == NCCL_EP_BWD_PASS;
  return EnqueueMove(contract, *handle,
                     backward ? Op::kDispatchBwd : Op::kCombine,
                     {outputs->tokens, outputs->topk_weights, inputs->tokens,
                      inputs->topk_weights},
                     stream);
}

}  // extern "C"

}  // namespace ep::nccl::fake
