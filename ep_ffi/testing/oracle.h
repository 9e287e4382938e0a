// SPDX-License-Identifier: Apache-2.0

// The numeric contract in plain loops: the outputs of each op on every rank of
// an EP domain. The routing is the plan of core/plan.h, which plan_test and,
// with the oracle in Python, tests/ops/rules_test.py compare with the contract.

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

// The routing of a domain: the slot of each choice, and the choice of each
// slot. The outer vectors are indexed by rank.
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

// Returns the routing with drops, whatever `dims.drop` is. All choices must be
// valid.
Layout LayOut(PlanDims dims, const Choices& topk_idx);

// An input or output of an op on one rank: a dense [n, H] matrix, and optional
// weights, [T, K] for tokens or [C] for slots.
struct RankData {
  std::vector<std::byte> rows;
  std::vector<float> weights;
};

inline constexpr Op kMoves[] = {Op::kDispatch, Op::kCombine, Op::kDispatchBwd,
                                Op::kCombineBwd};
inline constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16,
                                    DType::kFloat16};

// Returns whether an op copies tokens to slots. The other ops sum slots.
bool IsScatter(Op op);

struct RowType {
  int64_t width;
  DType dtype;

  int64_t bytes() const { return width * ByteWidth(dtype); }
};

// Return the outputs of an op other than ep_prepare, on one rank (ApplyOn) or
// on every rank (Apply). The rows past the used slots are zero.
RankData ApplyOn(int64_t rank, Op op, const PlanDims& dims,
                 const Layout& layout, const RowType& type,
                 const std::vector<RankData>& inputs);
std::vector<RankData> Apply(Op op, const PlanDims& dims, const Layout& layout,
                            const RowType& type,
                            const std::vector<RankData>& inputs);

// Describes the first difference, or returns "" if the data are bitwise equal.
std::string Difference(const RowType& type, const RankData& expected,
                       const RankData& actual);

}  // namespace ep::testing

#endif  // EP_FFI_TESTING_ORACLE_H_
