// SPDX-License-Identifier: Apache-2.0

// A C++ program of another module includes each public header and links only the
// functions of these headers.

#include <cstddef>
#include <cstdint>
#include <iostream>
#include <vector>

#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/plan.h"
#include "ep_ffi/core/status.h"
#include "ep_ffi/core/str_cat.h"

namespace {

// Plans an exchange of one rank with itself: two tokens and two experts. The first
// token has chosen the second expert, and vice versa.
ep::Status Run() {
  const ep::PlanDims dims = {/*num_experts=*/2, /*ep_size=*/1,
                             /*num_tokens=*/2,  /*top_k=*/1,
                             /*capacity=*/2,    /*alignment=*/1,
                             /*drop=*/false};
  const int32_t topk_idx[] = {1, 0};
  ep::SortedChoices sorted;
  EP_RETURN_IF_ERROR(ep::SortChoices(dims, topk_idx, &sorted));

  std::vector<std::byte> mem(ep::PlanBytes(dims));
  int32_t group_sizes[2], token_counts[2], dropped[2], total[1], max_total[1];
  uint8_t kept[2];
  EP_RETURN_IF_ERROR(
      ep::BuildPlan(dims, /*domain=*/0, /*rank=*/0,
                    {{sorted.starts.data(), sorted.order.data()}},
                    {mem.data(), group_sizes, token_counts, total, dropped,
                     max_total, kept}));

  ep::Plan plan;
  EP_RETURN_IF_ERROR(
      ep::Plan::Open(dims, /*rank=*/0, mem.data(), mem.size(), &plan));
  for (int32_t slot = 0; slot < 2; ++slot) {
    const int32_t choice = plan.recv()[slot].index;
    if (topk_idx[choice] != slot) {
      return ep::Status(
          ep::Code::kInternal,
          ep::StrCat(ep::OpName(ep::Op::kPrepare), " has put choice ", choice,
                     " into the slot ", slot, " of another expert"));
    }
  }
  return ep::Status();
}

}  // namespace

int main() {
  const ep::Status status = Run();
  std::cerr << status.message() << "\n";
  return status.ok() ? 0 : 1;
}
