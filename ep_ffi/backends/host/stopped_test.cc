// SPDX-License-Identifier: Apache-2.0

// Tests the host backend between processes that get SIGSTOP and SIGCONT.

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include "ep_ffi/backends/host/testing/processes.h"
#include "ep_ffi/core/clock.h"
#include "ep_ffi/testing/expect.h"
#include "ep_ffi/testing/samples.h"

namespace ep::host {
namespace {

using testing::Random;
using testing::Uniform;

constexpr double kLongS = 30;  // longer than any wait in this test
constexpr double kShortS = 1;
constexpr int32_t kStopped = 2;

// Sends SIGCONT until the stopped rank has posted more than `posts` ops: a
// single SIGCONT may arrive before the rank has stopped.
void Wake(int64_t posts, Rank& rank) {
  const Record& its = rank.records()[kStopped];
  for (int i = 0; i < 1000 && its.posted <= posts; ++i) {
    kill(its.pid, SIGCONT);
    usleep(10000);
  }
}

TEST(StoppedTest, AnyRankMayStopAtAnyMoment) {
  Job job;
  ExpectNothingSaid(job.Run([](Rank& rank) {
    rank.Bootstrap(kLongS);
    Random random(1);
    while (rank.num_posts() < 300 / kFewer) {
      const pid_t pid = rank.records()[Uniform(random, 1, kNumRanks - 1)].pid;
      if (rank.rank() == 0) kill(pid, SIGSTOP);
      rank.Post();
      if (rank.rank() == 0) {
        usleep(Uniform(random, 0, 3000));
        kill(pid, SIGCONT);
      }
      rank.Wait();
    }
    return rank.Close();
  }));
}

// All ranks fail at the timeout, including the stopped rank. Afterwards the
// group works again.
TEST(StoppedTest, TheErrorNamesARankThatStopsTooLong) {
  for (int64_t op = 0; op < kNumOps && !HasFailure(); ++op) {
    Job job;
    const auto endings = job.Run([op](Rank& rank) {
      rank.Bootstrap(kShortS);
      while (rank.num_posts() < op) rank.Next();
      const double begin = Now();
      if (rank.rank() == kStopped) raise(SIGSTOP);
      // Ops that other ranks have posted may complete before the error.
      while (rank.status().ok() && rank.num_posts() < kNumOps) rank.Next();
      const double seconds = Now() - begin;
      EXPECT_GE(seconds, kShortS / 2);  // timeout_s starts at the first post
      EXPECT_LT(seconds, 10 * kShortS);
      if (rank.rank() == 0) {
        rank.WaitForOthers(kStopped, [](auto& r) { return r.failed > 0; });
        Wake(op, rank);
      }
      const std::string said = rank.status().message();
      rank.NextStep();
      for (int64_t i = 0; i < 2 * kNumOps; ++i) rank.Next();
      EXPECT_TRUE(rank.status().ok()) << rank.status().message();
      rank.Close();
      return said;
    });
    const std::string where = OpName(static_cast<Op>(op), testing::kLayerName);
    const std::string whom = StrCat(
        "rank 0 (process 0), rank 1 (process 1), rank 3 (process 3) "
        "waited timeout_s = ",
        kShortS, " s for rank ", kStopped, " (process ", kStopped, ")");
    for (int32_t r = 0; r < kNumRanks; ++r) {
      EXPECT_EQ(0, endings[r].status);
      if (r == kStopped) continue;  // the stopped rank may get another error
      testing::ExpectIn(endings[r].said, {where, whom});
    }
  }
}

}  // namespace
}  // namespace ep::host
