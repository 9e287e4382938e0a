// SPDX-License-Identifier: Apache-2.0

// Builds the plans of ep_prepare for tests, without a group.

#ifndef EP_FFI_TESTING_PLANS_H_
#define EP_FFI_TESTING_PLANS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ep_ffi/core/plan.h"
#include "ep_ffi/core/status.h"
#include "ep_ffi/testing/oracle.h"

namespace ep::testing {

// Returns the sorted choices that each rank sends. All choices must be valid.
inline std::vector<SortedChoices> SortAll(const PlanDims& dims,
                                          const Choices& topk_idx) {
  std::vector<SortedChoices> sorted(topk_idx.size());
  for (size_t rank = 0; rank < topk_idx.size(); ++rank) {
    (void)SortChoices(dims, topk_idx[rank].data(), &sorted[rank]);
  }
  return sorted;
}

// The outputs of ep_prepare on a rank, of exactly the required sizes. They are
// initialized with values that no test expects.
struct BuiltPlan {
  BuiltPlan(const PlanDims& dims, int64_t rank,
            const std::vector<SortedChoices>& sorted, int64_t domain = 0)
      : mem(PlanBytes(dims), std::byte{0xa5}),
        group_sizes(dims.num_local_experts(), -7),
        token_counts(dims.num_local_experts(), -7),
        dropped_counts(dims.num_local_experts(), -7),
        kept(dims.num_choices(), 7) {
    std::vector<ChoicesView> views;
    for (const SortedChoices& s : sorted) {
      views.push_back({s.starts.data(), s.order.data()});
    }
    status = BuildPlan(dims, domain, rank, views,
                       {mem.data(), group_sizes.data(), token_counts.data(),
                        &total_recv_tokens, dropped_counts.data(),
                        &max_recv_tokens, kept.data()});
  }

  std::vector<std::byte> mem;
  std::vector<int32_t> group_sizes, token_counts, dropped_counts;
  int32_t total_recv_tokens = -7, max_recv_tokens = -7;
  std::vector<uint8_t> kept;
  Status status;
};

}  // namespace ep::testing

#endif  // EP_FFI_TESTING_PLANS_H_
