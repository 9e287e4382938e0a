// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/movers/movers.h"

#include <algorithm>
#include <cstring>

#include "ep_ffi/backends/host/movers/row_math.h"
#include "ep_ffi/core/pages.h"

namespace ep::host {
namespace {

// Large enough to hide the cost of scheduling a chunk. Small enough to divide a
// small exchange among a few threads.
constexpr int64_t kChunkBytes = 256 << 10;

int64_t RowsPerChunk(int64_t bytes_per_row) {
  return std::max<int64_t>(1,
                           kChunkBytes / std::max<int64_t>(1, bytes_per_row));
}

int64_t NumChunks(int64_t rows, int64_t bytes_per_row) {
  const int64_t per_chunk = RowsPerChunk(bytes_per_row);
  return (rows + per_chunk - 1) / per_chunk;
}

Status CorruptRoute(const Route& route) {
  return Status(
      Code::kInvalidArgument,
      StrCat("handle.mem points to row ", route.index, " of rank ", route.rank,
             ", which does not exist; pass the handle that "
             "ep_prepare returned, unchanged"));
}

bool IsValid(const Route& route, int64_t ranks, int64_t rows) {
  return route.rank >= 0 && route.rank < ranks && route.index >= 0 &&
         route.index < rows;
}

}  // namespace

int64_t Scatter::num_chunks() const {
  return NumChunks(plan.num_slots(), args.slots.row_bytes()) +
         (tail != Tail::kUnspecified);
}

Status Scatter::RunChunk(const std::vector<RankRows>& ranks,
                         int64_t chunk) const {
  const int64_t row_bytes = args.slots.row_bytes();
  const int64_t per_chunk = RowsPerChunk(row_bytes);
  const int64_t begin = chunk * per_chunk;
  if (begin >= plan.num_slots()) {
    FillTail();
    return Status();
  }
  const int64_t end = std::min(begin + per_chunk, plan.num_slots());
  for (int64_t slot = begin; slot < end; ++slot) {
    const Route route = plan.recv()[slot];
    std::byte* out = args.slots.data + slot * row_bytes;
    if (route.rank == kNoRoute.rank) {  // a row that pads a slab
      std::memset(out, 0, row_bytes);
      if (args.slot_weights) args.slot_weights[slot] = 0;
      continue;
    }
    if (!IsValid(route, ranks.size(), dims.num_choices())) {
      return CorruptRoute(route);
    }
    const RankRows& source = ranks[route.rank];
    std::memcpy(out, source.rows + route.index / dims.top_k * row_bytes,
                row_bytes);
    if (args.slot_weights) {
      args.slot_weights[slot] = source.weights[route.index];
    }
  }
  return Status();
}

void Scatter::FillTail() const {
  const auto fill = [&](void* array, int64_t row_bytes) {
    std::byte* begin =
        static_cast<std::byte*>(array) + plan.num_slots() * row_bytes;
    const int64_t bytes = (dims.capacity - plan.num_slots()) * row_bytes;
    if (tail == Tail::kZero) return WriteZeros(begin, bytes);
    std::memset(begin, 0xff, bytes);  // NaN in every float type
  };
  fill(args.slots.data, args.slots.row_bytes());
  if (args.slot_weights) fill(args.slot_weights, sizeof(float));
}

int64_t GatherSum::num_chunks() const {
  return NumChunks(dims.num_tokens, args.tokens.row_bytes() * dims.top_k);
}

Status GatherSum::RunChunk(const std::vector<RankRows>& ranks,
                           int64_t chunk) const {
  const int64_t row_bytes = args.tokens.row_bytes();
  const int64_t per_chunk = RowsPerChunk(row_bytes * dims.top_k);
  const int64_t begin = chunk * per_chunk;
  const int64_t end = std::min(begin + per_chunk, dims.num_tokens);
  std::vector<Term> terms;
  terms.reserve(dims.top_k);
  for (int64_t token = begin; token < end; ++token) {
    terms.clear();
    for (int64_t k = 0; k < dims.top_k; ++k) {
      const int64_t choice = token * dims.top_k + k;
      const Route route = plan.send()[choice];
      const bool kept = route.rank != kNoRoute.rank;
      if (kept && !IsValid(route, ranks.size(), dims.capacity)) {
        return CorruptRoute(route);
      }
      const RankRows& source = ranks[kept ? route.rank : 0];
      if (args.topk_weights) {
        args.topk_weights[choice] = kept ? source.weights[route.index] : 0;
      }
      if (!kept) continue;
      const bool scale = source.weights && !args.topk_weights;
      terms.push_back({source.rows + route.index * row_bytes,
                       scale ? source.weights[route.index] : 1.0f});
    }
    SumRows(args.tokens.dtype, terms, args.tokens.width,
            args.tokens.data + token * row_bytes);
    if (!must_be_finite) continue;
    Status finite = CheckFinite(ranks, token);
    if (!finite.ok()) return finite;
  }
  return Status();
}

Status GatherSum::CheckFinite(const std::vector<RankRows>& ranks,
                              int64_t token) const {
  const int64_t row_bytes = args.tokens.row_bytes();
  const DType dtype = args.tokens.dtype;
  const int64_t column = FindNotFinite(
      dtype, args.tokens.data + token * row_bytes, args.tokens.width);
  if (column < 0) return Status();
  std::string why = "though all that it sums is";
  for (int64_t k = 0; k < dims.top_k; ++k) {
    const Route route = plan.send()[token * dims.top_k + k];
    if (route.rank == kNoRoute.rank) continue;
    const RankRows& source = ranks[route.rank];
    if (FindNotFinite(dtype, source.rows + route.index * row_bytes,
                      args.tokens.width) >= 0) {
      why = StrCat("nor is expert_out[", route.index, "] of rank ", route.rank,
                   ", of topk_idx[", token, ", ", k, "]");
      break;
    }
  }
  return Status(Code::kInvalidArgument,
                StrCat("out[", token, ", ", column, "] of rank ", plan.rank(),
                       " is not finite, ", why));
}

}  // namespace ep::host
