// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/nccl/runs.h"

#include <gtest/gtest.h>

#include "ep_ffi/backends/nccl/fake/fake.h"
#include "ep_ffi/backends/nccl/testing/group_fixture.h"

namespace ep::nccl {
namespace {

// The step of a run that is refused.
constexpr int64_t kRefused = -1;

class RunsTest : public ::testing::Test {
 protected:
  // Enters an op, and returns the step of its run.
  int64_t Enter(int64_t run_id, const std::string& program,
                int64_t position = 0, int64_t clone = 0) {
    const Site site = MakeSite({}, program, position, clone);
    Call call = {};
    call.site = &site;
    call.run_id = run_id;
    int64_t step = kRefused;
    const Status status = runs_.Enter(call, &step);
    message_ = status.message();
    EXPECT_EQ(status.ok(), step != kRefused);
    return step;
  }

  Runs runs_;
  std::string message_;
};

TEST_F(RunsTest, RunsInTurnAreCountedByProgram) {
  for (int64_t step = 0; step < 100; ++step) {
    for (int64_t position : {0, 1, 0, 1}) {  // as in a loop
      EXPECT_EQ(step, Enter(1000 + step, "train", position));
    }
    if (step % 10 == 0) {
      EXPECT_EQ(step / 10, Enter(5000 + step, "eval"));
    }
  }
}

TEST_F(RunsTest, ARunThatGoesOnAfterAnotherIsRefused) {
  Enter(1, "train", 0);
  Enter(2, "eval", 0);
  EXPECT_EQ(kRefused, Enter(1, "train", 1));
  for (const char* word : {"\"train\"", "\"eval\"", "one thread"}) {
    EXPECT_NE(std::string::npos, message_.find(word)) << message_;
  }
}

TEST_F(RunsTest, AnOpThatRunsAgainAfterAnotherRunIsRefused) {
  Enter(1, "train");
  Enter(2, "train");
  EXPECT_EQ(kRefused, Enter(1, "train"));
}

// XLA inlines a function that is called twice, as for two layers.
TEST_F(RunsTest, CopiesOfAnOpAreOfOneRun) {
  Enter(1, "train", 0, 0);
  EXPECT_EQ(0, Enter(1, "train", 0, 1));
  EXPECT_EQ(0, Enter(1, "train", 1, 0));
  EXPECT_EQ(1, Enter(2, "train", 0, 0));
  EXPECT_EQ(kRefused, Enter(1, "train", 1, 1));
}

TEST_F(RunsTest, AProgramThatIsCompiledTwiceCountsItsRunsTwice) {
  for (int64_t clone : {0, 1}) {
    for (int64_t run_id : {1, 2, 3}) {
      EXPECT_NE(kRefused, Enter(run_id, "train", 0, clone));
      EXPECT_NE(kRefused, Enter(run_id, "train", 1, clone));
    }
  }
}

TEST_F(RunsTest, ARunMayCallExportedPrograms) {
  for (int64_t run_id : {1, 2}) {
    for (const char* program : {"step", "exported", "step", "exported"}) {
      EXPECT_EQ(run_id - 1, Enter(run_id, program));
    }
  }
  EXPECT_EQ(kRefused, Enter(1, "exported"));
}

// Where XLA has no id, all runs are one.
TEST_F(RunsTest, RunsWithoutIdsAreNotRefused) {
  for (const char* program : {"train", "eval", "train"}) {
    EXPECT_EQ(0, Enter(-1, program));
  }
}

// Programs that ranks launch from several threads.
using OrderTest = NcclGroupTest;

TEST_F(OrderTest, NoKernelOfARunThatInterleavesIsEnqueued) {
  AllowLeaks();
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareRandom(domain, kDims);
  const int64_t first = NextRun(), second = NextRun();
  ExpectRuns(NewMove(domain, Op::kDispatch, routed, {first}));
  ExpectRuns(
      NewMove(domain, Op::kDispatch, routed, {second, 0, 0, /*program=*/1}));
  for (void* stream : domain.streams) {
    fake::TakeEnqueued(static_cast<CUstream>(stream));
  }
  ExpectFailureOnAll(
      {Code::kFailedPrecondition,
       {"ep_combine", "rank", "jit_step#0", "jit_step#1", "thread"}},
      NewMove(domain, Op::kCombine, routed, {first, /*position=*/1}));
  for (void* stream : domain.streams) {
    EXPECT_EQ(std::vector<std::string>(),
              fake::TakeEnqueued(static_cast<CUstream>(stream)));
  }
}

// NCCL EP pairs the ops of two programs if their rows are alike.
TEST_F(OrderTest, RanksThatMoveInOtherOrdersFailAtTheNextPrepare) {
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareRandom(domain, kDims);
  StepPtr steps[2];
  for (uint64_t i : {0, 1}) {
    steps[i] = NewMove(domain, Op::kDispatch, routed, {NextRun(), 0, 0, i});
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
