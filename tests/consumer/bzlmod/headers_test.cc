// SPDX-License-Identifier: Apache-2.0

// A C++ program of another module includes each public header and links their
// functions. loopback_test.cc calls the rest.

#include <cstdint>
#include <iostream>

#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/plan.h"
#include "ep_ffi/core/status.h"
#include "ep_ffi/core/str_cat.h"

namespace {

// Sorts the choices of two tokens, which choose the second and the first of two
// experts.
ep::Status Run() {
  const ep::PlanDims dims = {/*num_experts=*/2, /*ep_size=*/1,
                             /*num_tokens=*/2,  /*top_k=*/1,
                             /*capacity=*/2,    /*alignment=*/1,
                             /*drop=*/false};
  const int32_t topk_idx[] = {1, 0};
  ep::SortedChoices sorted;
  EP_RETURN_IF_ERROR(ep::SortChoices(dims, topk_idx, &sorted));
  if (sorted.order[0] == 1 && ep::PlanBytes(dims) > 0) return ep::Status();
  return ep::Status(ep::Code::kInternal,
                    ep::StrCat(ep::OpName(ep::Op::kPrepare), " has put choice ",
                               sorted.order[0], " first"));
}

}  // namespace

int main() {
  const ep::Status status = Run();
  std::cerr << status.message() << "\n";
  return status.ok() ? 0 : 1;
}
