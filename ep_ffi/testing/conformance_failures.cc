// SPDX-License-Identifier: Apache-2.0

// Conformance: an invalid input on one rank is an error on every rank, with a
// message that names the rank and the cause. The next run works.

#include <gtest/gtest.h>

#include "ep_ffi/testing/conformance.h"

namespace ep::testing {
namespace {

TEST_P(FailureConformance, AnIdOutOfRangeFailsOnEveryRank) {
  const Domain domain = MakeDomain(kWorld);
  Choices topk_idx = RandomChoices(random_, kDims);
  topk_idx[2][7] = kDims.num_experts;
  ExpectFailureOnAll(
      {Code::kInvalidArgument,
       {"ep_prepare", kLayerName, "rank 2", "topk_idx[3, 1] = 8", "-1..7"}},
      NewPrepare(domain, kDims, topk_idx));
  PrepareRandom(domain, kDims);
}

TEST_P(FailureConformance, AMeshWithAnotherRankOrderFailsOnEveryRank) {
  const Domain domain = MakeDomain(kWorld);
  std::vector<RankInput> inputs =
      PrepareInputs(kDims, RandomChoices(random_, kDims));
  for (int32_t rank = 0; rank < kDims.ep_size; ++rank) {
    inputs[rank].place = {rank, 0};
  }
  ExpectRuns(NewStep(domain, Op::kPrepare, inputs));
  inputs[2].place[0] = 1;
  ExpectFailureOnAll({Code::kFailedPrecondition,
                      {"ep_prepare", kLayerName, "rank 2",
                       "the mesh of the program has this device as rank 1",
                       "in the mesh of the group it is rank 2"}},
                     NewStep(domain, Op::kPrepare, inputs));
  PrepareRandom(domain, kDims);
}

TEST_P(FailureConformance, AnOverflowFailsOnEveryRank) {
  PlanDims dims = kDims;
  dims.capacity = 24;
  const Domain domain = MakeDomain({dims});
  Choices topk_idx(dims.ep_size);
  for (auto& mine : topk_idx) {
    for (int t = 0; t < dims.num_tokens; ++t) {
      mine.insert(mine.end(), {6, 7});  // both experts are on rank 3
    }
  }
  ExpectFailureOnAll(
      {Code::kResourceExhausted,
       {"ep_prepare", kLayerName, "rank 3 needs 48", "capacity is 24"}},
      NewPrepare(domain, dims, topk_idx));
  PrepareRandom(domain, dims);
}

// A way in which rank 1 differs from the other ranks.
struct Disagreement {
  const char* what;
  Op op;
  std::function<void(RankInput*)> differ;
};

// Returns the expected failure. The message has the difference only if the
// backend compares more than a hash.
Failure ToFailure(const Disagreement& d, bool has_difference) {
  Failure failure = {
      Code::kFailedPrecondition,
      {OpName(d.op), kLayerName, "disagree", "rank 0", "rank 1"}};
  if (has_difference) failure.parts.push_back(d.what);
  return failure;
}

TEST_P(FailureConformance, RanksThatPrepareDifferentLayersFail) {
  const Domain domain = MakeDomain(kWorld);
  const auto resize = [](RankInput* in) {
    in->topk_idx.resize(in->dims.num_choices(), -1);
  };
  Disagreement cases[] = {
      {"tokens per rank", Op::kPrepare,
       [&](RankInput* in) { in->dims.num_tokens = 5, resize(in); }},
      {"top_k", Op::kPrepare,
       [&](RankInput* in) { in->dims.top_k = 1, resize(in); }},
      {"alignment", Op::kPrepare,
       [](RankInput* in) { in->dims.alignment *= 2; }},
      {"overflow", Op::kPrepare, [](RankInput* in) { in->dims.drop = true; }},
  };
  for (const Disagreement& c : cases) {
    SCOPED_TRACE(c.what);
    std::vector<RankInput> inputs =
        PrepareInputs(kDims, RandomChoices(random_, kDims));
    c.differ(&inputs[1]);
    ExpectFailureOnAll(ToFailure(c, backend_.checks_every_op),
                       NewStep(domain, Op::kPrepare, inputs));
  }
  PrepareRandom(domain, kDims);
}

TEST_P(CheckConformance, RanksThatDisagreeFail) {
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareRandom(domain, kDims);
  const Routed rerouted = PrepareRandom(domain, kDims);
  Disagreement cases[] = {
      {"capacity", Op::kPrepare, [](RankInput* in) { ++in->dims.capacity; }},
      {"hidden size", Op::kDispatch,
       [](RankInput* in) {
         in->type.width = 4;
         in->data.rows.resize(kDims.num_tokens * in->type.bytes());
       }},
      {"dtype", Op::kCombine,
       [](RankInput* in) { in->type.dtype = DType::kBFloat16; }},
      {"weights", Op::kCombine,
       [](RankInput* in) { in->data.weights.clear(); }},
      {"routing", Op::kDispatch,
       [&](RankInput* in) { in->mem = rerouted.mems[1]; }},
  };
  for (const Disagreement& c : cases) {
    SCOPED_TRACE(c.what);
    std::vector<RankInput> inputs =
        c.op == Op::kPrepare
            ? PrepareInputs(kDims, RandomChoices(random_, kDims))
            : RandomInputs(c.op, routed, AnyType());
    c.differ(&inputs[1]);
    ExpectFailureOnAll(ToFailure(c, /*has_difference=*/true),
                       NewStep(domain, c.op, inputs));
  }
  ExpectWorks(domain, Op::kDispatch, routed, AnyType());
}

// With any bytes in a handle, every rank completes, no op writes out of bounds,
// and the group serves the next op.
TEST_P(CheckConformance, CorruptHandlesDoNoHarm) {
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareRandom(domain, kDims);
  for (int i = 0; i < 100; ++i) {
    const Op op = i % 2 ? Op::kDispatch : Op::kCombine;
    std::vector<RankInput> inputs = RandomInputs(op, routed, AnyType());
    std::vector<std::byte>& mem = inputs[i % kDims.ep_size].mem;
    mem[Uniform(random_, 0, mem.size() - 1)] ^=
        std::byte(1 << Uniform(random_, 0, 7));
    (void)NewStep(domain, op, inputs)->Run();
  }
  ExpectWorks(domain, Op::kDispatch, routed, AnyType());
}

}  // namespace
}  // namespace ep::testing
