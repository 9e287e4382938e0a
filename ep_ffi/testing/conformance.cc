// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/testing/conformance.h"

#include <algorithm>
#include <utility>

namespace ep::testing {

// A backend need not make all promises, and a test of its own may use the
// fixture alone.
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Conformance);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GatherConformance);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(FailureConformance);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ExactSumConformance);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(OrderConformance);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CheckConformance);

void ExpectFailureOnAll(const Failure& expected, const StepPtr& step) {
  for (const Status& status : step->Run()) ExpectFailure(expected, status);
}

void ExpectWordsOnAll(const std::vector<std::string>& words,
                      const StepPtr& step) {
  for (const Status& status : step->Run()) ExpectWords(words, status);
}

void ExpectCounts(const Layout& expected, int64_t rank,
                  const RankOutput& actual) {
  EXPECT_EQ(expected.group_sizes[rank], actual.group_sizes);
  EXPECT_EQ(expected.token_counts[rank], actual.token_counts);
  EXPECT_EQ(expected.total_recv_tokens[rank], actual.total_recv_tokens);
  EXPECT_EQ(expected.dropped_counts[rank], actual.dropped_counts);
  EXPECT_EQ(expected.max_recv_tokens, actual.max_recv_tokens);
  EXPECT_EQ(expected.kept[rank], actual.kept);
}

std::vector<Domain> Conformance::MakeWorld(const WorldOptions& options) {
  std::vector<Domain> world = GetParam().make(options);
  domains_.insert(domains_.end(), world.begin(), world.end());
  return world;
}

Domain Conformance::MakeDomain(const WorldOptions& options) {
  return MakeWorld(options)[0];
}

PlanDims Conformance::RandomFittingDims(int64_t ep_size, bool drop) {
  PlanDims dims = GetParam().fit(RandomDims(random_, ep_size, drop));
  if (!drop) dims.capacity = std::max(dims.capacity, WorstCaseCapacity(dims));
  return GetParam().fit(dims);
}

RowType Conformance::Fit(const RowType& type) const {
  const int64_t multiple = GetParam().width_multiple;
  return {(type.width + multiple - 1) / multiple * multiple, type.dtype};
}

void Conformance::TearDown() {
  for (const Domain& domain : domains_) {
    for (const auto& group : domain.groups) (void)group->Close();
  }
}

std::vector<RankInput> Conformance::PrepareInputs(
    const PlanDims& dims, const Choices& topk_idx) const {
  std::vector<RankInput> inputs(dims.ep_size);
  for (int64_t rank = 0; rank < dims.ep_size; ++rank) {
    inputs[rank].dims = dims;
    inputs[rank].topk_idx = topk_idx[rank];
  }
  return inputs;
}

StepPtr Conformance::NewStep(const Domain& domain, Op op,
                             const std::vector<RankInput>& inputs) {
  return Step::Make(domain, op, {NextRun()}, inputs);
}

StepPtr Conformance::NewPrepare(const Domain& domain, const PlanDims& dims,
                                const Choices& topk_idx) {
  return NewStep(domain, Op::kPrepare, PrepareInputs(dims, topk_idx));
}

StepPtr Conformance::NewPrepare(const Domain& domain, const PlanDims& dims) {
  return NewPrepare(domain, dims, RandomChoices(random_, dims));
}

StepPtr Conformance::NewMove(const Domain& domain, Op op,
                             const Routed& routed) {
  return NewStep(domain, op, RandomInputs(op, routed, AnyType()));
}

Routed Conformance::Prepare(const Domain& domain, const PlanDims& dims,
                            const Choices& topk_idx) {
  Routed routed = {dims, LayOut(dims, topk_idx), {}};
  const StepPtr step = NewPrepare(domain, dims, topk_idx);
  ExpectRuns(step);
  for (int64_t rank = 0; rank < dims.ep_size; ++rank) {
    ExpectCounts(routed.layout, rank, step->output(rank));
    routed.mems.push_back(step->output(rank).mem);
  }
  return routed;
}

Routed Conformance::PrepareRandom(const Domain& domain, const PlanDims& dims) {
  return Prepare(domain, dims, RandomChoices(random_, dims));
}

std::vector<RankInput> Conformance::RandomInputs(Op op, const Routed& routed,
                                                 const RowType& type,
                                                 bool weighted) {
  const PlanDims& dims = routed.dims;
  std::vector<RankInput> inputs(dims.ep_size);
  for (int64_t rank = 0; rank < dims.ep_size; ++rank) {
    RankInput& input = inputs[rank];
    input.dims = dims;
    input.mem = routed.mems[rank];
    input.type = type;
    switch (op) {
      case Op::kPrepare:
        ADD_FAILURE() << "ep_prepare has no rows";
        break;
      case Op::kDispatch:
        input.data =
            RandomData(random_, type, dims.num_tokens, dims.num_choices());
        break;
      case Op::kCombineBwd:
        input.data = RandomData(random_, type, dims.num_tokens, 0);
        break;
      case Op::kCombine:
      case Op::kDispatchBwd:
        if (op == Op::kCombine && !GetParam().fuses_weights) weighted = false;
        input.data = RandomData(random_, type, dims.capacity,
                                weighted ? dims.capacity : 0);
        PoisonUnusedSlots(type, routed.layout.recv[rank], &input.data);
        break;
    }
  }
  return inputs;
}

void Conformance::ExpectRuns(const StepPtr& step) {
  for (const Status& status : step->Run()) ExpectOk(status);
}

void Conformance::ExpectOracle(Op op, const Routed& routed,
                               const std::vector<RankInput>& inputs,
                               const StepPtr& step) {
  std::vector<RankData> data;
  for (const RankInput& input : inputs) data.push_back(input.data);
  const std::vector<RankData> expected =
      Apply(op, routed.dims, routed.layout, inputs[0].type, data);
  const bool sums = op == Op::kCombine || op == Op::kDispatchBwd;
  std::vector<std::vector<double>> slack(routed.dims.ep_size);
  if (sums && !GetParam().exact_sums) {
    slack = RoundingSlack(op, routed.dims, routed.layout, inputs[0].type, data,
                          GetParam().sum_roundings);
  }
  for (int64_t rank = 0; rank < routed.dims.ep_size; ++rank) {
    EXPECT_EQ("", Difference(inputs[0].type, expected[rank],
                             step->output(rank).data, slack[rank]))
        << OpName(op) << " on rank " << rank;
  }
}

void Conformance::ExpectWorks(const Domain& domain, Op op, const Routed& routed,
                              const RowType& type, bool weighted) {
  const std::vector<RankInput> inputs =
      RandomInputs(op, routed, type, weighted);
  const StepPtr step = NewStep(domain, op, inputs);
  ExpectRuns(step);
  ExpectOracle(op, routed, inputs, step);
}

}  // namespace ep::testing
