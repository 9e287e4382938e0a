// SPDX-License-Identifier: Apache-2.0

// Tests one real process of a group. The test itself sends the messages of the
// peers: in rare orders, and with invalid posts.

#include "ep_ffi/backends/host/engine/exchanges.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <future>

#include "ep_ffi/backends/host/testing/sockets.h"
#include "ep_ffi/testing/expect.h"
#include "ep_ffi/testing/plans.h"
#include "ep_ffi/testing/ranks.h"

namespace ep::host {
namespace {

constexpr int32_t kRanks = 4;  // one per process; only rank 0 runs our code
constexpr int64_t kWidth = 2;  // of the row that each rank posts

// Each rank has a token, which chooses all ranks.
constexpr PlanDims kDims = {
    /*num_experts=*/kRanks, /*ep_size=*/kRanks,
    /*num_tokens=*/1,       /*top_k=*/kRanks,
    /*capacity=*/kRanks,    /*alignment=*/1,
    /*drop=*/false};

const std::vector<std::byte>& PlanOfRank0() {
  static const auto* plan = new testing::BuiltPlan(
      kDims, 0,
      testing::SortAll(kDims, testing::Choices(kRanks, {0, 1, 2, 3})));
  return plan->mem;
}

// The buffers of an ep_combine of rank 0. Its output is the sum of the first
// slots of all ranks.
struct Combine {
  std::shared_ptr<Job> MakeJob(Call call) {
    const std::vector<std::byte>& mem = PlanOfRank0();
    call.op = Op::kCombine;
    call.site = &site;
    const auto job =
        std::make_shared<Job>(Job{Job::kGather, std::move(call), kDims});
    job->mem = {mem.data(), static_cast<int64_t>(mem.size())};
    job->in = {reinterpret_cast<const std::byte*>(slots), kDims.capacity,
               kWidth, DType::kFloat32};
    job->out = {reinterpret_cast<std::byte*>(sum), kDims.num_tokens, kWidth,
                DType::kFloat32};
    testing::ExpectOk(job->Open());
    return job;
  }

  Site site = {};
  float slots[kRanks][kWidth] = {{1, 1}};
  float sum[kWidth] = {};
};

class ExchangeTest : public ::testing::Test {
 protected:
  explicit ExchangeTest(double timeout_s = 30) : peers_(kRanks) {
    Sockets sockets(kRanks);
    for (int32_t p = 0; p < kRanks; ++p) {
      testing::ExpectOk(Peers::Create(TopologyOf(p, kRanks), sockets.Take(p),
                                      /*tick_s=*/0.05, &peers_[p]));
    }
    exchanges_ =
        Exchanges::Create({"group", timeout_s,
                           [last = failed_run_](int64_t run_id, const Status&) {
                             *last = run_id;
                           }},
                          std::move(peers_[0]));
  }

  // Posts rows {value, value} as rank `rank`. `forge` may change the message.
  void PeerPosts(
      int32_t rank, int64_t run_id, float value,
      const std::function<void(Message*)>& forge = [](Message*) {}) {
    Combine combine;
    for (float& element : combine.slots[0]) element = value;
    Segment* segment;
    ASSERT_TRUE(
        peers_[rank]->Acquire(sizeof(combine.slots), {0}, &segment).ok());
    std::memcpy(segment->memory.data(), combine.slots, sizeof(combine.slots));
    Message message = {};
    message.rank = rank;
    message.launch.run_id = run_id;
    message.segment = segment->id;
    message.signature = combine.MakeJob({})->signature();
    forge(&message);
    peers_[rank]->SendPost({0}, message, "");
  }

  void AllPeersPost(int64_t run_id, float value) {
    for (int32_t rank : {1, 2, 3}) PeerPosts(rank, run_id, value);
  }

  void PeerCloses(int32_t rank) {
    peers_[rank]->SendBye("");
    // Starts new runs until one fails because the peer has closed the group.
    for (int i = 0; i < 1000; ++i) {
      std::future<Result> probe = Post(--last_probe_);
      if (probe.wait_for(std::chrono::milliseconds(10)) ==
          std::future_status::ready) {
        return ExpectError(Code::kUnavailable, "finalized", std::move(probe));
      }
    }
    ADD_FAILURE() << "no peer has closed";
  }

  // Posts a row {1, 1} as rank 0. The result is the sum of all ranks' elements.
  struct Result {
    Status status;
    float sum = 0;
  };
  std::future<Result> Post(int64_t run_id, uint64_t site_id = 0) {
    struct State {
      Combine combine;
      std::promise<Result> result;
    };
    auto state = std::make_shared<State>();
    state->combine.site.id = site_id;
    Call call = {};
    call.run_id = run_id;
    call.done = [state](Status status) {
      const float* sum = state->combine.sum;
      state->result.set_value({status, sum[0] + sum[1]});
    };
    std::future<Result> result = state->result.get_future();
    exchanges_->Post(state->combine.MakeJob(std::move(call)));
    return result;
  }

  static Result Get(std::future<Result> future) {
    if (future.wait_for(std::chrono::seconds(20)) ==
        std::future_status::ready) {
      return future.get();
    }
    return {Status(Code::kInternal, "the op did not complete"), 0};
  }

  static void ExpectSum(float expected, std::future<Result> future) {
    const Result result = Get(std::move(future));
    testing::ExpectOk(result.status);
    EXPECT_EQ(expected, result.sum);
  }

  static void ExpectError(Code code, const std::string& word,
                          std::future<Result> future) {
    testing::ExpectFailure({code, {word}}, Get(std::move(future)).status);
  }

  // The id of the last failed run, which a thread may write after the test.
  std::shared_ptr<std::atomic<int64_t>> failed_run_ =
      std::make_shared<std::atomic<int64_t>>(0);
  std::vector<std::unique_ptr<Peers>> peers_;  // peers_[0] is null
  std::shared_ptr<Exchanges> exchanges_;

 private:
  int64_t last_probe_ = 0;
};

TEST_F(ExchangeTest, PostsOfALaterIterationWait) {
  PeerPosts(1, 7, 10);
  PeerPosts(1, 7, 20);
  PeerPosts(2, 7, 100);
  PeerPosts(3, 7, 1000);
  PeerPosts(3, 7, 2000);
  ExpectSum(2222, Post(7));
  PeerPosts(2, 7, 200);
  ExpectSum(4442, Post(7));
}

TEST_F(ExchangeTest, APeerMayCloseAfterItsPost) {
  PeerPosts(1, 7, 10);
  PeerCloses(1);
  PeerPosts(2, 7, 100);
  PeerPosts(3, 7, 1000);
  ExpectSum(2222, Post(7));
}

TEST_F(ExchangeTest, APeerMayCloseBeforeOtherPeersPost) {
  std::future<Result> mine = Post(7);
  PeerPosts(1, 7, 10);
  PeerCloses(1);
  PeerPosts(2, 7, 100);
  PeerCloses(2);
  PeerPosts(3, 7, 1000);
  ExpectSum(2222, std::move(mine));
}

TEST_F(ExchangeTest, InvalidPostsFailTheirRun) {
  const std::function<void(Message*)> forgeries[] = {
      [](Message* m) { m->domain = -1; },
      [](Message* m) { m->domain = 1; },
      [](Message* m) { m->rank = -1; },
      [](Message* m) { m->rank = 0; },  // a rank of another process
      [](Message* m) { m->rank = kRanks; },
      [](Message* m) { m->segment = 12345; },
      [](Message* m) { m->signature[Signature::kSecondBytes] = 1 << 30; },
  };
  int64_t run_id = 100;
  for (const auto& forge : forgeries) {
    SCOPED_TRACE(run_id);
    std::future<Result> mine = Post(++run_id);
    PeerPosts(1, run_id, 10, forge);
    ExpectError(Code::kInternal, "process 1", std::move(mine));
  }
  AllPeersPost(7, 10);
  ExpectSum(62, Post(7));
}

// XLA's fingerprint of a program may differ between processes.
TEST_F(ExchangeTest, LaunchesMeetByNumberWhereRunIdsDiffer) {
  constexpr int64_t kElsewhere = int64_t{1} << 40;
  for (int64_t number : {0, 1, 2}) {
    for (int32_t rank : {1, 2, 3}) {
      PeerPosts(rank, kElsewhere + number, 10 + number,
                [&](Message* m) { m->launch.number = number; });
    }
  }
  for (int64_t number : {0, 2, 1}) ExpectSum(62 + 6 * number, Post(7 + number));
}

class LateTest : public ExchangeTest {
 protected:
  LateTest() : ExchangeTest(/*timeout_s=*/1.5) {}
};

TEST_F(LateTest, TheErrorNamesAMissingRankAndItsLastOp) {
  for (int32_t rank : {1, 3}) PeerPosts(rank, 7, 10);
  ExpectError(Code::kDeadlineExceeded,
              "rank 1 (process 1), rank 3 (process 3) waited timeout_s = 1.5 s "
              "for rank 2 (process 2) that has run no op yet",
              Post(7));
  for (int32_t rank : {2, 3}) PeerPosts(rank, 8, 10);
  ExpectError(Code::kDeadlineExceeded,
              "rank 1 (process 1) whose last op was ep_combine(layer \"\")",
              Post(8));
}

// The fingerprints of two programs are nearer than Launches can tell apart.
TEST_F(LateTest, ALaunchTakenForAnotherProgramIsAnError) {
  std::future<Result> other = Post(1000, /*site_id=*/5);
  AllPeersPost(1005, 10);  // their run id of the launch below
  ExpectError(Code::kDeadlineExceeded, "the same op: in another iteration",
              Post(int64_t{1} << 40));
}

// Only the process of the first waiting rank warns, and only once.
TEST_F(LateTest, AWarningNamesAMissingRankBeforeTheError) {
  const std::string words =
      "rank 0 (process 0), rank 1 (process 1) waited a third of timeout_s = "
      "1.5 s for rank 2 (process 2) that has run no op yet, rank 3";
  ::testing::internal::CaptureStderr();
  PeerPosts(1, 7, 10);
  std::future<Result> mine = Post(7);
  EXPECT_EQ(std::future_status::timeout,
            mine.wait_for(std::chrono::milliseconds(1000)));
  const std::string log = ::testing::internal::GetCapturedStderr();
  testing::ExpectIn(log, {words});
  ExpectError(Code::kDeadlineExceeded, "waited timeout_s", std::move(mine));

  ::testing::internal::CaptureStderr();
  ExpectError(Code::kDeadlineExceeded, "waited timeout_s", Post(8));
  EXPECT_EQ(std::string::npos,
            ::testing::internal::GetCapturedStderr().find("a third"));
}

TEST_F(LateTest, AProcessThatOthersWaitForDoesNotWarn) {
  ::testing::internal::CaptureStderr();
  AllPeersPost(7, 10);
  usleep(1000 * 1000);
  EXPECT_EQ("", ::testing::internal::GetCapturedStderr());
  ExpectSum(62, Post(7));
}

TEST_F(ExchangeTest, ClosingReportsAnOpThatThisProcessMissed) {
  AllPeersPost(7, 10);
  ExpectSum(62, Post(7));
  PeerPosts(1, 12, 10, [](Message* m) { m->launch.number = 5; });
  peers_[1]->SendFail({0, 12, 5}, Status(Code::kInternal, "late"));
  while (*failed_run_ != 12) usleep(1000);
  testing::ExpectFailure(
      {Code::kFailedPrecondition, {"rank 1 (process 1) ran ep_combine"}},
      exchanges_->Close());
}

TEST_F(ExchangeTest, ClosingDoesNotRepeatAReportedError) {
  AllPeersPost(7, 10);
  ExpectSum(62, Post(7));
  PeerPosts(1, 8, 10, [](Message* m) { m->launch.site_id = 77; });
  peers_[1]->SendFail({0, 8, 1}, Status(Code::kInternal, "reported"));
  ExpectError(Code::kInternal, "reported", Post(8));
  testing::ExpectOk(exchanges_->Close());
}

// For example, a rank may not post fewer bytes than its peers read.
TEST_F(ExchangeTest, DifferentSignaturesFailTheirRun) {
  for (int field = 0; field < Signature::kNumFields; ++field) {
    SCOPED_TRACE(field);
    std::future<Result> mine = Post(field);
    PeerPosts(1, field, 10);
    PeerPosts(2, field, 10, [&](Message* m) { ++m->signature.values[field]; });
    PeerPosts(3, field, 10);
    ExpectError(Code::kFailedPrecondition, "disagree", std::move(mine));
  }
}

}  // namespace
}  // namespace ep::host
