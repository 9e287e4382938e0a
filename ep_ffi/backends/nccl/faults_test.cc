// SPDX-License-Identifier: Apache-2.0

// Tests of faults that the device finds in a routing or a handle.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "ep_ffi/backends/nccl/kernels.h"
#include "ep_ffi/backends/nccl/reports.h"
#include "ep_ffi/backends/nccl/testing/group_fixture.h"

namespace ep::nccl {
namespace {

constexpr int64_t kWindow = Reports::kWindow;

using FaultsTest = NcclGroupTest;
INSTANTIATE_TEST_SUITE_P(Fake, FaultsTest, ::testing::Values(FakeNccl()));

TEST_P(FaultsTest, AFaultMakesNansOnEveryRank) {
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareFault(domain, kDims);
  for (Op op : kMoves) {
    for (DType dtype : kDTypes) {
      const RowType type = Conformance::Fit({8, dtype});
      const StepPtr step = NewStep(domain, op, RandomInputs(op, routed, type));
      ExpectRuns(step);
      for (int64_t rank = 0; rank < kDims.ep_size; ++rank) {
        ExpectNan(type, step->output(rank).data);
      }
    }
  }
  ExpectWorks(domain, Op::kDispatch, PrepareRandom(domain, kDims), AnyType());
}

TEST_P(FaultsTest, ARepeatedIdFails) {
  const Domain domain = MakeDomain(kWorld);
  Choices topk_idx = RandomChoices(random_, kDims);
  topk_idx[3][8] = topk_idx[3][9] = 5;
  ExpectWordsOnAll(
      {"ep_prepare", testing::kLayerName, "rank 3", "topk_idx[4", "5"},
      NewPrepare(domain, kDims, topk_idx));
}

// Each block of threads looks for the first one among its choices.
TEST_P(FaultsTest, TheFirstOfManyWrongIdsIsNamed) {
  PlanDims dims = kDims;
  dims.num_tokens = 700;
  dims.capacity = 4 * dims.num_choices();
  const Domain domain = MakeDomain({dims});
  for (int64_t first : {0, 255, 256, 900}) {
    Choices topk_idx = RandomChoices(random_, dims);
    for (int64_t choice : {first, first + 1, first + 300}) {
      topk_idx[1][choice] = -2 - choice;
    }
    ExpectWordsOnAll({"rank 1", StrCat("] = ", -2 - first, ",")},
                     NewPrepare(domain, dims, topk_idx));
  }
}

TEST_P(FaultsTest, AFaultFailsTheSameLaterPrepareOnEveryRank) {
  Domain domain = MakeDomain(kWorld);
  const auto synchronize = std::exchange(domain.synchronize, nullptr);
  std::vector<StepPtr> steps;
  for (int64_t i = 0; i < 3 * kWindow; ++i) {
    Choices topk_idx = RandomChoices(random_, kDims);
    if (i == 2) topk_idx[1][4] = -7;
    steps.push_back(NewPrepare(domain, kDims, topk_idx));
  }
  ForEachRank(kDims.ep_size, [&](int64_t rank) {
    for (size_t i = 0; i < steps.size(); ++i) {
      SCOPED_TRACE(i);
      steps[i]->Post(rank);
      ASSERT_TRUE(steps[i]->IsDone(rank));
      const Status status = steps[i]->Wait(rank);
      if (i == 2 + kWindow) {
        ExpectWords({"rank 1", "topk_idx[2, 0] = -7"}, status);
      } else {
        ExpectOk(status);
      }
    }
    ExpectOk(synchronize(rank));
  });
}

// A rank that reads a fault earlier than its peers still enqueues the same ops.
TEST_P(FaultsTest, ARankThatChecksAloneStaysInStep) {
  Domain domain = MakeDomain(kWorld);
  const auto check = std::exchange(domain.synchronize, nullptr);
  std::vector<StepPtr> steps;
  for (int64_t i = 0; i < 2 * kWindow; ++i) {
    Choices topk_idx = RandomChoices(random_, kDims);
    if (i == 0) topk_idx[1][4] = -7;
    steps.push_back(NewPrepare(domain, kDims, topk_idx));
  }
  ForEachRank(kDims.ep_size, [&](int64_t rank) {
    for (size_t i = 0; i < steps.size(); ++i) {
      SCOPED_TRACE(i);
      if (rank == 0 && i == 1) ExpectWords({"rank 1", "-7"}, check(rank));
      steps[i]->Post(rank);
      const Status status = steps[i]->Wait(rank);
      EXPECT_EQ(rank == 0 || i != kWindow, status.ok()) << status.message();
    }
    ExpectOk(check(rank));
  });
}

// The header of a handle says which routing it is. Here are routings that NCCL
// EP cannot tell from the right one.
TEST_P(FaultsTest, AForeignHandleMakesNans) {
  const Domain domain = MakeDomain(kWorld);
  PlanDims other = kDims;
  other.alignment = 4;
  Routed other_layer = PrepareRandom(domain, other);
  other_layer.dims = kDims;
  Routed other_rank = PrepareRandom(domain, kDims);
  std::rotate(other_rank.mems.begin(), other_rank.mems.begin() + 1,
              other_rank.mems.end());
  Routed less_than_none = PrepareRandom(domain, kDims);
  for (std::vector<std::byte>& mem : less_than_none.mems) {
    reinterpret_cast<Header*>(mem.data())->num_slots = -1;
  }
  for (const Routed& routed : {other_layer, other_rank, less_than_none}) {
    for (Op op : kMoves) {
      const StepPtr step = NewMove(domain, op, routed);
      ExpectWordsOnAll({"handle.mem", "ep_prepare"}, step);
      for (int64_t rank = 0; rank < kDims.ep_size; ++rank) {
        ExpectNan(AnyType(), step->output(rank).data);
      }
    }
  }
  for (const auto& group : domain.groups) ExpectOk(group->Check());
  ExpectWorks(domain, Op::kDispatch, PrepareRandom(domain, kDims), AnyType());
}

// All bytes of the handle are random, also in NCCL EP's part, which must not
// read them, on one rank or on all.
TEST_P(FaultsTest, RandomBytesMakeNans) {
  const Domain domain = MakeDomain(kWorld);
  const Routed good = PrepareRandom(domain, kDims);
  for (bool on_all : {true, false}) {
    Routed routed = good;
    for (int64_t rank = 0; rank < kDims.ep_size; ++rank) {
      if (!on_all && rank != 2) continue;
      for (std::byte& byte : routed.mems[rank]) byte = std::byte(random_());
    }
    for (Op op : kMoves) {
      SCOPED_TRACE(StrCat(OpName(op), on_all ? " on all ranks" : " on one"));
      const StepPtr step = NewMove(domain, op, routed);
      const std::vector<Status> statuses = step->Run();
      for (int64_t rank = 0; rank < kDims.ep_size; ++rank) {
        if (!on_all && rank != 2) {
          ExpectOk(statuses[rank]);
          continue;
        }
        ExpectWords({"handle.mem", "ep_prepare"}, statuses[rank]);
        ExpectNan(AnyType(), step->output(rank).data);
      }
    }
  }
  ExpectWorks(domain, Op::kDispatch, good, AnyType());
}

// An op is identified by its position and its program.
TEST_P(FaultsTest, RanksThatPrepareInDifferentPlacesFail) {
  const Domain domain = MakeDomain(kWorld);
  const auto inputs = PrepareInputs(kDims, RandomChoices(random_, kDims));
  const int64_t run = NextRun();
  for (const testing::Place& place :
       {testing::Place{run, /*position=*/1},
        testing::Place{run, 0, 0, /*program=*/1}}) {
    const StepPtr step = Step::Make(domain, Op::kPrepare, {run}, inputs);
    const StepPtr other = Step::Make(domain, Op::kPrepare, place, inputs);
    ForEachRank(kDims.ep_size, [&](int64_t rank) {
      const StepPtr& mine = rank == 2 ? other : step;
      mine->Post(rank);
      ExpectWords({"rank 0 and rank 2 disagree"}, mine->Wait(rank));
    });
  }
  PrepareRandom(domain, kDims);
}

// A rank that loads a program from a cache instantiates its ops more or less
// often than one that compiles it.
TEST_P(FaultsTest, RanksMayCountCopiesOfAnOpDifferently) {
  const Domain domain = MakeDomain(kWorld);
  const auto inputs = PrepareInputs(kDims, RandomChoices(random_, kDims));
  const int64_t run = NextRun();
  const StepPtr step = Step::Make(domain, Op::kPrepare, {run}, inputs);
  const StepPtr copy = Step::Make(domain, Op::kPrepare,
                                  {run, /*position=*/0, /*clone=*/1}, inputs);
  ForEachRank(kDims.ep_size, [&](int64_t rank) {
    const StepPtr& mine = rank == 2 ? copy : step;
    mine->Post(rank);
    ExpectOk(mine->Wait(rank));
  });
}

TEST_P(FaultsTest, AHandleOfAnotherSizeIsRefused) {
  const Domain domain = MakeDomain(kWorld);
  Routed routed = PrepareRandom(domain, kDims);
  for (std::vector<std::byte>& mem : routed.mems) mem.resize(mem.size() - 8);
  for (Op op : kMoves) {
    ExpectWordsOnAll({OpName(op), "handle.mem has", "ep_prepare"},
                     NewMove(domain, op, routed));
  }
}

}  // namespace
}  // namespace ep::nccl
