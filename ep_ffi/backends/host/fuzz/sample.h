// SPDX-License-Identifier: Apache-2.0

// The exchange from which the fuzz targets make their seeds. The exchange is
// not random, so that the seeds are valid on every machine.

#ifndef EP_FFI_BACKENDS_HOST_FUZZ_SAMPLE_H_
#define EP_FFI_BACKENDS_HOST_FUZZ_SAMPLE_H_

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "ep_ffi/core/plan.h"
#include "ep_ffi/testing/plans.h"

namespace ep::host {

// The capacity is so small that some choices are dropped.
inline PlanDims SampleDims(int64_t ep_size) {
  return {/*num_experts=*/8, ep_size,         /*num_tokens=*/6,
          /*top_k=*/3,       /*capacity=*/16, /*alignment=*/2,
          /*drop=*/true};
}

inline testing::Choices SampleChoices(const PlanDims& dims) {
  testing::Choices choices(dims.ep_size);
  for (int64_t rank = 0; rank < dims.ep_size; ++rank) {
    for (int64_t i = 0; i < dims.num_choices(); ++i) {
      const int64_t token = i / dims.top_k, k = i % dims.top_k;
      const bool unused = token % 4 == 3 && k == 1;
      choices[rank].push_back(
          unused ? -1 : (rank + token + 3 * k) % dims.num_experts);
    }
  }
  return choices;
}

inline std::vector<SortedChoices> SampleSorted(const PlanDims& dims) {
  return testing::SortAll(dims, SampleChoices(dims));
}

// Aborts, as a sanitizer does, unless the condition is true.
inline void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::abort();
}

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_FUZZ_SAMPLE_H_
