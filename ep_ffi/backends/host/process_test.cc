// SPDX-License-Identifier: Apache-2.0

// Tests the host backend between real processes: if a rank dies at any moment,
// all other ranks fail soon, with an error that names the dead rank.
// tests/group/ends_test.py has other ends of processes.

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "ep_ffi/backends/host/group.h"
#include "ep_ffi/backends/host/testing/sockets.h"
#include "ep_ffi/core/clock.h"
#include "ep_ffi/testing/expect.h"
#include "ep_ffi/testing/ranks.h"
#include "ep_ffi/testing/samples.h"

namespace ep::host {
namespace {

using testing::Random;
using testing::RankInput;
using testing::Step;
using testing::StepPtr;
using testing::Uniform;

constexpr int32_t kNumRanks = 4;
constexpr double kTimeoutS = 60;
constexpr double kSoonS = 10;

constexpr PlanDims kDims = {
    /*num_experts=*/12, kNumRanks,        /*num_tokens=*/64,
    /*top_k=*/2,        /*capacity=*/520, /*alignment=*/2,
    /*drop=*/false};

// Creates the group of a process. The domain has only this rank's group.
testing::Domain Join(int32_t rank, std::vector<Fd> sockets) {
  testing::Domain domain;
  domain.groups.resize(kNumRanks);
  HostGroup::Options options = {};
  options.num_experts = kDims.num_experts;
  options.exchanges = {"group", kTimeoutS, nullptr};
  options.topology = TopologyOf(rank, kNumRanks);
  for (int32_t r = 0; r < kNumRanks; ++r) domain.devices.push_back(r);
  options.sockets = std::move(sockets);
  testing::ExpectOk(
      HostGroup::Create(std::move(options), &domain.groups[rank]));
  return domain;
}

// Runs ops until one fails, and returns its error. Dispatch and combine are
// independent, and ranks post them in different orders.
std::string RunOps(int32_t rank, const testing::Domain& domain) {
  Random random(1);
  std::vector<RankInput> inputs(kNumRanks);
  RankInput& mine = inputs[rank];
  mine.dims = kDims;
  mine.type = {128, DType::kFloat32};
  mine.topk_idx = testing::RandomChoices(random, kDims)[rank];
  std::string said;
  for (int64_t run_id = 1; said.empty(); ++run_id) {
    const StepPtr prepare =
        Step::Make(domain, Op::kPrepare, {run_id, /*position=*/0}, inputs);
    prepare->Post(rank);
    const Status prepared = prepare->Wait(rank);
    if (!prepared.ok()) return prepared.message();
    mine.mem = prepare->output(rank).mem;
    StepPtr steps[2];
    for (int i : {0, 1}) {
      const Op op = i == 0 ? Op::kDispatch : Op::kCombine;
      mine.data = RandomInput(random, op, kDims, mine.type);
      steps[i] = Step::Make(domain, op, {run_id, /*position=*/1 + i}, inputs);
    }
    for (int i : {0, 1}) steps[(i + rank) % 2]->Post(rank);
    for (const StepPtr& step : steps) {
      const Status status = step->Wait(rank);
      if (!status.ok()) said = status.message();
    }
  }
  return said;
}

// Runs ops in this process, which dies after `us` microseconds unless `us` is
// negative. Writes the error of an op to the pipe `report`.
[[noreturn]] void RunRank(int32_t rank, std::vector<Fd> sockets, int64_t us,
                          int report) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (us >= 0) {
    std::thread([us] {
      usleep(us);
      raise(SIGKILL);
    }).detach();
  }
  const testing::Domain domain = Join(rank, std::move(sockets));
  const std::string said = RunOps(rank, domain);
  testing::ExpectOk(domain.groups[rank]->Close());
  const ssize_t size = write(report, said.data(), said.size());
  _exit(size != ssize_t(said.size()) || ::testing::Test::HasFailure());
}

TEST(ProcessTest, ARankMayDieAtAnyMoment) {
  Random random(1);
  for (int i = 0; i < 200 && !HasFailure(); ++i) {
    const int32_t dead = Uniform(random, 0, kNumRanks - 1);
    const int64_t us = Uniform(random, 0, 20000);
    SCOPED_TRACE(StrCat("rank ", dead, " after ", us, " us"));
    Sockets sockets(kNumRanks);
    pid_t children[kNumRanks];
    int reports[kNumRanks];
    for (int32_t r = 0; r < kNumRanks; ++r) {
      int report[2];
      ASSERT_EQ(0, pipe(report));
      children[r] = fork();
      if (children[r] == 0) {
        std::vector<Fd> mine = sockets.Take(r);
        sockets = Sockets(0);  // closes the sockets of the other ranks
        RunRank(r, std::move(mine), r == dead ? us : -1, report[1]);
      }
      close(report[1]);
      reports[r] = report[0];
    }
    sockets = Sockets(0);
    const double end = Now() + kSoonS;
    for (int32_t r = 0; r < kNumRanks; ++r) {
      pollfd report = {reports[r], POLLIN, 0};
      if (poll(&report, 1, std::max(0.0, (end - Now()) * 1e3)) == 0) {
        ADD_FAILURE() << "rank " << r << " takes too long";
        kill(children[r], SIGKILL);
      }
      char said[4096] = {};
      EXPECT_LE(0, read(reports[r], said, sizeof(said) - 1));
      close(reports[r]);
      int status;
      EXPECT_EQ(children[r], waitpid(children[r], &status, 0));
      EXPECT_EQ(r == dead ? SIGKILL : 0, status) << "rank " << r;
      if (r == dead) continue;
      testing::ExpectIn(said, {StrCat("process ", dead), "died"});
    }
  }
}

}  // namespace
}  // namespace ep::host
