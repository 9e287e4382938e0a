// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/testing/oracle.h"

#include <algorithm>

#include "ep_ffi/core/status.h"
#include "ep_ffi/testing/formats.h"

namespace ep::testing {
namespace {

RankData ScatterTo(int64_t rank, const PlanDims& dims, const Layout& layout,
                   const RowType& type, const std::vector<RankData>& inputs,
                   bool weighted) {
  RankData out;
  out.rows.resize(dims.capacity * type.bytes());
  if (weighted) out.weights.resize(dims.capacity);
  for (int64_t c = 0; c < dims.capacity; ++c) {
    const Route from = layout.recv[rank][c];
    if (from.rank < 0) continue;
    const RankData& source = inputs[from.rank];
    const auto row =
        source.rows.begin() + from.index / dims.top_k * type.bytes();
    std::copy(row, row + type.bytes(), out.rows.begin() + c * type.bytes());
    if (weighted) out.weights[c] = source.weights[from.index];
  }
  return out;
}

// Sums slots into the token rows of `rank`. With `scale`, multiplies each slot
// by its weight. Otherwise also gathers the weights, if any.
RankData GatherTo(int64_t rank, const PlanDims& dims, const Layout& layout,
                  const RowType& type, const std::vector<RankData>& inputs,
                  bool scale) {
  const bool weighted = !inputs[0].weights.empty();
  RankData out;
  out.rows.resize(dims.num_tokens * type.bytes());
  if (weighted && !scale) out.weights.resize(dims.num_choices());
  for (int64_t t = 0; t < dims.num_tokens; ++t) {
    std::vector<float> sums(type.width, 0.0f);
    for (int64_t i = t * dims.top_k; i < (t + 1) * dims.top_k; ++i) {
      const Route from = layout.send[rank][i];
      if (from.rank < 0) continue;
      const RankData& source = inputs[from.rank];
      const float weight = weighted ? source.weights[from.index] : 1;
      if (weighted && !scale) out.weights[i] = weight;
      for (int64_t h = 0; h < type.width; ++h) {
        const float x =
            Load(type.dtype, source.rows.data(), from.index * type.width + h);
        const float product = scale ? weight * x : x;
        sums[h] = sums[h] + product;
      }
    }
    for (int64_t h = 0; h < type.width; ++h) {
      Store(type.dtype, sums[h], out.rows.data(), t * type.width + h);
    }
  }
  return out;
}

// Describes the first difference of one array.
std::string ArrayDifference(const char* what, DType dtype, int64_t width,
                            const std::byte* expected, const std::byte* actual,
                            int64_t bytes) {
  const std::byte* const end = expected + bytes;
  const std::byte* const differs = std::mismatch(expected, end, actual).first;
  if (differs == end) return "";
  const int64_t i = (differs - expected) / ByteWidth(dtype);
  return StrCat(what, " differ at [", i / width, ", ", i % width,
                "]: expected ", Load(dtype, expected, i), ", got ",
                Load(dtype, actual, i));
}

}  // namespace

bool IsScatter(Op op) { return op == Op::kDispatch || op == Op::kCombineBwd; }

bool Layout::Overflows(const PlanDims& dims) const {
  return max_recv_tokens > dims.capacity;
}

Layout LayOut(const PlanDims& dims, const Choices& topk_idx) {
  const int64_t num_ranks = dims.ep_size;
  const int64_t num_local = dims.num_local_experts();
  Layout layout;
  layout.send.assign(num_ranks,
                     std::vector<Route>(dims.num_choices(), kNoRoute));
  layout.kept.assign(num_ranks, std::vector<uint8_t>(dims.num_choices(), 0));
  for (int32_t dest = 0; dest < num_ranks; ++dest) {
    std::vector<Route> recv(dims.capacity, kNoRoute);
    std::vector<int32_t> group_sizes, token_counts, dropped_counts;
    int32_t slot = 0;
    for (int64_t j = 0; j < num_local; ++j) {
      const int32_t begin = slot;
      int32_t kept = 0, dropped = 0;
      for (int32_t source = 0; source < num_ranks; ++source) {
        for (int32_t i = 0; i < dims.num_choices(); ++i) {
          if (topk_idx[source][i] != dest * num_local + j) continue;
          if (slot < dims.capacity) {
            layout.send[source][i] = {dest, slot};
            layout.kept[source][i] = 1;
            recv[slot] = {source, i};
            ++kept;
          } else {
            ++dropped;
          }
          ++slot;
        }
      }
      while (slot % dims.alignment != 0) ++slot;
      const int32_t capacity = dims.capacity;
      group_sizes.push_back(std::min(slot, capacity) -
                            std::min(begin, capacity));
      token_counts.push_back(kept);
      dropped_counts.push_back(dropped);
    }
    layout.recv.push_back(recv);
    layout.group_sizes.push_back(group_sizes);
    layout.token_counts.push_back(token_counts);
    layout.total_recv_tokens.push_back(slot);
    layout.dropped_counts.push_back(dropped_counts);
    layout.max_recv_tokens = std::max(layout.max_recv_tokens, slot);
  }
  return layout;
}

RankData ApplyOn(int64_t rank, Op op, const PlanDims& dims,
                 const Layout& layout, const RowType& type,
                 const std::vector<RankData>& inputs) {
  return IsScatter(op) ? ScatterTo(rank, dims, layout, type, inputs,
                                   /*weighted=*/op == Op::kDispatch)
                       : GatherTo(rank, dims, layout, type, inputs,
                                  /*scale=*/op == Op::kCombine);
}

std::vector<RankData> Apply(Op op, const PlanDims& dims, const Layout& layout,
                            const RowType& type,
                            const std::vector<RankData>& inputs) {
  std::vector<RankData> outputs;
  for (int64_t rank = 0; rank < dims.ep_size; ++rank) {
    outputs.push_back(ApplyOn(rank, op, dims, layout, type, inputs));
  }
  return outputs;
}

std::string Difference(const RowType& type, const RankData& expected,
                       const RankData& actual) {
  if (expected.rows.size() != actual.rows.size() ||
      expected.weights.size() != actual.weights.size()) {
    return StrCat("sizes differ: expected ", expected.rows.size(),
                  " bytes of rows and ", expected.weights.size(),
                  " weights, got ", actual.rows.size(), " and ",
                  actual.weights.size());
  }
  const std::string rows =
      ArrayDifference("rows", type.dtype, type.width, expected.rows.data(),
                      actual.rows.data(), expected.rows.size());
  if (!rows.empty()) return rows;
  return ArrayDifference(
      "weights", DType::kFloat32, 1,
      reinterpret_cast<const std::byte*>(expected.weights.data()),
      reinterpret_cast<const std::byte*>(actual.weights.data()),
      expected.weights.size() * sizeof(float));
}

}  // namespace ep::testing
