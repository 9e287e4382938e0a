// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/testing/conformance.h"

#include <algorithm>

namespace ep::testing {

// A test may use no suite, but only the fixture. A backend may lack promises.
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Conformance);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GatherConformance);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(FailureConformance);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(OrderConformance);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CheckConformance);

void ExpectRuns(const StepPtr& step) {
  for (const Status& status : step->Run()) ExpectOk(status);
}

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

std::vector<Domain> BackendTest::MakeWorld(const WorldOptions& options) {
  std::vector<Domain> world = backend_.make(options);
  domains_.insert(domains_.end(), world.begin(), world.end());
  return world;
}

Domain BackendTest::MakeDomain(const WorldOptions& options) {
  return MakeWorld(options)[0];
}

PlanDims BackendTest::RandomFittingDims(int64_t ep_size, bool drop) {
  PlanDims dims = backend_.fit(RandomDims(random_, ep_size, drop));
  if (!drop) dims.capacity = std::max(dims.capacity, WorstCaseCapacity(dims));
  return backend_.fit(dims);
}

RowType BackendTest::Fit(const RowType& type) const {
  const int64_t multiple = backend_.width_multiple;
  return {(type.width + multiple - 1) / multiple * multiple, type.dtype};
}

void BackendTest::TearDown() {
  for (const Domain& domain : domains_) {
    for (const auto& group : domain.groups) (void)group->Close();
  }
}

std::vector<RankInput> BackendTest::PrepareInputs(
    const PlanDims& dims, const Choices& topk_idx) const {
  std::vector<RankInput> inputs(dims.ep_size);
  for (int64_t rank = 0; rank < dims.ep_size; ++rank) {
    inputs[rank].dims = dims;
    inputs[rank].topk_idx = topk_idx[rank];
  }
  return inputs;
}

StepPtr BackendTest::NewStep(const Domain& domain, Op op,
                             const std::vector<RankInput>& inputs) {
  return Step::Make(domain, op, {NextRun()}, inputs);
}

StepPtr BackendTest::NewPrepare(const Domain& domain, const PlanDims& dims,
                                const Choices& topk_idx) {
  return NewStep(domain, Op::kPrepare, PrepareInputs(dims, topk_idx));
}

StepPtr BackendTest::NewPrepare(const Domain& domain, const PlanDims& dims) {
  return NewPrepare(domain, dims, RandomChoices(random_, dims));
}

StepPtr BackendTest::NewMove(const Domain& domain, Op op,
                             const Routed& routed) {
  return NewMove(domain, op, routed, {NextRun()});
}

StepPtr BackendTest::NewMove(const Domain& domain, Op op, const Routed& routed,
                             const Place& place) {
  return Step::Make(domain, op, place, RandomInputs(op, routed, AnyType()));
}

Routed BackendTest::Prepare(const Domain& domain, const PlanDims& dims,
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

Routed BackendTest::PrepareRandom(const Domain& domain, const PlanDims& dims) {
  return Prepare(domain, dims, RandomChoices(random_, dims));
}

std::vector<RankInput> BackendTest::RandomInputs(Op op, const Routed& routed,
                                                 const RowType& type,
                                                 bool weighted) {
  if (op == Op::kCombine && !backend_.fuses_weights) weighted = false;
  const PlanDims& dims = routed.dims;
  std::vector<RankInput> inputs(dims.ep_size);
  for (int64_t rank = 0; rank < dims.ep_size; ++rank) {
    RankInput& input = inputs[rank];
    input.dims = dims;
    input.mem = routed.mems[rank];
    input.type = type;
    input.data = RandomInput(random_, op, dims, type, weighted);
    if (IsScatter(op)) continue;
    PoisonUnusedSlots(type, routed.layout.recv[rank], &input.data);
  }
  return inputs;
}

void BackendTest::ExpectOracle(const Routed& routed, const StepPtr& step) {
  const Op op = step->op();
  const RowType& type = step->inputs()[0].type;
  std::vector<RankData> data;
  for (const RankInput& input : step->inputs()) data.push_back(input.data);
  const std::vector<RankData> expected =
      Apply(op, routed.dims, routed.layout, type, data);
  for (int64_t rank = 0; rank < routed.dims.ep_size; ++rank) {
    RankData want = expected[rank], got = step->output(rank).data;
    if (step->inputs()[rank].tail == Tail::kUnspecified) {
      const int64_t used = routed.layout.total_recv_tokens[rank];
      ASSERT_LT(used, routed.dims.capacity);
      for (RankData* data : {&want, &got}) {
        data->rows.resize(used * type.bytes());
        data->weights.resize(used);
      }
    }
    EXPECT_EQ("", Difference(type, want, got))
        << OpName(op) << " on rank " << rank;
  }
}

void BackendTest::ExpectWorks(const Domain& domain, Op op, const Routed& routed,
                              const RowType& type, bool weighted) {
  const StepPtr step =
      NewStep(domain, op, RandomInputs(op, routed, type, weighted));
  ExpectRuns(step);
  ExpectOracle(routed, step);
}

}  // namespace ep::testing
