// SPDX-License-Identifier: Apache-2.0

// Tests of faults that the device finds in routings, in handles and, in checked
// mode, in the results of ep_combine.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>

#include "ep_ffi/backends/nccl/kernels.h"
#include "ep_ffi/backends/nccl/reports.h"
#include "ep_ffi/backends/nccl/testing/group_fixture.h"
#include "ep_ffi/testing/formats.h"

namespace ep::nccl {
namespace {

constexpr int64_t kWindow = Reports::kWindow;

class FaultsTest : public NcclGroupTest {
 protected:
  // Returns `count` ep_prepares; step `faulty` has an invalid id on rank 1.
  std::vector<StepPtr> NewPrepares(const Domain& domain, int64_t count,
                                   int64_t faulty) {
    std::vector<StepPtr> steps;
    for (int64_t i = 0; i < count; ++i) {
      Choices topk_idx = RandomChoices(random_, kDims);
      if (i == faulty) topk_idx[1][4] = -7;
      steps.push_back(NewPrepare(domain, kDims, topk_idx));
    }
    return steps;
  }
};

void ExpectNans(const Step& step) {
  for (size_t rank = 0; rank < step.inputs().size(); ++rank) {
    ExpectNan(step.inputs()[rank].type, step.output(rank).data);
  }
}

TEST_F(FaultsTest, AFaultMakesNansOnEveryRank) {
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareFault(domain, kDims);
  for (Op op : kMoves) {
    for (DType dtype : kDTypes) {
      const StepPtr step =
          NewStep(domain, op, RandomInputs(op, routed, Fit({8, dtype})));
      ExpectRuns(step);
      ExpectNans(*step);
    }
  }
  ExpectWorks(domain, Op::kDispatch, PrepareRandom(domain, kDims), AnyType());
}

TEST_F(FaultsTest, ARepeatedIdFails) {
  const Domain domain = MakeDomain(kWorld);
  Choices topk_idx = RandomChoices(random_, kDims);
  topk_idx[3][8] = topk_idx[3][9] = 5;
  ExpectWordsOnAll(
      {"ep_prepare", testing::kLayerName, "rank 3", "topk_idx[4", "5"},
      NewPrepare(domain, kDims, topk_idx));
}

// Each thread block finds the first invalid expert id of one chunk of choices.
TEST_F(FaultsTest, TheFirstOfManyInvalidIdsIsNamed) {
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

// A rank that reads a fault early still enqueues the same ops as its peers.
TEST_F(FaultsTest, AFaultFailsTheSameLaterPrepareOnEveryRank) {
  for (int64_t early : {-1, 0}) {  // the rank that calls Check early; -1: none
    Domain domain = MakeDomain(kWorld);
    const auto check = std::exchange(domain.synchronize, nullptr);
    const std::vector<StepPtr> steps =
        NewPrepares(domain, 3 * kWindow, /*faulty=*/2);
    ForEachRank(kDims.ep_size, [&](int64_t rank) {
      for (size_t i = 0; i < steps.size(); ++i) {
        SCOPED_TRACE(i);
        if (rank == early && i == 3) {
          ExpectWords({"rank 1", "topk_idx[2, 0] = -7"}, check(rank));
        }
        steps[i]->Post(rank);
        ASSERT_TRUE(steps[i]->IsDone(rank));
        const Status status = steps[i]->Wait(rank);
        if (rank != early && i == 2 + kWindow) {
          ExpectWords({"rank 1", "topk_idx[2, 0] = -7"}, status);
        } else {
          ExpectOk(status);
        }
      }
      ExpectOk(check(rank));
    });
  }
}

// NCCL EP cannot tell a routing for another layer or rank from the right one.
TEST_F(FaultsTest, AForeignHandleMakesNans) {
  const Domain domain = MakeDomain(kWorld);
  PlanDims other = kDims;
  other.alignment = 4;
  Routed other_layer = PrepareRandom(domain, other);
  other_layer.dims = kDims;
  Routed other_rank = PrepareRandom(domain, kDims);
  std::rotate(other_rank.mems.begin(), other_rank.mems.begin() + 1,
              other_rank.mems.end());
  Routed negative = PrepareRandom(domain, kDims);
  for (std::vector<std::byte>& mem : negative.mems) {
    reinterpret_cast<Header*>(mem.data())->num_slots = -1;
  }
  for (const Routed& routed : {other_layer, other_rank, negative}) {
    for (Op op : kMoves) {
      const StepPtr step = NewMove(domain, op, routed);
      ExpectWordsOnAll({"handle.mem", "ep_prepare"}, step);
      ExpectNans(*step);
    }
  }
  for (const auto& group : domain.groups) ExpectOk(group->Check());
  ExpectWorks(domain, Op::kDispatch, PrepareRandom(domain, kDims), AnyType());
}

// NCCL EP must not read a handle of random bytes.
TEST_F(FaultsTest, RandomBytesMakeNans) {
  const Domain domain = MakeDomain(kWorld);
  const Routed good = PrepareRandom(domain, kDims);
  for (const std::vector<int64_t>& ranks :
       std::vector<std::vector<int64_t>>{{0, 1, 2, 3}, {2}}) {
    Routed routed = good;
    for (int64_t rank : ranks) {
      for (std::byte& byte : routed.mems[rank]) byte = std::byte(random_());
    }
    for (Op op : kMoves) {
      SCOPED_TRACE(StrCat(OpName(op), " on ", ranks.size(), " ranks"));
      const StepPtr step = NewMove(domain, op, routed);
      std::vector<Status> statuses = step->Run();
      for (int64_t rank : ranks) {
        ExpectWords({"handle.mem", "ep_prepare"}, statuses[rank]);
        ExpectNan(AnyType(), step->output(rank).data);
        statuses[rank] = Status();
      }
      for (const Status& status : statuses) ExpectOk(status);
    }
  }
  ExpectWorks(domain, Op::kDispatch, good, AnyType());
}

// A position and a program identify an op. XLA's number of a copy of the op
// does not: a rank that loads a program from a cache instantiates more or fewer
// copies than a rank that compiles the program.
TEST_F(FaultsTest, PositionAndProgramIdentifyAnOp) {
  const Domain domain = MakeDomain(kWorld);
  const auto inputs = PrepareInputs(kDims, RandomChoices(random_, kDims));
  const int64_t run = NextRun();
  for (const testing::Place& place : {testing::Place{run, /*position=*/1},
                                      testing::Place{run, 0, 0, /*program=*/1},
                                      testing::Place{run, 0, /*clone=*/1}}) {
    const StepPtr step = Step::Make(domain, Op::kPrepare, {run}, inputs);
    const StepPtr other = Step::Make(domain, Op::kPrepare, place, inputs);
    ForEachRank(kDims.ep_size, [&](int64_t rank) {
      const StepPtr& mine = rank == 2 ? other : step;
      mine->Post(rank);
      const Status status = mine->Wait(rank);
      if (place.clone == 1) return ExpectOk(status);
      ExpectWords({"rank 0 and rank 2 disagree"}, status);
    });
  }
  PrepareRandom(domain, kDims);
}

TEST_F(FaultsTest, AHandleOfAnotherSizeIsRefused) {
  const Domain domain = MakeDomain(kWorld);
  Routed routed = PrepareRandom(domain, kDims);
  for (std::vector<std::byte>& mem : routed.mems) mem.resize(mem.size() - 8);
  for (Op op : kMoves) {
    ExpectWordsOnAll({OpName(op), "handle.mem has", "ep_prepare"},
                     NewMove(domain, op, routed));
  }
}

// Sets one element of the row that an expert returns for a rank's choice.
void SetTerm(const Routed& routed, int64_t rank, int64_t choice, int64_t column,
             double value, std::vector<RankInput>* inputs) {
  const Route route = routed.layout.send[rank][choice];
  RankInput& holder = (*inputs)[route.rank];
  testing::Store(holder.type.dtype, value, holder.data.rows.data(),
                 route.index * holder.type.width + column);
}

class CheckedCombineTest : public NcclGroupTest {
 protected:
  static constexpr double kInfinity = std::numeric_limits<double>::infinity();
  static constexpr double kNoNumber = std::numeric_limits<double>::quiet_NaN();

  // Prepares a routing without unused choices.
  Routed PrepareFull(const Domain& domain) {
    std::vector<int64_t> topk_idx(kDims.num_choices());
    for (size_t i = 0; i < topk_idx.size(); ++i) {
      topk_idx[i] = i % kDims.num_experts;
    }
    return Prepare(domain, kDims, Choices(kDims.ep_size, topk_idx));
  }
  std::vector<RankInput> CheckedInputs(Op op, const Routed& routed,
                                       const RowType& type) {
    std::vector<RankInput> inputs = RandomInputs(op, routed, type);
    for (RankInput& input : inputs) input.checked = true;
    return inputs;
  }
};

TEST_F(CheckedCombineTest, TheFirstElementThatIsNotFiniteIsNamedOnce) {
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareFull(domain);
  for (DType dtype : kDTypes) {
    for (double value : {kNoNumber, kInfinity, -kInfinity}) {
      for (int64_t column : {300, 301}) {
        SCOPED_TRACE(StrCat(ByteWidth(dtype), " bytes, ", value));
        std::vector<RankInput> inputs =
            CheckedInputs(Op::kCombine, routed, Fit({400, dtype}));
        SetTerm(routed, /*rank=*/2, /*choice=*/7, column, value, &inputs);
        SetTerm(routed, /*rank=*/2, /*choice=*/6, 302, value, &inputs);
        SetTerm(routed, /*rank=*/2, /*choice=*/8, 0, value, &inputs);
        const std::vector<Status> statuses =
            NewStep(domain, Op::kCombine, inputs)->Run();
        for (int64_t rank : {0, 1, 3}) ExpectOk(statuses[rank]);
        EXPECT_EQ(Code::kInvalidArgument, statuses[2].code());
        EXPECT_EQ(StrCat("ep_combine(layer \"", testing::kLayerName,
                         "\"), rank 2: out[3, ", column, "] is not finite"),
                  statuses[2].message());
        ExpectOk(domain.groups[2]->Check());
      }
    }
  }
}

TEST_F(CheckedCombineTest, LargeNumbersAreFinite) {
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareFull(domain);
  for (DType dtype : kDTypes) {
    std::vector<RankInput> inputs =
        CheckedInputs(Op::kCombine, routed, Fit({8, dtype}));
    const double large = dtype == DType::kFloat16 ? 65504 : 3e38;
    for (int64_t column = 0; column < inputs[0].type.width; ++column) {
      SetTerm(routed, /*rank=*/1, /*choice=*/4, column, large, &inputs);
      SetTerm(routed, /*rank=*/1, /*choice=*/5, column, 0, &inputs);
    }
    const StepPtr step = NewStep(domain, Op::kCombine, inputs);
    ExpectRuns(step);
    ExpectOracle(routed, step);
  }
}

TEST_F(CheckedCombineTest, OtherOpsAreNotChecked) {
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareFull(domain);
  const auto run = [&](Op op, bool checked) {
    std::vector<RankInput> inputs = CheckedInputs(op, routed, AnyType());
    for (RankInput& input : inputs) input.checked = checked;
    SetTerm(routed, /*rank=*/0, /*choice=*/0, 0, kNoNumber, &inputs);
    ExpectRuns(NewStep(domain, op, inputs));
  };
  run(Op::kCombine, /*checked=*/false);
  run(Op::kDispatchBwd, /*checked=*/true);
}

// Other ops may run after a fault before the host reads the fault.
TEST_F(CheckedCombineTest, TheFirstOpIsReported) {
  Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareFull(domain);
  const auto check = std::exchange(domain.synchronize, nullptr);
  std::vector<StepPtr> steps;
  for (int64_t token : {-1, 4, 2}) {  // -1: no fault
    std::vector<RankInput> inputs =
        CheckedInputs(Op::kCombine, routed, AnyType());
    for (int64_t rank = 0; rank < kDims.ep_size; ++rank) {
      inputs[rank].layer = StrCat("moe_", token);
      if (token < 0) continue;
      SetTerm(routed, rank, token * kDims.top_k, 6, kInfinity, &inputs);
    }
    steps.push_back(NewStep(domain, Op::kCombine, inputs));
  }
  ForEachRank(kDims.ep_size, [&](int64_t rank) {
    for (const StepPtr& step : steps) {
      step->Post(rank);
      ExpectOk(step->Wait(rank));
    }
    ExpectWords({"\"moe_4\"", StrCat("rank ", rank, ": out[4, 6]")},
                check(rank));
    ExpectOk(check(rank));
  });
}

// Checked mode does not report the NaNs that follow from a faulty routing.
TEST_F(CheckedCombineTest, NansOfAFaultyRoutingAreNotReported) {
  const Domain domain = MakeDomain(kWorld);
  Routed routed = PrepareFault(domain, kDims);
  ExpectRuns(NewStep(domain, Op::kCombine,
                     CheckedInputs(Op::kCombine, routed, AnyType())));

  routed = PrepareFull(domain);
  std::rotate(routed.mems.begin(), routed.mems.begin() + 1, routed.mems.end());
  const StepPtr foreign = NewStep(
      domain, Op::kCombine, CheckedInputs(Op::kCombine, routed, AnyType()));
  ExpectWordsOnAll({"handle.mem", "ep_prepare"}, foreign);
  for (const auto& group : domain.groups) ExpectOk(group->Check());
}

}  // namespace
}  // namespace ep::nccl
