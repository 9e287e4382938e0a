// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/testing/oracle.h"

#include <algorithm>

#include "ep_ffi/testing/formats.h"
#include "ep_ffi/testing/plans.h"

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

Layout LayOut(PlanDims dims, const Choices& topk_idx) {
  dims.drop = true;
  const std::vector<SortedChoices> sorted = SortAll(dims, topk_idx);
  Layout layout;
  for (int64_t rank = 0; rank < dims.ep_size; ++rank) {
    const BuiltPlan built(dims, rank, sorted);
    Plan plan;
    (void)Plan::Open(dims, rank, built.mem.data(), built.mem.size(), &plan);
    layout.send.emplace_back(plan.send(), plan.send() + dims.num_choices());
    layout.recv.emplace_back(plan.recv(), plan.recv() + dims.capacity);
    layout.group_sizes.push_back(built.group_sizes);
    layout.token_counts.push_back(built.token_counts);
    layout.total_recv_tokens.push_back(built.total_recv_tokens);
    layout.dropped_counts.push_back(built.dropped_counts);
    layout.max_recv_tokens = built.max_recv_tokens;
    layout.kept.push_back(built.kept);
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
