// SPDX-License-Identifier: Apache-2.0

// Tests in which a rank is absent, is late or fails. The other ranks stop
// waiting, and the watchdog names the op.

#include <gtest/gtest.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdlib>

#include "ep_ffi/backends/nccl/fake/fake.h"
#include "ep_ffi/backends/nccl/ranks.h"
#include "ep_ffi/backends/nccl/reports.h"
#include "ep_ffi/backends/nccl/testing/group_fixture.h"
#include "ep_ffi/backends/nccl/watchdog.h"
#include "ep_ffi/core/clock.h"

namespace ep::nccl {
namespace {

using WatchdogTest = NcclGroupTest;

std::vector<std::string> LinesWith(const std::string& word,
                                   const std::string& text) {
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string line = text.substr(begin, end - begin);
    if (line.find(word) != std::string::npos) lines.push_back(line);
    begin = end + 1;
  }
  return lines;
}

// Expects one line from each of these ranks, with these words.
void ExpectLines(const std::vector<int64_t>& ranks,
                 const std::vector<std::string>& words,
                 const std::string& text) {
  EXPECT_EQ(ranks.size(), LinesWith("ep_ffi: ", text).size()) << text;
  for (int64_t rank : ranks) {
    const auto lines =
        LinesWith(StrCat("rank ", rank, " of EP domain 0"), text);
    ASSERT_EQ(1u, lines.size()) << "rank " << rank << " in: " << text;
    ExpectIn(lines[0], words);
  }
}

TEST_F(WatchdogTest, AllRanksThatWaitNameTheSameOp) {
  const Domain domain = MakeAsynchronous();
  const StepPtr first = NewPrepare(domain, kDims);
  const StepPtr missed = NewPrepare(domain, kDims);
  const StepPtr later = NewPrepare(domain, kDims);
  ExpectRuns(first);
  ::testing::internal::CaptureStderr();
  for (int64_t rank : {0, 1, 3}) {
    missed->Post(rank);
    later->Post(rank);
  }
  Sleep(3 * kTimeoutS);
  ExpectLines({0, 1, 3},
              {"ep_prepare(layer \"moe_3\"), step 1 of \"jit_step#0\", op 0",
               "timeout_s = 1 s", "for other ranks. Look for a rank",
               "all ranks took part was ep_prepare(layer \"moe_3\"), step 0"},
              ::testing::internal::GetCapturedStderr());
  // The ranks continue when rank 2 arrives.
  ::testing::internal::CaptureStderr();
  for (const StepPtr& step : {missed, later}) step->Post(2);
  for (int64_t rank = 0; rank < kDims.ep_size; ++rank) {
    for (const StepPtr& step : {missed, later}) ExpectOk(step->Wait(rank));
    ExpectOk(domain.groups[rank]->Check());
  }
  EXPECT_EQ("", ::testing::internal::GetCapturedStderr());
}

// Rank 2 has enqueued the op, but its device is busy.
TEST_F(WatchdogTest, ARankThatHasNotBegunItsOpSaysSo) {
  const Domain domain = MakeAsynchronous();
  const StepPtr step = NewPrepare(domain, kDims);
  ::testing::internal::CaptureStderr();
  fake::Enqueue(static_cast<CUstream>(domain.streams[2]),
                [] { Sleep(3 * kTimeoutS); });
  for (int64_t rank = 0; rank < kDims.ep_size; ++rank) step->Post(rank);
  Sleep(2 * kTimeoutS);
  AwaitStreams(domain);
  const std::string text = ::testing::internal::GetCapturedStderr();
  ExpectLines({0, 1, 2, 3}, {"ep_prepare(layer \"moe_3\"), step 0"}, text);
  const auto lines = LinesWith("wait for this rank", text);
  ASSERT_EQ(1u, lines.size()) << text;
  ExpectIn(lines[0], {"rank 2 of", "has not begun"});
}

TEST_F(WatchdogTest, AStreamThatMakesProgressIsNotReported) {
  const Domain domain = MakeAsynchronous();
  std::vector<StepPtr> steps;
  for (int i = 0; i < 4; ++i) steps.push_back(NewPrepare(domain, kDims));
  ::testing::internal::CaptureStderr();
  ForEachRank(kDims.ep_size, [&](int64_t rank) {
    for (const StepPtr& step : steps) {
      if (rank == 2) Sleep(0.5 * kTimeoutS);
      step->Post(rank);
    }
  });
  AwaitStreams(domain);
  Sleep(2 * kTimeoutS);  // the watchdog does not report idle groups
  EXPECT_EQ("", ::testing::internal::GetCapturedStderr());
}

// Runs each op as the last op of a group, with and without tokens.
TEST_F(WatchdogTest, EveryOpCountsItsEnd) {
  PlanDims empty = kDims;
  empty.num_tokens = 0;
  ::testing::internal::CaptureStderr();
  for (const PlanDims& dims : {kDims, empty}) {
    PrepareRandom(MakeImpatient(), dims);
    for (Op op : kMoves) {
      const Domain domain = MakeImpatient();
      std::vector<RankInput> inputs =
          RandomInputs(op, PrepareRandom(domain, dims), AnyType());
      for (RankInput& input : inputs) {
        input.tail = Tail::kUnspecified;
        input.checked = true;
      }
      ExpectRuns(NewStep(domain, op, inputs));
    }
  }
  Sleep(2 * kTimeoutS);
  EXPECT_EQ("", ::testing::internal::GetCapturedStderr());
}

TEST_F(WatchdogTest, ClosingNamesTheOpThatTheGroupWaitsFor) {
  AllowLeaks();
  const Domain domain = MakeAsynchronous();
  const StepPtr step = NewPrepare(domain, kDims);
  for (int64_t rank : {0, 1, 3}) step->Post(rank);
  Sleep(0.5 * kTimeoutS);
  ::testing::internal::CaptureStderr();
  ForEachRank(kDims.ep_size,
              [&](int64_t rank) { (void)domain.groups[rank]->Close(); });
  ExpectLines({0, 1, 3}, {"ep_prepare(layer \"moe_3\"), step 0"},
              ::testing::internal::GetCapturedStderr());
  AwaitStreams(domain);
}

TEST(WatchdogAloneTest, AnOpMayEndBeforeItIsAdded) {
  Watchdog watchdog(OpenDevice(0), "rank 1", /*timeout_s=*/0.2,
                    /*exit_after_s=*/10);
  Routing routing = {};
  ::testing::internal::CaptureStderr();
  for (int i = 0; i < 2; ++i) {
    watchdog.Number(&routing);
    routing.progress->begun = routing.progress->ended = routing.number;
    watchdog.Add("ep_dispatch");
  }
  Sleep(1);
  EXPECT_EQ("", ::testing::internal::GetCapturedStderr());
}

TEST(WatchdogAloneTest, TheMessageHasTheSentenceAboutOtherRanks) {
  Watchdog watchdog(OpenDevice(0), "rank 1", /*timeout_s=*/0.2,
                    /*exit_after_s=*/10);
  Routing routing = {};
  watchdog.Number(&routing);
  routing.progress->begun = routing.number;
  ::testing::internal::CaptureStderr();
  watchdog.Hear("Missing: rank 3.");
  watchdog.Add("ep_dispatch");
  Sleep(1);
  EXPECT_EQ(1u, LinesWith("for other ranks. Missing: rank 3.",
                          ::testing::internal::GetCapturedStderr())
                    .size());
}

TEST(WatchdogAloneTest, FindsThePlaceOfItsRank) {
  Watchdog watchdog(OpenDevice(0), "rank 1", /*timeout_s=*/100,
                    /*exit_after_s=*/100);
  Routing routing = {};
  const auto expect = [&](int64_t num_ended, bool has_begun, int64_t num_left,
                          const std::string& text) {
    const Watchdog::Place place = watchdog.FindPlace();
    EXPECT_EQ(num_ended, place.num_ended);
    EXPECT_EQ(has_begun, place.has_begun);
    EXPECT_EQ(num_left, place.num_left);
    EXPECT_EQ(text, place.text);
    Sleep(0.1);
    EXPECT_LT(place.still_s, watchdog.FindPlace().still_s);
  };
  expect(0, false, 0, "has enqueued no op");
  for (int64_t i = 0; i < 2; ++i) {
    watchdog.Number(&routing);
    watchdog.Add("ep_dispatch");
    expect(i, false, 1, "has not begun ep_dispatch");
    routing.progress->begun = routing.number;
    EXPECT_GT(0.1, watchdog.FindPlace().still_s);
    expect(i, true, 1, "is in ep_dispatch");
    routing.progress->ended = routing.number;
    expect(i + 1, false, 0, "has enqueued nothing after ep_dispatch");
  }
}

TEST(WatchdogDeathTest, TerminatesTheProcessAfterExitAfterS) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  const auto wait = [](double exit_after_s) {
    Watchdog watchdog(OpenDevice(0), "rank 1", /*timeout_s=*/0.2, exit_after_s);
    watchdog.Add("ep_dispatch");
    Sleep(1);
    std::_Exit(0);
  };
  EXPECT_EXIT(wait(0.2), ::testing::ExitedWithCode(kExitCode),
              "ep_dispatch: rank 1 has not begun(.|\n)*"
              "rank 1 ends its process: exit_after_s = 0.2.*ep_dispatch");
  EXPECT_EXIT(wait(10), ::testing::ExitedWithCode(0), "ep_dispatch: rank 1");
}

constexpr int64_t kWindow = Reports::kWindow;

using TimeoutTest = NcclGroupTest;

// Expects, on three threads, that each of these ranks times out.
void ExpectTimeouts(Step& step, const std::array<int64_t, 3>& ranks) {
  ForEachRank(ranks.size(), [&](int64_t i) {
    const Status status = step.Wait(ranks[i]);
    EXPECT_EQ(Code::kDeadlineExceeded, status.code()) << status.message();
    ExpectWords({"timeout_s = 1"}, status);
  });
}

TEST_F(TimeoutTest, ClosingWaitsForTheDevice) {
  Domain domain = MakeDomain(kWorld);
  domain.synchronize = nullptr;
  const StepPtr step = NewPrepare(domain, kDims);
  ForEachRank(kDims.ep_size, [&](int64_t rank) {
    if (rank == 3) Sleep(0.1);
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

// No rank calls Check, but the host may only be kWindow prepares ahead.
TEST_F(TimeoutTest, AnAbsentRankFailsALaterPrepareOfTheOthers) {
  AllowLeaks();
  const Domain domain = MakeAsynchronous();
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
        ExpectWords({"did not run", "timeout_s = 1 s in ep_prepare"}, status);
      }
    }
  });
  AwaitStreams(domain);
}

// After a fault of the GPU, it begins no op, however long the host waits.
TEST_F(TimeoutTest, AFaultOfTheGpuFailsAPrepareThatWaits) {
  AllowLeaks();
  const Domain domain = MakeAsynchronous();
  fake::TheMachine().failing = "cuStreamQuery";
  fake::Enqueue(static_cast<CUstream>(domain.streams[0]),
                [] { Sleep(5 * kTimeoutS); });
  std::vector<StepPtr> steps;
  for (int64_t i = 0; i <= kWindow; ++i) {
    steps.push_back(NewPrepare(domain, kDims));
    steps[i]->Post(0);
  }
  const double start = Now();
  ExpectWords({"ep_prepare", "rank 0", "the device failed"},
              steps[kWindow]->Wait(0));
  EXPECT_GT(4 * kTimeoutS, Now() - start);
  AwaitStreams(domain);
}

TEST(GiveUpTest, TheErrorHasTheSentenceAboutOtherRanks) {
  AllowLeaks();
  const auto groups = ConnectAll(/*timeout_s=*/0.5);
  const auto stream = fake::NewStream(/*device=*/0);
  fake::Enqueue(stream.get(), [] { Sleep(1); });
  groups[0]->watchdog().Hear("Missing: rank 3.");
  for (int i = 0; i < 2; ++i) {
    ExpectWords({"timeout_s = 0.5", ". Missing: rank 3."}, groups[0]->Check());
  }
  fake::Synchronize(stream.get());
}

TEST_F(TimeoutTest, ARankThatCannotEnqueueFailsOnEveryRankInTime) {
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

// Lets no thread start while the object lives, because no stack fits.
class NoThreads {
 public:
  NoThreads() {
    pthread_getattr_default_np(&before_);
    pthread_attr_t huge = before_;
    EXPECT_EQ(0, pthread_attr_setstacksize(&huge, size_t{1} << 60));
    EXPECT_EQ(0, pthread_setattr_default_np(&huge));
  }
  ~NoThreads() { pthread_setattr_default_np(&before_); }

 private:
  pthread_attr_t before_;
};

TEST(GiveUpTest, AProcessWithoutThreadsFails) {
  AllowLeaks();
  const auto groups = ConnectAll(/*timeout_s=*/10);
  NcclRanks ranks({{0, groups[0]}, {1, groups[1]}});
  const NoThreads no_threads;
  ExpectWords({"needs a new thread", "ulimit -u"}, ranks.Check());
}

TEST(ConnectTimeoutTest, AnAbsentRankFailsTheOthersInTime) {
  AllowLeaks();
  fake::TheMachine().timeout_s = 1;  // ends the thread that is left behind
  NcclGroup::Options options = {};
  options.name = "world";
  options.sizes = SizesFor(kDims);
  options.timeout_s = 0.5;
  std::string id;
  ExpectOk(NewUniqueId("", "", &id));
  std::shared_ptr<NcclGroup> group;
  ExpectOk(NcclGroup::Create(options, &group));
  const Status status = group->Join(id, /*lent=*/nullptr);
  EXPECT_EQ(Code::kDeadlineExceeded, status.code()) << status.message();
  Sleep(1.5);
  EXPECT_EQ(1u, fake::TakeViolations().size());
}

}  // namespace
}  // namespace ep::nccl
