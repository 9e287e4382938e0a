// SPDX-License-Identifier: Apache-2.0

// Tests that a healthy job goes on: the host rarely waits for the device, and
// gives up only if an op waits for other ranks, not while the device runs other
// work.

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <vector>

#include "ep_ffi/backends/nccl/fake/fake.h"
#include "ep_ffi/backends/nccl/reports.h"
#include "ep_ffi/backends/nccl/testing/group_fixture.h"

namespace ep::nccl {
namespace {

constexpr int64_t kWindow = Reports::kWindow;

class HealthyTest : public NcclGroupTest {
 protected:
  // Enqueues other work than ops on every rank, such as a matmul of XLA.
  static void EnqueueOther(const Domain& domain, std::function<void()> work) {
    for (void* stream : domain.streams) {
      fake::Enqueue(static_cast<CUstream>(stream), work);
    }
  }
  static void ExpectGroupsOk(const Domain& domain) {
    ForEachRank(kDims.ep_size,
                [&](int64_t rank) { ExpectOk(domain.groups[rank]->Check()); });
  }
};

// Counts the ops for which a host waits while the device runs nothing.
TEST_F(HealthyTest, TheHostDoesNotWaitForAModelOf48Layers) {
  constexpr int kLayers = 48;
  Domain domain = MakeImpatient();
  const Routed routed = PrepareRandom(domain, kDims);
  domain.synchronize = nullptr;
  std::vector<StepPtr> steps;
  for (int i = 0; i < kLayers; ++i) {
    steps.push_back(NewPrepare(domain, kDims));
    for (Op op : kMoves) steps.push_back(NewMove(domain, op, routed));
  }
  std::atomic<bool> is_held{true};
  std::atomic<int> num_waits{0};
  EnqueueOther(domain, [&] {
    for (int i = 0; i < 300 && is_held; ++i) Sleep(0.01);
    is_held = false;
  });
  ForEachRank(kDims.ep_size, [&](int64_t rank) {
    for (const StepPtr& step : steps) {
      step->Post(rank);
      num_waits += !is_held;
    }
  });
  is_held = false;
  EXPECT_EQ(0, num_waits);
  ExpectGroupsOk(domain);
}

// The host is kWindow prepares ahead of a device with much work.
TEST_F(HealthyTest, AHostWaitsUntilTheStreamReachesAPrepare) {
  const Domain domain = MakeAsynchronous();
  std::vector<StepPtr> steps;
  for (int64_t i = 0; i < kWindow + 1; ++i) {
    steps.push_back(NewPrepare(domain, kDims));
  }
  EnqueueOther(domain, [] { Sleep(2 * kTimeoutS); });
  ForEachRank(kDims.ep_size, [&](int64_t rank) {
    for (const StepPtr& step : steps) {
      step->Post(rank);
      ExpectOk(step->Wait(rank));
    }
  });
  ExpectGroupsOk(domain);
}

TEST_F(HealthyTest, CheckWaitsForALongQueue) {
  const Domain domain = MakeAsynchronous();
  std::vector<StepPtr> steps;
  for (int i = 0; i < 4; ++i) {
    EnqueueOther(domain, [] { Sleep(0.6 * kTimeoutS); });
    steps.push_back(NewPrepare(domain, kDims));
    for (int64_t rank = 0; rank < kDims.ep_size; ++rank) {
      steps.back()->Post(rank);
    }
  }
  ExpectGroupsOk(domain);
}

}  // namespace
}  // namespace ep::nccl
