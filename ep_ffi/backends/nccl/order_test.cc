// SPDX-License-Identifier: Apache-2.0

// Tests of programs that ranks launch from several threads.

#include <gtest/gtest.h>

#include "ep_ffi/backends/nccl/fake/fake.h"
#include "ep_ffi/backends/nccl/testing/group_fixture.h"

namespace ep::nccl {
namespace {

using testing::Place;

using OrderTest = NcclGroupTest;
INSTANTIATE_TEST_SUITE_P(Fake, OrderTest, ::testing::Values(FakeNccl()));

TEST_P(OrderTest, NoKernelOfARunThatInterleavesIsEnqueued) {
  AllowLeaks();
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareRandom(domain, kDims);
  const int64_t first = NextRun(), second = NextRun();
  const auto make = [&](Op op, const Place& place) {
    return Step::Make(domain, op, place, RandomInputs(op, routed, AnyType()));
  };
  ExpectRuns(make(Op::kDispatch, {first}));
  ExpectRuns(make(Op::kDispatch, {second, 0, 0, /*program=*/1}));
  for (void* stream : domain.streams) {
    fake::TakeEnqueued(static_cast<CUstream>(stream));
  }
  const StepPtr third = make(Op::kCombine, {first, /*position=*/1});
  for (const Status& status : third->Run()) {
    EXPECT_EQ(Code::kFailedPrecondition, status.code());
    ExpectWords({"ep_combine", "rank", "jit_step#0", "jit_step#1", "thread"},
                status);
  }
  for (void* stream : domain.streams) {
    EXPECT_EQ(std::vector<std::string>(),
              fake::TakeEnqueued(static_cast<CUstream>(stream)));
  }
}

// NCCL EP pairs the ops of two programs if their rows are alike.
TEST_P(OrderTest, RanksThatMoveInOtherOrdersFailAtTheNextPrepare) {
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareRandom(domain, kDims);
  StepPtr steps[2];
  for (uint64_t i : {0, 1}) {
    steps[i] = Step::Make(domain, Op::kDispatch, {NextRun(), 0, 0, i},
                          RandomInputs(Op::kDispatch, routed, AnyType()));
  }
  const StepPtr prepare = NewPrepare(domain, kDims);
  ForEachRank(kDims.ep_size, [&](int64_t rank) {
    for (int i : {0, 1}) {
      const StepPtr& step = steps[rank == 2 ? 1 - i : i];
      step->Post(rank);
      ExpectOk(step->Wait(rank));
    }
    prepare->Post(rank);
    ExpectWords({"ep_prepare", "rank 0 and rank 2 disagree", "one thread"},
                prepare->Wait(rank));
  });
  PrepareRandom(domain, kDims);
}

}  // namespace
}  // namespace ep::nccl
