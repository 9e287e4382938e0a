// SPDX-License-Identifier: Apache-2.0

// Fuzzes EpHandle.mem in the four ops that read it. The input is the mem of
// rank 0. All other ranks have valid plans; the group has two processes.

#include <gtest/gtest.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "ep_ffi/backends/host/fuzz/sample.h"
#include "ep_ffi/backends/host/testing/groups.h"
#include "ep_ffi/testing/fuzz.h"
#include "ep_ffi/testing/ranks.h"
#include "ep_ffi/testing/samples.h"

namespace ep::host {
namespace {

using testing::RankInput;
using testing::Step;
using testing::StepPtr;

constexpr testing::RowType kType = {3, DType::kFloat32};

struct PreparedGroup {
  PreparedGroup()
      : dims(SampleDims(/*ep_size=*/4)),
        domain(MakeHostGroup({dims}, /*max_processes=*/2)[0]) {
    const std::vector<SortedChoices> sorted = SampleSorted(dims);
    for (int64_t rank = 0; rank < dims.ep_size; ++rank) {
      mems.push_back(testing::BuiltPlan(dims, rank, sorted).mem);
    }
  }

  // Runs the op with `mem` on rank 0. Returns whether the op succeeded.
  bool Run(Op op, const std::vector<std::byte>& mem) {
    std::vector<RankInput> inputs(dims.ep_size);
    for (int64_t rank = 0; rank < dims.ep_size; ++rank) {
      RankInput& input = inputs[rank];
      input.dims = dims;
      input.type = kType;
      input.mem = rank == 0 ? mem : mems[rank];
      input.data = RandomInput(random, op, dims, kType);
    }
    const StepPtr step = Step::Make(domain, op, {++run_id}, inputs);
    for (int64_t rank = 0; rank < dims.ep_size; ++rank) step->Post(rank);
    bool ran = true;
    for (int64_t rank = 0; rank < dims.ep_size; ++rank) {
      const Status status = step->Wait(rank);
      ran = ran && status.ok();
      Require(status.ok() || status.code() == Code::kInvalidArgument ||
                  status.code() == Code::kFailedPrecondition,
              "the error blames the handle");
    }
    Require(!::testing::Test::HasFailure(), "outputs are not overrun");
    return ran;
  }

  const PlanDims dims;
  const testing::Domain domain;
  std::vector<std::vector<std::byte>> mems;  // valid plans, by rank
  int64_t run_id = 0;
  testing::Random random;
};

}  // namespace
}  // namespace ep::host

std::vector<ep::testing::Seed> ep::testing::FuzzSeeds() {
  const PlanDims dims = host::SampleDims(/*ep_size=*/4);
  const auto plan = [](const PlanDims& d, int64_t rank) {
    return BytesOf(BuiltPlan(d, rank, host::SampleSorted(d)).mem);
  };
  PlanDims other = dims;
  other.alignment = 1;
  std::vector<SortedChoices> rotated = host::SampleSorted(dims);
  std::swap(rotated[0], rotated[1]);
  rotated[2] = rotated[3];
  return {
      {"a good plan", plan(dims, 0)},
      {"of another rank", plan(dims, 1), false},
      {"of another layer", plan(other, 0), false},
      // This plan has the same number of bytes, but another ep_size.
      {"of another group", plan(host::SampleDims(/*ep_size=*/2), 0), false},
      {"of another routing", BytesOf(BuiltPlan(dims, 0, rotated).mem), false},
  };
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static auto* group = new ep::host::PreparedGroup();
  const auto* bytes = reinterpret_cast<const std::byte*>(data);
  std::vector<std::byte> mem(bytes, bytes + size);
  // Sets the right checksum, which ops check first and no mutant would guess.
  if (mem.size() == static_cast<size_t>(ep::PlanBytes(group->dims))) {
    ep::SealPlan(group->dims, mem.data());
  }
  bool ran = true;
  for (ep::Op op : ep::testing::kMoves) ran = group->Run(op, mem) && ran;
  return ran ? 0 : -1;
}
