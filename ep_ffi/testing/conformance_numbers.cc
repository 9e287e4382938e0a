// SPDX-License-Identifier: Apache-2.0

// Conformance: every op writes the rows and weights of the numeric contract.

#include <gtest/gtest.h>

#include "ep_ffi/testing/conformance.h"

namespace ep::testing {
namespace {

TEST_P(GatherConformance, EveryOpMatchesTheOracle) {
  for (int i = 0; i < 12; ++i) {
    const int64_t ep_size = 1 + i % 4;
    if (ep_size < backend_.min_ep_size) continue;
    SCOPED_TRACE(StrCat("case ", i));
    const PlanDims dims = RandomFittingDims(ep_size, /*drop=*/i % 3 == 0);
    const Domain domain = MakeDomain({dims});
    const Routed routed = PrepareRandom(domain, dims);
    const int64_t width = Uniform(random_, 1, 40);
    for (Op op : kMoves) {
      for (DType dtype : kDTypes) {
        ExpectWorks(domain, op, routed, Fit({width, dtype}));
      }
    }
    for (DType dtype : kDTypes) {
      ExpectWorks(domain, Op::kCombine, routed, Fit({width, dtype}),
                  /*weighted=*/false);
    }
  }
}

TEST_P(GatherConformance, MegabytesMatchTheOracle) {
  PlanDims dims = {
      /*num_experts=*/8, /*ep_size=*/4,  /*num_tokens=*/64,
      /*top_k=*/3,       /*capacity=*/0, /*alignment=*/16,
      /*drop=*/false};
  dims.capacity = WorstCaseCapacity(dims);
  const Domain domain = MakeDomain({dims});
  const Routed routed = PrepareRandom(domain, dims);
  for (Op op : kMoves) {
    ExpectWorks(domain, op, routed, Fit({700, DType::kFloat32}));
  }
}

TEST_P(Conformance, BothIndexTypesGiveTheSameHandle) {
  const Domain domain = MakeDomain(kWorld);
  const Choices topk_idx = RandomChoices(random_, kDims);
  const Routed wide = Prepare(domain, kDims, topk_idx);
  std::vector<RankInput> inputs = PrepareInputs(kDims, topk_idx);
  for (RankInput& input : inputs) input.index_is_int64 = false;
  const StepPtr narrow = NewStep(domain, Op::kPrepare, inputs);
  ExpectRuns(narrow);
  Routed same = {kDims, wide.layout, {}};
  for (int64_t rank = 0; rank < kDims.ep_size; ++rank) {
    ExpectCounts(wide.layout, rank, narrow->output(rank));
    same.mems.push_back(narrow->output(rank).mem);
    if (backend_.repeatable_handles) {
      EXPECT_EQ(wide.mems[rank], same.mems[rank]);
    }
  }
  ExpectWorks(domain, Op::kDispatch, same, AnyType());
}

TEST_P(Conformance, AnUnspecifiedTailDoesNotChangeOtherRows) {
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareRandom(domain, kDims);
  std::vector<RankInput> inputs =
      RandomInputs(Op::kDispatch, routed, AnyType());
  for (RankInput& input : inputs) input.tail = Tail::kUnspecified;
  const StepPtr step = NewStep(domain, Op::kDispatch, inputs);
  ExpectRuns(step);
  ExpectOracle(routed, step);
}

}  // namespace
}  // namespace ep::testing
