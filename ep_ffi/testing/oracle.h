// SPDX-License-Identifier: Apache-2.0

// The numeric contract in plain loops: the outputs of each op on every rank of
// an EP domain. It shares no code with the backends that are compared with it.

#ifndef EP_FFI_TESTING_ORACLE_H_
#define EP_FFI_TESTING_ORACLE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/plan.h"

namespace ep::testing {

// The choices of every rank: [P][T * K] expert ids, -1 where unused.
using Choices = std::vector<std::vector<int64_t>>;

// The routing of a domain: where each choice goes, and where each slot's token
// comes from. The outer vectors are indexed by rank.
struct Layout {
  std::vector<std::vector<Route>> send;  // [P][T * K]
  std::vector<std::vector<Route>> recv;  // [P][C]
  std::vector<std::vector<int32_t>> group_sizes;
  std::vector<std::vector<int32_t>> token_counts;
  std::vector<int32_t> total_recv_tokens;
  std::vector<std::vector<int32_t>> dropped_counts;
  int32_t max_recv_tokens = 0;
  std::vector<std::vector<uint8_t>> kept;  // [P][T * K]

  bool Overflows(const PlanDims& dims) const;
};

Layout LayOut(const PlanDims& dims, const Choices& topk_idx);

// An input or an output of an op on one rank: a dense [n, H] matrix, and its
// weights ([T, K] of tokens, [C] of slots) if there are any.
struct RankData {
  std::vector<std::byte> rows;
  std::vector<float> weights;
};

// The type of a row.
struct RowType {
  int64_t width;
  DType dtype;

  int64_t bytes() const { return width * ByteWidth(dtype); }
};

// Returns the outputs of an op other than ep_prepare, on every rank. The rows
// of the tail are zero.
std::vector<RankData> Apply(Op op, const PlanDims& dims, const Layout& layout,
                            const RowType& type,
                            const std::vector<RankData>& inputs);

// Returns by how much each element of an op's rows may differ if sums round
// more often, or in another order: the sum of the sizes of its terms, times the
// format's unit roundoff, times `roundings`.
std::vector<std::vector<double>> RoundingSlack(
    Op op, const PlanDims& dims, const Layout& layout, const RowType& type,
    const std::vector<RankData>& inputs, double roundings);

// Tells where the two first differ; empty if they are equal bit for bit. With
// `slack`, each element of the rows may differ by that much.
std::string Difference(const RowType& type, const RankData& expected,
                       const RankData& actual,
                       const std::vector<double>& slack = {});

}  // namespace ep::testing

#endif  // EP_FFI_TESTING_ORACLE_H_
