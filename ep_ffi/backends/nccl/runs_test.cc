// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/nccl/runs.h"

#include <gtest/gtest.h>

#include "ep_ffi/backends/nccl/fake/fake.h"
#include "ep_ffi/backends/nccl/testing/group_fixture.h"

namespace ep::nccl {
namespace {

constexpr int64_t kRefused = -1;

// A call of Runs::Enter for an op, and the expected step, or kRefused.
struct Entry {
  int64_t run_id;
  std::string program;
  int64_t position, clone;
  int64_t step;
};

// Enters the ops, expects their steps, and returns the last error message.
std::string ExpectSteps(const std::vector<Entry>& entries) {
  Runs runs;
  std::string message;
  for (size_t i = 0; i < entries.size(); ++i) {
    SCOPED_TRACE(i);
    const Entry& entry = entries[i];
    const Site site = MakeSite({}, entry.program, entry.position, entry.clone);
    Call call = {};
    call.site = &site;
    call.run_id = entry.run_id;
    int64_t step = kRefused;
    const Status status = runs.Enter(call, &step);
    EXPECT_EQ(entry.step, status.ok() ? step : kRefused);
    if (!status.ok()) message = status.message();
  }
  return message;
}

TEST(RunsTest, ConsecutiveRunsAreCountedByProgram) {
  std::vector<Entry> entries;
  for (int64_t step = 0; step < 100; ++step) {
    for (int64_t position : {0, 1, 0, 1}) {  // a loop
      entries.push_back({1000 + step, "train", position, 0, step});
    }
    if (step % 10 == 0) {
      entries.push_back({5000 + step, "eval", 0, 0, step / 10});
    }
  }
  ExpectSteps(entries);
}

TEST(RunsTest, ARunThatContinuesAfterAnotherRunIsRefused) {
  const std::string message = ExpectSteps({{1, "train", 0, 0, 0},
                                           {2, "eval", 0, 0, 0},
                                           {1, "train", 1, 0, kRefused}});
  ExpectIn(message, {"\"train\"", "\"eval\"", "one thread"});
  ExpectSteps({{1, "train", 0, 0, 0},
               {2, "train", 0, 0, 1},
               {1, "train", 0, 0, kRefused}});
}

// XLA inlines a function that two layers call, which copies the ops in it.
TEST(RunsTest, CopiesOfAnOpBelongToOneRun) {
  ExpectSteps({{1, "train", 0, 0, 0},
               {1, "train", 0, 1, 0},
               {1, "train", 1, 0, 0},
               {2, "train", 0, 0, 1},
               {1, "train", 1, 1, kRefused}});
}

TEST(RunsTest, AProgramThatIsCompiledTwiceCountsItsRunsTwice) {
  ExpectSteps({{1, "train", 0, 0, 0},
               {2, "train", 0, 0, 1},
               {1, "train", 0, 1, 2},
               {1, "train", 1, 1, 2},
               {2, "train", 0, 1, 3}});
}

TEST(RunsTest, ARunMayCallExportedPrograms) {
  ExpectSteps({{1, "step", 0, 0, 0},
               {1, "exported", 0, 0, 0},
               {1, "step", 0, 0, 0},
               {2, "exported", 0, 0, 1},
               {2, "step", 0, 0, 1},
               {1, "exported", 0, 0, kRefused}});
}

// Without run ids from XLA, all runs count as one run.
TEST(RunsTest, RunsWithoutIdsAreNotRefused) {
  ExpectSteps(
      {{-1, "train", 0, 0, 0}, {-1, "eval", 0, 0, 0}, {-1, "train", 0, 0, 0}});
}

// Tests of programs that several threads launch.
using OrderTest = NcclGroupTest;

TEST_F(OrderTest, ARunThatInterleavesEnqueuesNoKernel) {
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

// NCCL EP pairs ops of two different programs if their rows are alike.
TEST_F(OrderTest, RanksThatDispatchInOtherOrdersFailAtTheNextPrepare) {
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
