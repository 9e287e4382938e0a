// SPDX-License-Identifier: Apache-2.0

// Runs the conformance suite, and tests the outputs and side effects of ops.

#include <gtest/gtest.h>

#include <algorithm>

#include "ep_ffi/backends/nccl/fake/fake.h"
#include "ep_ffi/backends/nccl/testing/group_fixture.h"

namespace ep::nccl {
namespace {

EP_INSTANTIATE_CONFORMANCE(Fake, FakeNccl());
EP_INSTANTIATE_CONFORMANCE(Lent, LentNccl());

using MovesTest = NcclGroupTest;

// Each step copies its inputs, so each op gets EpHandle.mem at a new address.
TEST_F(MovesTest, OpsOfTwoLayersAlternate) {
  const Domain domain = MakeDomain(kWorld);
  PlanDims other = kDims;
  other.top_k = 1;
  other.alignment = 8;
  other.num_tokens = 3;
  const Routed first = PrepareRandom(domain, kDims);
  const Routed second = PrepareRandom(domain, other);
  for (Op op : kMoves) {
    ExpectWorks(domain, op, first, AnyType());
    ExpectWorks(domain, op, second, AnyType());
  }
}

TEST_F(MovesTest, RoutingsWithoutTokensOrChoicesWork) {
  PlanDims dims = kDims;
  dims.num_tokens = 0;
  const Domain domain = MakeDomain({kDims});
  const Routed empty = PrepareRandom(domain, dims);
  const Routed unused = Prepare(
      domain, kDims,
      Choices(kDims.ep_size, std::vector<int64_t>(kDims.num_choices(), -1)));
  for (Op op : kMoves) {
    ExpectWorks(domain, op, empty, AnyType());
    ExpectWorks(domain, op, unused, AnyType());
  }
}

// The choices fill several chunks of the kernels, and exceed the capacity.
TEST_F(MovesTest, ManyChoicesOfFewExpertsWork) {
  const PlanDims dims = {
      /*num_experts=*/4, /*ep_size=*/2,    /*num_tokens=*/700,
      /*top_k=*/2,       /*capacity=*/704, /*alignment=*/16,
      /*drop=*/true};
  const Domain domain = MakeDomain({dims});
  const Routed routed = PrepareRandom(domain, dims);
  EXPECT_TRUE(routed.layout.Overflows(dims));
  for (Op op : kMoves) ExpectWorks(domain, op, routed, AnyType());
}

// NCCL EP uses the end of a handle as scratch memory, although XLA treats the
// handle as constant. No op reads the scratch bytes of another op.
TEST_F(MovesTest, OpsChangeOnlyTheScratchMemoryOfAHandle) {
  const Domain domain = MakeDomain(kWorld);
  Routed routed = PrepareRandom(domain, kDims);
  const std::vector<std::vector<std::byte>> before = routed.mems;
  for (int round = 0; round < 2; ++round) {
    for (Op op : kMoves) {
      SCOPED_TRACE(OpName(op));
      const StepPtr step = NewMove(domain, op, routed);
      ExpectRuns(step);
      ExpectOracle(routed, step);
      for (int64_t rank = 0; rank < kDims.ep_size; ++rank) {
        const std::vector<std::byte>& after = step->inputs()[rank].mem;
        const auto first_change =
            std::mismatch(after.begin(), after.end(), before[rank].begin());
        EXPECT_EQ(fake::kScratchBytes, after.end() - first_change.first);
        routed.mems[rank] = after;
      }
    }
  }
}

// Writing the tail (the rows past the used slots) would take time.
TEST_F(MovesTest, AnUnspecifiedTailIsNotWritten) {
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareRandom(domain, kDims);
  for (Op op : {Op::kDispatch, Op::kCombineBwd}) {
    std::vector<RankInput> inputs = RandomInputs(op, routed, AnyType());
    for (RankInput& input : inputs) input.tail = Tail::kUnspecified;
    const StepPtr step = NewStep(domain, op, inputs);
    ExpectRuns(step);
    for (int64_t rank = 0; rank < kDims.ep_size; ++rank) {
      const std::vector<std::byte>& rows = step->output(rank).data.rows;
      const auto tail =
          rows.begin() +
          AnyType().bytes() * routed.layout.total_recv_tokens[rank];
      ASSERT_NE(rows.end(), tail);
      EXPECT_EQ(rows.end() - tail,
                std::count(tail, rows.end(), testing::kCanary));
    }
  }
}

// A kernel launch takes some microseconds, a large part of a small op's time.
TEST_F(MovesTest, OpsEnqueueTheseKernelsOnly) {
  const Domain domain = MakeDomain(kWorld);
  using Names = std::vector<std::string>;
  const auto enqueued = [&] {
    return fake::TakeEnqueued(static_cast<CUstream>(domain.streams[0]));
  };
  const Routed routed = PrepareRandom(domain, kDims);
  EXPECT_EQ((Names{"EpCountChoices", "EpSumChoices", "ncclAllGather",
                   "EpPlaceSlabs", "EpWriteRouting", "ncclEpUpdateHandle"}),
            enqueued());
  for (Op op : kMoves) {
    ExpectWorks(domain, op, routed, AnyType());
    EXPECT_EQ(
        (Names{"EpClearForeign",
               testing::IsScatter(op) ? "ncclEpDispatch" : "ncclEpCombine",
               "EpFinish"}),
        enqueued());
  }
  std::vector<RankInput> inputs = RandomInputs(Op::kCombine, routed, AnyType());
  for (RankInput& input : inputs) input.checked = true;
  ExpectRuns(NewStep(domain, Op::kCombine, inputs));
  EXPECT_EQ((Names{"EpClearForeign", "ncclEpCombine", "EpFinish",
                   "EpFindNotFinite", "EpReportNotFinite"}),
            enqueued());
}

}  // namespace
}  // namespace ep::nccl
