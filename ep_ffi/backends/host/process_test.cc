// SPDX-License-Identifier: Apache-2.0

// Tests the host backend between real processes: if a rank dies, all other
// ranks fail with an error that names the dead rank. If a rank stops and
// continues, nothing fails.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "ep_ffi/backends/host/testing/processes.h"
#include "ep_ffi/core/clock.h"
#include "ep_ffi/testing/samples.h"

namespace ep::host {
namespace {

using testing::Random;
using testing::StepPtr;
using testing::Uniform;

constexpr double kTimeoutS = 30;  // longer than any wait in this test
constexpr double kSoonS = 5;

using Words = std::vector<std::string>;

std::vector<int32_t> AllBut(int32_t dead) {
  std::vector<int32_t> ranks;
  for (int32_t r = 0; r < kNumRanks; ++r) {
    if (r != dead) ranks.push_back(r);
  }
  return ranks;
}

// Bootstraps the group, and waits until all ranks have joined.
void Join(Rank& rank) {
  rank.Bootstrap(kTimeoutS);
  rank.WaitForOthers(-1, [](auto& r) { return r.joined > 0; });
}

// Closes the group, and continues in a group of the survivors.
void GoOnWithout(int32_t dead, Rank& rank) {
  rank.Close();
  rank.Bootstrap(kTimeoutS, AllBut(dead));
  for (int64_t i = 0; i < 2 * kNumOps; ++i) rank.Next();
  EXPECT_TRUE(rank.status().ok()) << rank.status().message();
  rank.Close();
}

// Runs ops until one fails because a peer died. Returns the op's error.
std::string Survive(int32_t dead, Rank& rank) {
  while (rank.status().ok()) rank.Next();
  const std::string told = rank.status().message();
  GoOnWithout(dead, rank);
  return told;
}

// Kills this rank after `us` microseconds, while the caller continues.
void DieLater(int64_t us, Way way, Rank& rank) {
  std::thread([us, way, &rank] {
    usleep(us);
    rank.Die(way);
  }).detach();
}

[[noreturn]] void WorkOn(Rank& rank) {
  while (true) rank.status().ok() ? rank.Next() : rank.NextStep();
}

std::string Name(int64_t op) {
  return OpName(static_cast<Op>(op % kNumOps), testing::kLayerName);
}

// The time of a death, relative to an op.
enum When {
  kBefore,  // the rank has completed the previous op
  kDuring,  // all other ranks wait for the rank
  kPosted,  // only this rank has posted
  kAfter,   // all ranks have completed the op
};

class DeathTest : public ::testing::TestWithParam<Way> {
 protected:
  // Expects that every survivor exited normally and soon got an error. For each
  // element of `words`, the error contains at least one of its strings.
  void ExpectTold(int32_t dead, const Job& job,
                  const std::vector<Ending>& endings,
                  const std::vector<Words>& words) {
    for (int32_t r : AllBut(dead)) {
      const std::string& said = endings[r].said;
      EXPECT_EQ(0, endings[r].status) << "rank " << r;
      for (const Words& some : words) {
        EXPECT_TRUE(std::any_of(
            some.begin(), some.end(),
            [&](const auto& w) { return said.find(w) != std::string::npos; }))
            << "rank " << r << " does not say \"" << some[0] << "\": " << said;
      }
      if (words.empty()) continue;
      EXPECT_LT((*job.records)[r].failed - (*job.records)[dead].died, kSoonS);
    }
  }

  static Words Died(int32_t dead) {
    return {StrCat("rank ", dead, " (process ", dead, ") died")};
  }

  Random random_{static_cast<uint64_t>(GetParam())};
};

TEST_P(DeathTest, ARankMayDieInAnyOp) {
  for (int64_t op = 0; op < 2 * kNumOps && !HasFailure(); ++op) {
    for (When when : {kBefore, kDuring, kPosted, kAfter}) {
      const int32_t dead = op % kNumRanks;
      SCOPED_TRACE(StrCat("op ", op, ", when ", when));
      Job job;
      const auto endings = job.Run([&](Rank& rank) {
        Join(rank);
        while (rank.num_posts() < op) rank.Next();
        if (rank.rank() != dead) {
          while (when == kPosted && rank.records()[dead].posted <= op) {
            usleep(50);
          }
          return Survive(dead, rank);
        }
        if (when == kDuring) {
          rank.WaitForOthers(dead, [&](auto& r) { return r.posted > op; });
        }
        if (when == kPosted) rank.Post();
        if (when == kAfter) {
          rank.Next();
          rank.WaitForOthers(dead, [&](auto& r) { return r.completed > op; });
        }
        rank.Die(GetParam());
      });
      // If the rank dies after its post, the op completes, unless other ranks
      // had not connected yet.
      Words ops, who = Died(dead);
      if (op == 0) {  // other ranks may still be connecting
        ops.push_back("connected");
        who.push_back(StrCat("process ", dead, " died while"));
      }
      if (when < kPosted || (when == kPosted && op == 0)) {
        ops.push_back(Name(op));
      }
      if (when >= kPosted) ops.push_back(Name(op + 1));
      ExpectTold(dead, job, endings, {ops, who});
    }
  }
}

TEST_P(DeathTest, ARankMayDieAtAnyMoment) {
  for (int i = 0; i < 67 / kFewer && !HasFailure(); ++i) {
    const int32_t dead = Uniform(random_, 0, kNumRanks - 1);
    const int64_t us = Uniform(random_, 0, 10000);
    SCOPED_TRACE(StrCat("rank ", dead, " after ", us, " us"));
    Job job;
    const auto endings = job.Run([&](Rank& rank) {
      Join(rank);
      if (rank.rank() != dead) return Survive(dead, rank);
      DieLater(us, GetParam(), rank);
      WorkOn(rank);
    });
    ExpectTold(dead, job, endings, {{"ep_"}, Died(dead)});
  }
}

// Two ops are independent. If a rank learns of a death while it posts to the
// first op or waits in it, the rank does not post to the second op.
TEST_P(DeathTest, ARankMayDieAfterPostingALaterOp) {
  const int32_t dead = 2, giving_up = 3;
  for (bool late : {false, true}) {
    Job job;
    const auto endings = job.Run([&](Rank& rank) {
      rank.Bootstrap(/*timeout_s=*/2 * kSoonS);
      rank.Next();
      if (late && rank.rank() == giving_up) {
        EXPECT_TRUE(
            WaitFor(kSoonS, [&] { return rank.records()[dead].died > 0; }));
        usleep(50000);
      }
      std::vector<StepPtr> steps;
      if (rank.rank() == giving_up || (rank.rank() != dead && !late)) {
        steps.push_back(rank.Post(Op::kDispatch, {9, 1}));
      }
      if (rank.rank() != giving_up) {
        steps.push_back(rank.Post(Op::kDispatch, {9, 2}));
      }
      if (rank.rank() == dead) rank.Die(GetParam());
      std::string said;
      for (const StepPtr& step : steps) {
        said = step->Wait(rank.rank()).message();
      }
      rank.record().failed = Now();
      rank.WaitForOthers(dead, [](auto& r) { return r.failed > 0; });
      steps.clear();
      GoOnWithout(dead, rank);
      return said;
    });
    ExpectTold(dead, job, endings, {{Name(1)}, Died(dead)});
  }
}

TEST_P(DeathTest, ARankMayDieInBootstrap) {
  for (int i = 0; i < 10 && !HasFailure(); ++i) {
    const int32_t dead = Uniform(random_, 0, kNumRanks - 1);
    const int64_t us = Uniform(random_, 0, 2000);
    const int64_t delays_us[kNumRanks] = {
        Uniform(random_, 0, 1000), Uniform(random_, 0, 1000),
        Uniform(random_, 0, 1000), Uniform(random_, 0, 1000)};
    SCOPED_TRACE(StrCat("rank ", dead, " after ", us, " us"));
    Job job;
    const auto endings = job.Run([&](Rank& rank) {
      if (rank.rank() == dead) DieLater(us, GetParam(), rank);
      usleep(delays_us[rank.rank()]);
      rank.Bootstrap(/*timeout_s=*/2 * kSoonS);
      if (rank.rank() != dead) return Survive(dead, rank);
      WorkOn(rank);
    });
    ExpectTold(dead, job, endings, {{StrCat("process ", dead)}});
  }
}

// Meanwhile the other ranks run ops, or finalize the group.
TEST_P(DeathTest, ARankMayDieInFinalize) {
  for (int i = 0; i < 16 && !HasFailure(); ++i) {
    const int32_t dead = i % kNumRanks;
    const int64_t us = Uniform(random_, 0, 200);
    const bool all_finalize = i % 2;
    SCOPED_TRACE(StrCat("rank ", dead, " after ", us, " us"));
    Job job;
    const auto endings = job.Run([&](Rank& rank) {
      rank.Bootstrap(kTimeoutS);
      for (int64_t j = 0; j < kNumOps; ++j) rank.Next();
      if (rank.rank() == dead) {
        DieLater(us, GetParam(), rank);
        rank.Close();
        pause();
      }
      if (!all_finalize) {
        while (rank.status().ok()) rank.Next();
        // A rank that finalized the group now would cause another error.
        rank.WaitForOthers(dead, [](auto& r) { return r.failed > 0; });
      }
      const std::string told = rank.status().message();
      GoOnWithout(dead, rank);
      return told;
    });
    const std::string who = StrCat("rank ", dead, " (process ", dead, ") ");
    std::vector<Words> words = {{Name(0)}, {who + "died", who + "finalized"}};
    if (all_finalize) words.clear();
    ExpectTold(dead, job, endings, words);
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, DeathTest, ::testing::ValuesIn(kWays));

TEST(ProcessTest, AnyRankMayStopAtAnyMoment) {
  Job job;
  ExpectNothingSaid(job.Run([](Rank& rank) {
    rank.Bootstrap(kTimeoutS);
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

// A forked child runs an op, closes the group, and destroys the group.
TEST(ProcessTest, AForkedChildDoesNotDisturbItsParent) {
  Job job;
  ExpectNothingSaid(job.Run([](Rank& rank) {
    rank.Bootstrap(kTimeoutS);
    for (int64_t j = 0; j < kNumOps; ++j) rank.Next();
    const pid_t child = fork();
    if (child == 0) {
      rank.Next();
      const std::string said = rank.Abandon();
      const bool told = said.find("forked child") != std::string::npos;
      _exit(!told);
    }
    int status;
    EXPECT_EQ(child, waitpid(child, &status, 0));
    EXPECT_EQ(0, status);
    for (int64_t j = 0; j < 4 * kNumOps; ++j) rank.Next();
    return rank.Close();
  }));
}

}  // namespace
}  // namespace ep::host
