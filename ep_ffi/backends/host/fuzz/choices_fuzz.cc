// SPDX-License-Identifier: Apache-2.0

// Fuzzes the choices in a peer's segment, from which ep_prepare builds a plan.
// The input is the bytes of the segment: `starts`, then `order`.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "ep_ffi/backends/host/fuzz/sample.h"
#include "ep_ffi/testing/fuzz.h"

std::vector<ep::testing::Seed> ep::testing::FuzzSeeds() {
  const PlanDims dims = host::SampleDims(/*ep_size=*/4);
  std::vector<Seed> seeds;
  const auto add = [&](const char* name, const SortedChoices& choices) {
    seeds.push_back({name, BytesOf(choices.starts) + BytesOf(choices.order)});
  };
  SortedChoices choices = host::SampleSorted(dims)[1];
  add("good choices", choices);
  std::fill(choices.starts.begin(), choices.starts.end(), 0);
  add("none", choices);
  std::fill(choices.starts.begin() + 1, choices.starts.end(),
            dims.num_choices());
  add("all of one expert", choices);
  return seeds;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace ep;
  const PlanDims dims = host::SampleDims(/*ep_size=*/4);
  static const std::vector<SortedChoices> good = host::SampleSorted(dims);
  std::vector<SortedChoices> sorted = good;
  // The arrays have the exact sizes of a peer's arrays, so that a sanitizer
  // detects reads past their ends.
  for (std::vector<int32_t>* words : {&sorted[1].starts, &sorted[1].order}) {
    const size_t bytes = std::min(size, words->size() * sizeof(int32_t));
    if (bytes > 0) std::memcpy(words->data(), data, bytes);
    data += bytes;
    size -= bytes;
  }
  bool accepted = true;
  for (bool drop : {false, true}) {
    for (int64_t rank = 0; rank < dims.ep_size; ++rank) {
      PlanDims mine = dims;
      mine.drop = drop;
      const testing::BuiltPlan plan(mine, rank, sorted);
      accepted = accepted && (plan.status.ok() || !drop);
      if (!plan.status.ok()) continue;
      host::RequireSane(mine, rank, plan.mem);
      int64_t rows = 0;
      for (int64_t j = 0; j < mine.num_local_experts(); ++j) {
        host::Require(plan.token_counts[j] >= 0 &&
                          plan.token_counts[j] <= plan.group_sizes[j],
                      "a slab holds its tokens");
        host::Require(plan.dropped_counts[j] >= 0,
                      "no more tokens are kept than come");
        rows += plan.group_sizes[j];
      }
      host::Require(rows <= mine.capacity, "slabs lie within the capacity");
    }
  }
  return accepted ? 0 : -1;
}
