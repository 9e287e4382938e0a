// SPDX-License-Identifier: Apache-2.0

// Tests of checked mode, in which ep_combine must return finite numbers.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>

#include "ep_ffi/backends/nccl/testing/group_fixture.h"
#include "ep_ffi/testing/formats.h"

namespace ep::nccl {
namespace {

// Sets a column of the row that an expert returns for a rank's choice.
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

INSTANTIATE_TEST_SUITE_P(Fake, CheckedCombineTest,
                         ::testing::Values(FakeNccl()));

TEST_P(CheckedCombineTest, TheFirstElementThatIsNotFiniteIsNamedOnce) {
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

TEST_P(CheckedCombineTest, LargeNumbersAreFinite) {
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
    ExpectOracle(Op::kCombine, routed, inputs, step);
  }
}

TEST_P(CheckedCombineTest, OtherOpsAreNotChecked) {
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

// Later ops run even if one has a fault, and the host may read it much later.
TEST_P(CheckedCombineTest, TheFirstOpIsReported) {
  Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareFull(domain);
  const auto check = std::exchange(domain.synchronize, nullptr);
  std::vector<StepPtr> steps;
  for (int64_t token : {-1, 4, 2}) {  // the first op has no fault
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

// A routing with a fault makes NaNs, which are not reported as its own fault.
TEST_P(CheckedCombineTest, NansOfAFaultyRoutingAreNotReported) {
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
