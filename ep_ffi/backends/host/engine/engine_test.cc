// SPDX-License-Identifier: Apache-2.0

// Unit tests of Batch, Launches, Outcomes, Pending and Workers.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <limits>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "ep_ffi/backends/host/engine/batch.h"
#include "ep_ffi/backends/host/engine/launches.h"
#include "ep_ffi/backends/host/engine/outcomes.h"
#include "ep_ffi/backends/host/engine/pending.h"
#include "ep_ffi/backends/host/engine/workers.h"
#include "ep_ffi/core/clock.h"
#include "ep_ffi/testing/ranks.h"

namespace ep::host {
namespace {

// Makes an exchange of local ranks with these numbers of chunks.
ExchangePtr MakeExchange(
    const std::vector<int64_t>& num_chunks,
    const std::function<Status(int64_t rank, int64_t chunk)>& run) {
  auto exchange = std::make_shared<Exchange>();
  for (size_t rank = 0; rank < num_chunks.size(); ++rank) {
    Part& part = exchange->parts.emplace_back();
    part.is_posted = true;
    part.done = [](const Status&) {};
    part.contribution.num_chunks = num_chunks[rank];
    part.contribution.run = [run, rank](const std::vector<Arrays>&,
                                        int64_t chunk) {
      return run(rank, chunk);
    };
  }
  return exchange;
}

TEST(BatchTest, EachChunkRunsOnceAndOneThreadEndsTheLast) {
  const std::vector<int64_t> num_chunks = {3, 0, 100, 1};
  std::vector<std::vector<std::atomic<int>>> runs;
  for (int64_t n : num_chunks) runs.emplace_back(n);
  Batch batch(MakeExchange(num_chunks, [&](int64_t rank, int64_t chunk) {
    ++runs[rank][chunk];
    return Status();
  }));
  std::atomic<int> num_last{0};
  testing::ForEachRank(4, [&](int64_t) { num_last += batch.Work(); });
  EXPECT_EQ(1, num_last);
  EXPECT_TRUE(batch.status().ok());
  for (const auto& rank : runs) {
    for (const auto& chunk : rank) EXPECT_EQ(1, chunk);
  }
}

TEST(BatchTest, KeepsTheFirstFailureAndRunsTheOtherChunks) {
  int num_runs = 0;
  Batch batch(MakeExchange({2, 2}, [&](int64_t rank, int64_t chunk) {
    ++num_runs;
    return rank + chunk == 0
               ? Status()
               : Status(Code::kInvalidArgument, StrCat("bad ", rank, chunk));
  }));
  EXPECT_TRUE(batch.Work());
  EXPECT_EQ(4, num_runs);
  EXPECT_EQ("ep_prepare(layer \"\"): bad 01", batch.status().message());
}

TEST(BatchTest, LackOfMemoryIsAFailure) {
  Batch batch(MakeExchange({3}, [&](int64_t, int64_t chunk) {
    if (chunk == 1) throw std::bad_alloc();
    return Status();
  }));
  EXPECT_TRUE(batch.Work());
  EXPECT_EQ(Code::kResourceExhausted, batch.status().code());
}

constexpr uint64_t kSite = 5;

TEST(LaunchesTest, UsesRunIdsThatAreNear) {
  Launches here, there;
  (void)here.Name(kSite, 1001);
  // The peer saw run id 1002 first, and counts launches from 1002.
  for (int64_t run_id : {1002, 1001, 1003}) {
    EXPECT_EQ(run_id, here.RunId(there.Name(kSite, run_id)));
  }
}

TEST(LaunchesTest, MatchesRunIdsThatAreFarByNumber) {
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  // The last value is 2^19 below the run id of `here`: farther than kNear.
  for (int64_t first : {int64_t{1} << 40, kMin, kMax - 10, -kMax / 2,
                        kMax / 2 + 1 - (1 << 19)}) {
    Launches here, there;
    (void)here.Name(kSite, kMax / 2 + 1);
    for (int64_t i = 0; i < 3; ++i) {
      EXPECT_EQ(kMax / 2 + 1 + i, here.RunId(there.Name(kSite, first + i)));
    }
  }
}

TEST(LaunchesTest, RunIdsStayNearAfterManyLaunches) {
  constexpr uint64_t kOtherSite = 6;
  Launches here;
  for (int64_t run_id = 0; run_id < 10'000; ++run_id) {
    (void)here.Name(kSite, run_id);
  }
  // The op at kOtherSite runs rarely: the peer first runs it in launch 10'001.
  EXPECT_EQ(10'001, here.RunId({kOtherSite, 10'001, 0}));
  EXPECT_FALSE(here.RunId({kOtherSite, 1, 0}).has_value());
}

// An op of two executables has two sites, whose launches are unrelated.
TEST(LaunchesTest, ExecutablesAreLaunchedInAnyOrder) {
  constexpr int64_t kFirst = int64_t{1} << 40, kSecond = 1000;
  Launches here, there;
  (void)here.Name(kSite, kFirst);
  const Launch launch = there.Name(kSite + 1, kSecond);
  EXPECT_EQ(kFirst, here.RunId(there.Name(kSite, kFirst)));
  EXPECT_FALSE(here.RunId(launch).has_value());
  (void)here.Name(kSite + 1, kSecond);
  EXPECT_EQ(kSecond, here.RunId(launch));
}

TEST(LaunchesTest, ALaunchReachesEarlierLaunches) {
  Launches launches;
  EXPECT_FALSE(launches.HasReached({7, 100, 0}));
  launches.Reach({7, 102, 2});
  launches.Reach({7, 101, 1});
  EXPECT_TRUE(launches.HasReached({7, 100, 0}));
  EXPECT_TRUE(launches.HasReached({7, 102, 2}));
  EXPECT_FALSE(launches.HasReached({7, 103, 3}));
  EXPECT_FALSE(launches.HasReached({8, 100, 0}));
}

Status Gone(const std::string& text) {
  return Status(Code::kUnavailable, text);
}

TEST(OutcomesTest, RemembersTheLatestFailedRuns) {
  Outcomes outcomes;
  for (int64_t run = 0; run < 1000; ++run) {
    EXPECT_TRUE(outcomes.FailRun(run, Gone("")));
  }
  EXPECT_TRUE(outcomes.OfRun(0).ok());
  EXPECT_FALSE(outcomes.OfRun(900).ok());
}

TEST(OutcomesTest, OtherProcessesContinueAfterAnOrderlyClose) {
  Outcomes outcomes;
  EXPECT_EQ(
      "closed",
      outcomes.Leave(1, /*is_orderly=*/true, Gone("closed"), "").message());
  EXPECT_EQ("closed", outcomes.OfProcess(1).message());
  EXPECT_TRUE(outcomes.OfProcess(2).ok());
  EXPECT_TRUE(outcomes.OfNewExchange().ok());
  EXPECT_EQ("", outcomes.LeavingReason());
}

TEST(OutcomesTest, TheFirstDeathExplainsLaterEvents) {
  Outcomes outcomes;
  EXPECT_EQ(
      "1 died",
      outcomes.Leave(1, /*is_orderly=*/false, Gone("1 died"), "").message());
  EXPECT_EQ("1 died", outcomes.OfNewExchange().message());
  EXPECT_TRUE(outcomes.OfGroup().ok());
  EXPECT_TRUE(outcomes.OfProcess(2).ok());
  (void)outcomes.Leave(2, /*is_orderly=*/true, Gone("2 closed"), "");
  (void)outcomes.Leave(3, /*is_orderly=*/false, Gone("3 died"), "");
  for (int32_t process : {1, 2, 3}) {
    EXPECT_EQ("1 died", outcomes.OfProcess(process).message());
  }
  outcomes.Close(Status(Code::kFailedPrecondition, "finalized"));
  EXPECT_EQ("finalized", outcomes.OfGroup().message());
  EXPECT_EQ("finalized", outcomes.OfNewExchange().message());
}

TEST(OutcomesTest, AClosingProcessMayReportADeathFirst) {
  Outcomes outcomes;
  EXPECT_EQ("1 died",
            outcomes.Leave(2, /*is_orderly=*/true, Gone("2 closed"), "1 died")
                .message());
  EXPECT_EQ("1 died", outcomes.OfNewExchange().message());
  EXPECT_EQ("1 died", outcomes.LeavingReason());
}

TEST(OutcomesTest, AClosingProcessReportsARunThatLackedAnotherProcess) {
  Outcomes outcomes;
  EXPECT_TRUE(outcomes.FailRun(1, Gone("2 closed")));
  EXPECT_TRUE(outcomes.FailRun(2, Status(Code::kInvalidArgument, "bad ids")));
  EXPECT_EQ("2 closed", outcomes.LeavingReason());
}

TEST(PendingTest, ALaterPostDoesNotRestartTheWait) {
  Pending pending(/*ep_size=*/3);
  const Key key = {};
  Part part;
  part.is_posted = true;
  EXPECT_EQ(nullptr, pending.Add(key, 0, part));
  const double time = Now();
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(nullptr, pending.Add(key, 2, part));
  EXPECT_EQ(1, pending.FindBegunBy(time).size());
}

bool IsReady(const std::future<void>& future) {
  return future.wait_for(std::chrono::seconds(30)) == std::future_status::ready;
}

TEST(WorkersTest, BlockedTasksDoNotDelayOthers) {
  constexpr int kTasks = 50;
  Workers workers;
  std::promise<void> end;
  std::vector<std::promise<void>> begun(kTasks);
  const std::shared_future<void> ended = end.get_future().share();
  for (std::promise<void>& mine : begun) {
    workers.Run([&mine, ended] {
      mine.set_value();
      ended.wait();
    });
  }
  for (std::promise<void>& mine : begun) {
    EXPECT_TRUE(IsReady(mine.get_future()));
  }
  end.set_value();
}

TEST(WorkersTest, QueuedTasksRunAfterTheDestructor) {
  std::promise<void> ran;
  {
    Workers workers;
    workers.Run([&] { ran.set_value(); });
  }
  EXPECT_TRUE(IsReady(ran.get_future()));
}

// A task resumes an XLA program, whose results do not depend on the thread.
TEST(WorkersTest, TasksFlushDenormals) {
  Workers workers;
  volatile float smallest = std::numeric_limits<float>::min();
  std::promise<float> half;
  workers.Run([&] { half.set_value(smallest / 2); });
  EXPECT_EQ(0, half.get_future().get());
  EXPECT_NE(0, smallest / 2);
}

TEST(WorkersTest, ATaskMayDestroyItsWorkers) {
  auto workers = std::make_shared<Workers>();
  std::promise<void> ended;
  Workers* raw = workers.get();
  raw->Run([workers = std::move(workers), &ended]() mutable {
    workers.reset();
    ended.set_value();
  });
  EXPECT_TRUE(IsReady(ended.get_future()));
}

}  // namespace
}  // namespace ep::host
