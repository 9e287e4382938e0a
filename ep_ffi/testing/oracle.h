// SPDX-License-Identifier: Apache-2.0

// The numeric contract in plain loops: what each of the five ops must give on
// every rank of an EP domain. It shares no code with what it judges.

#ifndef EP_FFI_TESTING_ORACLE_H_
#define EP_FFI_TESTING_ORACLE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/plan.h"

namespace ep::testing {

// The choices of every rank: [P][T * K] expert ids, -1 for unused.
using Choices = std::vector<std::vector<int64_t>>;

// Where everything goes. The outer vectors are indexed by rank.
struct Layout {
  std::vector<std::vector<Route>> send;  // [P][T * K]
  std::vector<std::vector<Route>> recv;  // [P][C]
  std::vector<std::vector<int32_t>> group_sizes;
  std::vector<std::vector<int32_t>> token_counts;
  std::vector<int32_t> total_recv_tokens;

  bool Overflows(const PlanDims& dims) const;
};

Layout LayOut(const PlanDims& dims, const Choices& topk_idx);

// What a rank gives to an op or gets from it: a dense [n, H] matrix, and the
// weights that belong to it ([T, K] of tokens, [C] of slots) if any.
struct RankData {
  std::vector<std::byte> rows;
  std::vector<float> weights;
};

// The rows of one exchange.
struct RowType {
  int64_t width;
  DType dtype;

  int64_t bytes() const { return width * ByteWidth(dtype); }
};

// The outputs of an op other than ep_prepare, on every rank. With tail rows
// zero.
std::vector<RankData> Apply(Op op, const PlanDims& dims, const Layout& layout,
                            const RowType& type,
                            const std::vector<RankData>& inputs);

// By how much each element of an op's rows may differ where sums round more
// often, or in another order: `roundings` times the format's unit roundoff of
// the sum of the sizes of its terms.
std::vector<std::vector<double>> RoundingSlack(
    Op op, const PlanDims& dims, const Layout& layout, const RowType& type,
    const std::vector<RankData>& inputs, double roundings);

// Empty if the two are equal to the bit; else where they first differ. With
// slack, elements of the rows may differ by so much.
std::string Difference(const RowType& type, const RankData& expected,
                       const RankData& actual,
                       const std::vector<double>& slack = {});

}  // namespace ep::testing

#endif  // EP_FFI_TESTING_ORACLE_H_
