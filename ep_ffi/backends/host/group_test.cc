// SPDX-License-Identifier: Apache-2.0

// Tests the host backend in groups whose processes are threads. process_test.cc
// tests real processes.

#include "ep_ffi/backends/host/group.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "ep_ffi/backends/host/testing/groups.h"
#include "ep_ffi/testing/conformance.h"

namespace ep::host {
namespace {

using testing::Backend;
using testing::Domain;
using testing::ExpectFailureOnAll;
using testing::ExpectRuns;
using testing::WorldOptions;

Backend HostBackend(const std::string& name, int32_t max_processes) {
  return {name, [max_processes](const WorldOptions& options) {
            return MakeHostGroup(options, max_processes);
          }};
}

EP_INSTANTIATE_CONFORMANCE(Host, HostBackend("OneProcess", 1),
                           HostBackend("TwoProcesses", 2),
                           HostBackend("FourProcesses", 4));

// Two ranks with one token each, and more slots than tokens.
constexpr PlanDims kTwoRanks = {
    /*num_experts=*/2, /*ep_size=*/2,
    /*num_tokens=*/1,  /*top_k=*/1,
    /*capacity=*/8,    /*alignment=*/1,
    /*drop=*/false};
constexpr testing::RowType kRow = {3, DType::kFloat32};

testing::StepPtr PrepareStep(const Domain& domain, const PlanDims& dims) {
  std::vector<testing::RankInput> inputs(dims.ep_size);
  for (testing::RankInput& input : inputs) {
    input.dims = dims;
    input.topk_idx.resize(dims.num_choices(), 0);
  }
  return testing::Step::Make(domain, Op::kPrepare, {/*run_id=*/1}, inputs);
}

// Runs ep_prepare. Returns an ep_combine whose rows repeat `word`.
testing::StepPtr CombineStep(const Domain& domain, uint32_t word) {
  const testing::StepPtr prepare = PrepareStep(domain, kTwoRanks);
  prepare->Run();
  std::vector<testing::RankInput> inputs(kTwoRanks.ep_size);
  for (int64_t rank = 0; rank < kTwoRanks.ep_size; ++rank) {
    inputs[rank].dims = kTwoRanks;
    inputs[rank].mem = prepare->output(rank).mem;
    inputs[rank].type = kRow;
    std::vector<std::byte>& rows = inputs[rank].data.rows;
    rows.resize(kTwoRanks.capacity * kRow.bytes());
    for (size_t i = 0; i < rows.size(); i += sizeof(word)) {
      std::memcpy(&rows[i], &word, sizeof(word));
    }
  }
  return testing::Step::Make(domain, Op::kCombine, {/*run_id=*/2}, inputs);
}

TEST(HostGroupTest, ADeviceOutsideTheMeshIsAnError) {
  Domain domain = MakeHostGroup({kTwoRanks}, 1)[0];
  domain.devices[1] = 7;
  ExpectFailureOnAll({Code::kFailedPrecondition, {"device 7 is not in"}},
                     PrepareStep(domain, kTwoRanks));
}

// A program fails in another group, while this group is idle.
TEST(HostGroupTest, AFailureInAnotherGroupDoesNotEndTheProcess) {
  HostGroup::Options options = {};
  // With a low timeout_s, the group checks for timeouts often.
  options.exchanges = {"group", /*timeout_s=*/0.2, nullptr,
                       /*exit_after_s=*/0.01};
  options.topology = TopologyOf(0, 1);
  options.topology.members.push_back({/*process=*/0, /*device=*/1});
  std::shared_ptr<Group> group;
  testing::ExpectOk(HostGroup::Create(std::move(options), &group));
  group->FailRun(/*run_id=*/1, Status(Code::kInternal, "elsewhere"));
  usleep(200'000);  // many times exit_after_s
}

// Our threads may run ops, so they must flush denormals as XLA's threads do.
TEST(HostGroupTest, DenormalsAreZeroOnEveryThread) {
  constexpr uint32_t kDenormal = 1;
  for (int32_t num_processes : {1, 2}) {
    const Domain domain = MakeHostGroup({kTwoRanks}, num_processes)[0];
    const testing::StepPtr combine = CombineStep(domain, kDenormal);
    ExpectRuns(combine);
    for (int64_t rank = 0; rank < kTwoRanks.ep_size; ++rank) {
      EXPECT_EQ(std::vector<std::byte>(kRow.bytes()),
                combine->output(rank).data.rows);
    }
  }
}

// Each op in flight completes or fails exactly once, and uses no freed memory.
TEST(HostGroupTest, AGroupMayCloseAtAnyMomentOfItsOps) {
  testing::Random random(1);
  for (int i = 0; i < 400; ++i) {
    Domain domain = MakeHostGroup({kTwoRanks}, 1 + i % 2)[0];
    const testing::StepPtr step = i / 4 % 2 == 0
                                      ? PrepareStep(domain, kTwoRanks)
                                      : CombineStep(domain, /*word=*/0);
    const std::shared_ptr<Group> closing = domain.groups[i / 2 % 2];
    domain = {};
    std::thread closer([&closing, us = testing::Uniform(random, 0, 150)] {
      usleep(us);
      (void)closing->Close();
    });
    std::thread other([&step] { step->Post(1); });
    step->Post(0);
    other.join();
    closer.join();
    for (int64_t rank : {0, 1}) {
      const Status status = step->Wait(rank);
      EXPECT_TRUE(status.ok() || status.code() == Code::kFailedPrecondition ||
                  status.code() == Code::kUnavailable)
          << status.message();
    }
  }
}

}  // namespace
}  // namespace ep::host
