// SPDX-License-Identifier: Apache-2.0

// Unit tests of Work, Launches, Pending and Workers.

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <limits>
#include <thread>
#include <utility>
#include <vector>

#include "ep_ffi/backends/host/engine/exchange.h"
#include "ep_ffi/backends/host/engine/launches.h"
#include "ep_ffi/backends/host/engine/pending.h"
#include "ep_ffi/backends/host/engine/workers.h"
#include "ep_ffi/backends/host/testing/sockets.h"
#include "ep_ffi/core/clock.h"
#include "ep_ffi/testing/expect.h"
#include "ep_ffi/testing/plans.h"
#include "ep_ffi/testing/ranks.h"

namespace ep::host {
namespace {

constexpr PlanDims kDims = {/*num_experts=*/3, /*ep_size=*/3,
                            /*num_tokens=*/4,  /*top_k=*/1,
                            /*capacity=*/4,    /*alignment=*/1,
                            /*drop=*/false};
constexpr int64_t kWidth = 64 << 10;  // each row is a chunk

// An exchange whose ranks 0 and 2 copy their tokens to their slots. Rank 1 has
// no chunk.
struct Copies {
  Copies() {
    const std::vector<SortedChoices> sorted =
        testing::SortAll(kDims, {{0, 0, 0, 0}, {-1, -1, -1, -1}, {2, 2, 2, 2}});
    for (int32_t r = 0; r < kDims.ep_size; ++r) {
      mems[r] = testing::BuiltPlan(kDims, r, sorted).mem;
      tokens[r].assign(kDims.num_tokens * kWidth, 1.0f + r);
      slots[r].resize(tokens[r].size());
      const auto job = std::make_shared<Job>();
      job->kind = Job::kScatter;
      job->call.site = &site;
      job->dims = kDims;
      job->rank = r;
      job->mem = {mems[r].data(), static_cast<int64_t>(mems[r].size())};
      job->in = {reinterpret_cast<const std::byte*>(tokens[r].data()),
                 kDims.num_tokens, kWidth, DType::kFloat32};
      job->out = {reinterpret_cast<std::byte*>(slots[r].data()), kDims.capacity,
                  kWidth, DType::kFloat32};
      testing::ExpectOk(job->Open());
      exchange->parts.push_back(
          {/*is_posted=*/true, {}, job->signature(), job->arrays(), job});
    }
  }

  Site site = {};
  std::vector<std::byte> mems[3];
  std::vector<float> tokens[3], slots[3];
  ExchangePtr exchange = std::make_shared<Exchange>();
};

TEST(WorkTest, EachChunkRunsAndOneThreadEndsTheLast) {
  const Copies copies;
  Work work(copies.exchange);
  std::atomic<int64_t> num_last{0};
  testing::ForEachRank(4, [&](int64_t) { num_last += work.Run(); });
  EXPECT_EQ(1, num_last);
  EXPECT_TRUE(work.status().ok());
  for (int r : {0, 2}) EXPECT_EQ(copies.tokens[r], copies.slots[r]);
}

TEST(WorkTest, KeepsTheFirstFailureAndRunsTheOtherChunks) {
  Copies copies;
  const size_t recv = 64 + kDims.num_choices() * sizeof(Route);
  for (int32_t slot : {1, 2}) {
    const Route bad = {0, 70 + slot};
    std::memcpy(&copies.mems[0][recv + slot * sizeof(Route)], &bad,
                sizeof(bad));
  }
  Work work(copies.exchange);
  EXPECT_TRUE(work.Run());
  EXPECT_EQ(1, copies.slots[0].front());
  EXPECT_EQ(1, copies.slots[0].back());
  EXPECT_EQ(copies.tokens[2], copies.slots[2]);
  testing::ExpectFailure(
      {Code::kInvalidArgument, {"ep_prepare(layer \"\"): ", "to row 71 of"}},
      work.status());
}

TEST(WorkTest, LackOfMemoryIsAFailure) {
  const Copies copies;
  auto job = std::make_shared<Job>();
  job->kind = Job::kGather;
  job->dims.num_tokens = 1;
  job->dims.top_k = int64_t{1} << 60;  // a sum of more terms than fit
  job->call.site = &copies.site;
  copies.exchange->parts[1].job = job;
  Work work(copies.exchange);
  EXPECT_TRUE(work.Run());
  EXPECT_EQ(Code::kResourceExhausted, work.status().code());
}

constexpr uint64_t kSite = 5;

Launch Name(Launches& launches, uint64_t site_id, int64_t run_id) {
  Launches::Actions due;
  return launches.Name(site_id, run_id, &due);
}

TEST(LaunchesTest, UsesRunIdsThatAreNear) {
  Launches here, there;
  (void)Name(here, kSite, 1001);
  // The peer saw run id 1002 first, and counts launches from 1002.
  for (int64_t run_id : {1002, 1001, 1003}) {
    EXPECT_EQ(run_id, here.RunId(Name(there, kSite, run_id)));
  }
}

TEST(LaunchesTest, MatchesRunIdsThatAreFarByNumber) {
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  // The last value is 2^19 below the run id of `here`: farther than kNear.
  for (int64_t first : {int64_t{1} << 40, kMin, kMax - 10, -kMax / 2,
                        kMax / 2 + 1 - (1 << 19)}) {
    Launches here, there;
    (void)Name(here, kSite, kMax / 2 + 1);
    for (int64_t i = 0; i < 3; ++i) {
      EXPECT_EQ(kMax / 2 + 1 + i, here.RunId(Name(there, kSite, first + i)));
    }
  }
}

TEST(LaunchesTest, RunIdsStayNearAfterManyLaunches) {
  constexpr uint64_t kOtherSite = 6;
  Launches here;
  for (int64_t run_id = 0; run_id < 10'000; ++run_id) {
    (void)Name(here, kSite, run_id);
  }
  // The op at kOtherSite runs rarely: the peer first runs it in launch 10'001.
  EXPECT_EQ(10'001, here.RunId({kOtherSite, 10'001, 0}));
  EXPECT_FALSE(here.RunId({kOtherSite, 1, 0}).has_value());
}

// An op of two executables has two sites, whose launches are unrelated.
TEST(LaunchesTest, ExecutablesAreLaunchedInAnyOrder) {
  constexpr int64_t kFirst = int64_t{1} << 40, kSecond = 1000;
  Launches here, there;
  (void)Name(here, kSite, kFirst);
  const Launch launch = Name(there, kSite + 1, kSecond);
  EXPECT_EQ(kFirst, here.RunId(Name(there, kSite, kFirst)));
  EXPECT_FALSE(here.RunId(launch).has_value());
  (void)Name(here, kSite + 1, kSecond);
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

// Process 0 shares domain 0 with process 1, and domain 1 with process 2.
class PendingTest : public ::testing::Test {
 protected:
  PendingTest() {
    topology_.ep_size = 2;
    topology_.members = {{0, 0}, {1, 1}, {0, 2}, {2, 3}};
  }

  // Posts as the first rank of a domain.
  std::string Post(int32_t domain, int64_t run_id) {
    ExchangePtr complete;
    return pending_.Add({domain, 0, run_id}, 0, Part(), &complete).message();
  }

  // Records a process that left. Returns the reason.
  std::string Leave(int32_t process, bool is_orderly, const std::string& text,
                    const std::string& its_reason = "") {
    return pending_.Leave(process, is_orderly, Gone(text), its_reason, &failed_)
        .message();
  }

  Topology topology_ = TopologyOf(/*process=*/0, /*num_processes=*/4);
  Pending pending_{topology_};
  std::vector<ExchangePtr> failed_;  // by the latest event
};

TEST_F(PendingTest, ALaterPostDoesNotRestartTheWait) {
  topology_.ep_size = 4;  // one domain of all members
  EXPECT_EQ("", Post(0, 1));
  const double time = Now();
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  ExchangePtr complete;
  testing::ExpectOk(pending_.Add({0, 0, 1}, 2, Part(), &complete));
  EXPECT_EQ(nullptr, complete);
  EXPECT_EQ(1, pending_.FindBegunBy(time).size());
}

TEST_F(PendingTest, RemembersTheLatestFailedRuns) {
  EXPECT_EQ("", Post(0, 999));
  for (int64_t run = 0; run < 1000; ++run) {
    EXPECT_TRUE(pending_.FailRun(run, Gone("failed"), &failed_));
    EXPECT_EQ(run == 999, failed_.size() == 1);
  }
  EXPECT_FALSE(pending_.FailRun(900, Gone("again"), &failed_));
  EXPECT_EQ("", Post(0, 0));
  EXPECT_EQ("failed", Post(0, 900));
}

TEST_F(PendingTest, OtherProcessesContinueAfterAnOrderlyClose) {
  EXPECT_EQ("", Post(0, 1));
  EXPECT_EQ("", Post(1, 1));
  EXPECT_EQ("closed", Leave(1, /*is_orderly=*/true, "closed"));
  ASSERT_EQ(1, failed_.size());
  EXPECT_EQ(0, failed_[0]->key.domain);
  testing::ExpectIn(Post(0, 2), {"closed"});
  EXPECT_EQ("", Post(1, 2));
  EXPECT_EQ("", pending_.LeavingReason());
}

TEST_F(PendingTest, TheFirstDeathExplainsLaterEvents) {
  EXPECT_EQ("", Post(1, 1));
  EXPECT_EQ("1 died", Leave(1, /*is_orderly=*/false, "1 died"));
  testing::ExpectIn(Post(1, 2), {"1 died"});  // a new exchange
  ExchangePtr complete;
  testing::ExpectOk(pending_.Add({1, 0, 1}, 1, Part(), &complete));
  EXPECT_NE(nullptr, complete);
  EXPECT_EQ("1 died", Leave(2, /*is_orderly=*/true, "2 closed"));
  EXPECT_EQ("1 died", Leave(3, /*is_orderly=*/false, "3 died"));
  (void)pending_.Close(Status(Code::kFailedPrecondition, "finalized"));
  testing::ExpectIn(Post(1, 3), {"finalized"});
}

TEST_F(PendingTest, AClosingProcessMayReportADeathFirst) {
  EXPECT_EQ("1 died", Leave(2, /*is_orderly=*/true, "2 closed", "1 died"));
  testing::ExpectIn(Post(0, 1), {"1 died"});
  EXPECT_EQ("1 died", pending_.LeavingReason());
}

TEST_F(PendingTest, AClosingProcessReportsARunThatLackedAnotherProcess) {
  const Status bad_ids(Code::kInvalidArgument, "bad ids");
  EXPECT_TRUE(pending_.FailRun(1, Gone("2 closed"), &failed_));
  EXPECT_TRUE(pending_.FailRun(2, bad_ids, &failed_));
  EXPECT_EQ("2 closed", pending_.LeavingReason());
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
