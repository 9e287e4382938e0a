// SPDX-License-Identifier: Apache-2.0

// Tests of ranks that are absent, late or fail: no other rank waits for ever.

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <thread>

#include "ep_ffi/backends/nccl/fake/fake.h"
#include "ep_ffi/backends/nccl/reports.h"
#include "ep_ffi/backends/nccl/testing/group_fixture.h"

namespace ep::nccl {
namespace {

constexpr int64_t kWindow = Reports::kWindow;

using TimeoutTest = NcclGroupTest;
INSTANTIATE_TEST_SUITE_P(Fake, TimeoutTest, ::testing::Values(FakeNccl()));

// Expects that these three ranks time out, in the time that one rank takes.
void ExpectTimeouts(Step& step, const std::array<int64_t, 3>& ranks) {
  ForEachRank(ranks.size(), [&](int64_t i) {
    const Status status = step.Wait(ranks[i]);
    EXPECT_EQ(Code::kDeadlineExceeded, status.code()) << status.message();
    ExpectWords({"timeout_s = 1"}, status);
  });
}

TEST_P(TimeoutTest, ClosingWaitsForTheDevice) {
  Domain domain = MakeDomain(kWorld);
  domain.synchronize = nullptr;
  const StepPtr step = NewPrepare(domain, kDims);
  ForEachRank(kDims.ep_size, [&](int64_t rank) {
    if (rank == 3) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    step->Post(rank);
    ExpectOk(step->Wait(rank));
    (void)domain.groups[rank]->Close();
  });
  for (const auto& group : domain.groups) {
    (void)group->Close();
    ExpectWords({"finalized"}, group->Check());
    int64_t bytes = 0;
    ExpectWords({"finalized"}, group->MemBytes({}, 0, &bytes));
  }
}

// No rank calls Check here, but no prepare is more than a window ahead of the
// device.
TEST_P(TimeoutTest, AnAbsentRankFailsALaterPrepareOfTheOthers) {
  AllowLeaks();
  Domain domain = MakeImpatient();
  domain.synchronize = nullptr;
  std::vector<StepPtr> steps;
  for (int64_t i = 0; i < kWindow + 2; ++i) {
    steps.push_back(NewPrepare(domain, kDims));
  }
  ForEachRank(3, [&](int64_t rank) {
    for (size_t i = 0; i < steps.size(); ++i) {
      SCOPED_TRACE(i);
      steps[i]->Post(rank);
      const Status status = steps[i]->Wait(rank);
      if (i < kWindow) {
        ExpectOk(status);
      } else {
        EXPECT_EQ(Code::kDeadlineExceeded, status.code());
        ExpectWords({"did not run within timeout_s = 1"}, status);
      }
    }
  });
  AwaitStreams(domain);
}

TEST(GiveUpTest, TheErrorSaysWhatTheWatchdogHasHeard) {
  AllowLeaks();
  std::vector<std::shared_ptr<Group>> groups;
  for (const Status& status : Connect(SizesFor(kDims), /*timeout_s=*/0.5,
                                      /*first_device=*/0, &groups)) {
    ExpectOk(status);
  }
  const auto stream = fake::NewStream(/*device=*/0);
  fake::Enqueue(stream.get(),
                [] { std::this_thread::sleep_for(std::chrono::seconds(1)); });
  static_cast<NcclGroup&>(*groups[0]).watchdog().Hear("Missing: rank 3.");
  for (int i = 0; i < 2; ++i) {
    ExpectWords({"timeout_s = 0.5", ". Missing: rank 3."}, groups[0]->Check());
  }
  fake::Synchronize(stream.get());
}

// Returns the live objects after the threads that earlier tests left behind
// have ended.
fake::Resources CountSettledHoldings() {
  for (;;) {
    const fake::Resources holdings = fake::CountResources();
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    if (fake::CountResources() == holdings) return holdings;
  }
}

// NCCL EP's kernels cannot be stopped. Freeing what the device may still use
// would wait for it, or break its work.
TEST_P(TimeoutTest, AnAbsentRankFailsTheOthersWhichKeepWhatTheDeviceUses) {
  AllowLeaks();
  const fake::Resources before = CountSettledHoldings();
  {
    WorldOptions options = kWorld;
    options.timeout_s = 1;
    const Domain domain = GetParam().make(options)[0];
    const StepPtr step = NewPrepare(domain, kDims);
    for (int64_t rank : {0, 1, 3}) step->Post(rank);
    ExpectTimeouts(*step, {0, 1, 3});
    AwaitStreams(domain);
  }
  const auto count = [&] {
    const fake::Resources now = fake::CountResources();
    return std::vector<size_t>{now.contexts - before.contexts,
                               now.modules - before.modules,
                               now.host_allocations - before.host_allocations};
  };
  const std::vector<size_t> stuck = {3, 3, 3};
  Await([&] { return count() == stuck; });
  EXPECT_EQ(stuck, count());
}

TEST_P(TimeoutTest, ARankThatCannotEnqueueFailsOnEveryRankInTime) {
  AllowLeaks();
  struct {
    Op op;
    const char* function;
  } cases[] = {
      {Op::kPrepare, "ncclAllGather"},
      {Op::kPrepare, "ncclEpUpdateHandle"},
      {Op::kDispatch, "ncclEpDispatch"},
      {Op::kCombine, "ncclEpCombine"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.function);
    fake::TheMachine().failing.clear();
    const Domain domain = MakeImpatient();
    const Routed routed = PrepareRandom(domain, kDims);
    const auto post = [&](Op op) {
      const StepPtr step = op == Op::kPrepare ? NewPrepare(domain, kDims)
                                              : NewMove(domain, op, routed);
      for (int64_t rank = 0; rank < kDims.ep_size; ++rank) step->Post(rank);
      return step;
    };
    fake::TheMachine().failing_device = 1;
    fake::TheMachine().failing = c.function;
    const StepPtr failing = post(c.op);
    const StepPtr later = post(Op::kDispatchBwd);
    ExpectWords({OpName(c.op), "rank 1", c.function}, failing->Wait(1));
    ExpectWords({"ep_dispatch_bwd", "rank 1", c.function}, later->Wait(1));
    ExpectTimeouts(*failing, {0, 2, 3});
    AwaitStreams(domain);
  }
}

TEST(ConnectTimeoutTest, AnAbsentRankFailsTheOthersInTime) {
  AllowLeaks();
  fake::TheMachine().timeout_s = 1;  // ends the thread that is left behind
  NcclGroup::Options options = {};
  options.name = "world";
  options.sizes = SizesFor(kDims);
  options.timeout_s = 0.5;
  ExpectOk(NewUniqueId("", "", &options.unique_id));
  std::shared_ptr<NcclGroup> group;
  const Status status = NcclGroup::Create(options, &group);
  EXPECT_EQ(Code::kDeadlineExceeded, status.code()) << status.message();
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  EXPECT_EQ(1u, fake::TakeViolations().size());
}

}  // namespace
}  // namespace ep::nccl
