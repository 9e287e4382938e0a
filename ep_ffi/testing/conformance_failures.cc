// SPDX-License-Identifier: Apache-2.0

// Conformance: what goes wrong on one rank is an error on all of them, in
// time, with a sentence that says who and why; and the next run works.

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "ep_ffi/testing/conformance.h"

namespace ep::testing {
namespace {

double Now() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// The code, and the words that its message must contain.
struct Failure {
  Code code;
  std::vector<std::string> words;
};

void ExpectFailure(const Failure& expected, const Status& status) {
  EXPECT_EQ(expected.code, status.code()) << status.message();
  for (const std::string& word : expected.words) {
    EXPECT_NE(std::string::npos, status.message().find(word))
        << "no \"" << word << "\" in: " << status.message();
  }
}

void ExpectFailureOnAll(const Failure& expected, const StepPtr& step) {
  for (const Status& status : step->Run()) {
    ExpectFailure(expected, status);
  }
}

TEST_P(Conformance, AnIdOutOfRangeFailsOnEveryRank) {
  const Domain domain = MakeDomain(kWorld);
  Choices topk_idx = RandomChoices(random_, kDims);
  topk_idx[2][7] = kDims.num_experts;
  ExpectFailureOnAll(
      {Code::kInvalidArgument,
       {"ep_prepare", kLayerName, "rank 2", "topk_idx[3, 1] = 8", "-1..7"}},
      Step::Make(domain, Op::kPrepare, {NextRun()},
                 PrepareInputs(kDims, topk_idx)));
  PrepareRandom(domain, kDims);
}

TEST_P(Conformance, AMeshThatHasARankElsewhereFailsOnEveryRank) {
  const Domain domain = MakeDomain(kWorld);
  std::vector<RankInput> inputs =
      PrepareInputs(kDims, RandomChoices(random_, kDims));
  for (int32_t rank = 0; rank < kDims.ep_size; ++rank) {
    inputs[rank].place = {rank, 0};
  }
  for (const Status& status :
       Step::Make(domain, Op::kPrepare, {NextRun()}, inputs)->Run()) {
    EXPECT_TRUE(status.ok()) << status.message();
  }
  inputs[2].place[0] = 1;
  ExpectFailureOnAll({Code::kFailedPrecondition,
                      {"ep_prepare", kLayerName, "rank 2",
                       "the mesh of the program has this device as rank 1",
                       "in the mesh of the group it is rank 2"}},
                     Step::Make(domain, Op::kPrepare, {NextRun()}, inputs));
  PrepareRandom(domain, kDims);
}

TEST_P(Conformance, AnOverflowFailsOnEveryRank) {
  PlanDims dims = kDims;
  dims.capacity = 24;
  const Domain domain = MakeDomain({dims});
  Choices topk_idx(dims.ep_size);
  for (auto& mine : topk_idx) {
    for (int t = 0; t < dims.num_tokens; ++t) {
      mine.insert(mine.end(), {6, 7});  // all tokens to rank 3, twice
    }
  }
  ExpectFailureOnAll(
      {Code::kResourceExhausted,
       {"ep_prepare", kLayerName, "rank 3 needs 48", "per_rank = 24"}},
      Step::Make(domain, Op::kPrepare, {NextRun()},
                 PrepareInputs(dims, topk_idx)));
  PrepareRandom(domain, dims);
}

// A way in which rank 1 differs from the others.
struct Disagreement {
  const char* what;
  Op op;
  std::function<void(RankInput*)> differ;
};

// The last words are said by those who compare more than a hash.
Failure ToFailure(const Disagreement& d, bool says_what) {
  Failure failure = {
      Code::kFailedPrecondition,
      {OpName(d.op), kLayerName, "disagree", "rank 0", "rank 1"}};
  if (says_what) failure.words.push_back(d.what);
  return failure;
}

TEST_P(Conformance, RanksThatPrepareDifferentLayersFail) {
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
    ExpectFailureOnAll(ToFailure(c, GetParam().checks_every_op),
                       Step::Make(domain, c.op, {NextRun()}, inputs));
  }
  PrepareRandom(domain, kDims);
}

TEST_P(Conformance, RanksThatDisagreeFail) {
  EP_REQUIRE(checks_every_op, "one rank has other rows or another handle");
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareRandom(domain, kDims);
  const Routed rerouted = PrepareRandom(domain, kDims);
  Disagreement cases[] = {
      {"capacity", Op::kPrepare, [](RankInput* in) { ++in->dims.capacity; }},
      {"alignment", Op::kPrepare, [](RankInput* in) { ++in->dims.alignment; }},
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
    ExpectFailureOnAll(ToFailure(c, /*says_what=*/true),
                       Step::Make(domain, c.op, {NextRun()}, inputs));
  }
  ExpectWorks(domain, Op::kDispatch, routed, AnyType());
}

TEST_P(Conformance, AHandleOfAnotherLayerFails) {
  EP_REQUIRE(checks_every_op, "one rank has the wrong handle");
  const Domain domain = MakeDomain(kWorld);
  PlanDims other = kDims;
  other.alignment = 3;
  const Routed routed = PrepareRandom(domain, kDims);
  const Routed foreign = PrepareRandom(domain, other);
  for (Op op : {Op::kDispatch, Op::kCombine}) {
    std::vector<RankInput> inputs = RandomInputs(op, routed, AnyType());
    inputs[3].mem = foreign.mems[3];
    ExpectFailureOnAll(
        {Code::kInvalidArgument,
         {OpName(op), kLayerName, "rank 3", "handle.mem", "ep_prepare"}},
        Step::Make(domain, op, {NextRun()}, inputs));
  }
}

// Whatever bytes come back as a handle: all ranks complete, nothing is
// written out of bounds, and the group lives on.
TEST_P(Conformance, CorruptHandlesDoNoHarm) {
  EP_REQUIRE(checks_every_op, "the bytes of a handle are corrupt");
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareRandom(domain, kDims);
  for (int i = 0; i < 100; ++i) {
    const Op op = i % 2 ? Op::kDispatch : Op::kCombine;
    std::vector<RankInput> inputs = RandomInputs(op, routed, AnyType());
    std::vector<std::byte>& mem = inputs[i % kDims.ep_size].mem;
    mem[Uniform(random_, 0, mem.size() - 1)] ^=
        std::byte(1 << Uniform(random_, 0, 7));
    (void)Step::Make(domain, op, {NextRun()}, inputs)->Run();
  }
  ExpectWorks(domain, Op::kDispatch, routed, AnyType());
}

TEST_P(Conformance, AFailureEndsItsRunAndNoOther) {
  EP_REQUIRE(any_order, "ranks wait in different ops");
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareRandom(domain, kDims);
  const int64_t doomed = NextRun();
  const auto inputs = RandomInputs(Op::kDispatch, routed, AnyType());
  const StepPtr early = Step::Make(domain, Op::kDispatch, {doomed, 1}, inputs);
  const StepPtr other =
      Step::Make(domain, Op::kDispatch, {NextRun(), 1}, inputs);
  for (const StepPtr& step : {early, other}) {
    for (int64_t rank : {1, 2, 3}) step->Post(rank);
  }

  std::vector<RankInput> bad = inputs;
  bad[0].mem.clear();
  const StepPtr cause = Step::Make(domain, Op::kDispatch, {doomed, 2}, bad);
  cause->Post(0);
  const Failure expected = {Code::kInvalidArgument, {"rank 0", "0 bytes"}};
  ExpectFailure(expected, cause->Wait(0));
  for (int64_t rank : {1, 2, 3}) ExpectFailure(expected, early->Wait(rank));
  // Those that come later learn the same.
  for (int64_t rank : {1, 2, 3}) cause->Post(rank);
  for (int64_t rank : {1, 2, 3}) ExpectFailure(expected, cause->Wait(rank));
  early->Post(0);
  ExpectFailure(expected, early->Wait(0));

  other->Post(0);
  for (int64_t rank = 0; rank < kDims.ep_size; ++rank) {
    ExpectOk(other->Wait(rank));
  }
  ExpectOracle(Op::kDispatch, routed, inputs, other);
}

TEST_P(Conformance, ARunCanBeFailedFromOutside) {
  EP_REQUIRE(any_order, "ranks must stop waiting");
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareRandom(domain, kDims);
  const int64_t run_id = NextRun();
  const StepPtr step =
      Step::Make(domain, Op::kDispatch, {run_id},
                 RandomInputs(Op::kDispatch, routed, AnyType()));
  for (int64_t rank : {1, 2}) step->Post(rank);
  for (const auto& group : domain.groups) {
    group->FailRun(run_id, Status(Code::kUnavailable, "elsewhere"));
  }
  for (int64_t rank : {0, 3}) step->Post(rank);
  for (int64_t rank = 0; rank < kDims.ep_size; ++rank) {
    ExpectFailure({Code::kUnavailable, {"elsewhere"}}, step->Wait(rank));
  }
  ExpectWorks(domain, Op::kDispatch, routed, AnyType());
}

TEST_P(Conformance, AnInfiniteTimeoutIsNoDeadline) {
  WorldOptions options = kWorld;
  options.timeout_s = std::numeric_limits<double>::infinity();
  const Domain domain = MakeDomain(options);
  const Routed routed = PrepareRandom(domain, kDims);
  const StepPtr step =
      Step::Make(domain, Op::kDispatch, {NextRun()},
                 RandomInputs(Op::kDispatch, routed, AnyType()));
  for (int64_t rank : {0, 1, 3}) step->Post(rank);
  usleep(1'300'000);  // backends look for what is late once a second
  step->Post(2);
  ForEachRank(kDims.ep_size, [&](int64_t rank) { ExpectOk(step->Wait(rank)); });
  ExpectWorks(domain, Op::kDispatch, routed, AnyType());
}

TEST_P(Conformance, AnAbsentRankIsNamedInTime) {
  EP_REQUIRE(any_order, "three ranks must find out who the fourth is");
  WorldOptions options = kWorld;
  options.timeout_s = 1;
  const Domain domain = MakeDomain(options);
  const Routed routed = PrepareRandom(domain, kDims);
  const Place place = {NextRun()};
  Place next_place = place;
  next_place.position = 1;
  const auto inputs = RandomInputs(Op::kDispatch, routed, AnyType());
  const StepPtr step = Step::Make(domain, Op::kDispatch, place, inputs);
  const StepPtr next = Step::Make(domain, Op::kDispatch, next_place, inputs);
  const Failure expected = {
      Code::kDeadlineExceeded,
      {"ep_dispatch", kLayerName, "timeout_s = 1 s", "for rank 2"}};
  const double begin = Now();
  for (int64_t rank : {0, 1, 3}) step->Post(rank);
  for (int64_t rank : {0, 1, 3}) ExpectFailure(expected, step->Wait(rank));
  EXPECT_GE(Now() - begin, options.timeout_s);
  EXPECT_LT(Now() - begin, 3 * options.timeout_s);
  // The news may still be on its way to rank 2, which would find all others
  // here. So it first comes to where there is nobody.
  for (const StepPtr& late : {next, step}) {
    late->Post(2);
    ExpectFailure(expected, late->Wait(2));
  }
  ExpectWorks(domain, Op::kDispatch, routed, AnyType());
}

TEST_P(Conformance, ClosingFailsWhatComes) {
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareRandom(domain, kDims);
  const StepPtr step =
      Step::Make(domain, Op::kDispatch, {NextRun()},
                 RandomInputs(Op::kDispatch, routed, AnyType()));
  for (const auto& group : domain.groups) (void)group->Close();
  for (int64_t rank = 0; rank < kDims.ep_size; ++rank) {
    step->Post(rank);
    ExpectFailure(
        {Code::kFailedPrecondition, {"ep_dispatch", kLayerName, "finalized"}},
        step->Wait(rank));
  }
}

TEST_P(Conformance, ClosingFailsWhatIsPending) {
  EP_REQUIRE(any_order, "an op waits while its group is closed");
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareRandom(domain, kDims);
  const auto inputs = RandomInputs(Op::kDispatch, routed, AnyType());
  const StepPtr pending =
      Step::Make(domain, Op::kDispatch, {NextRun()}, inputs);
  const StepPtr later = Step::Make(domain, Op::kDispatch, {NextRun()}, inputs);
  const double begin = Now();
  pending->Post(0);
  (void)domain.groups[0]->Close();
  later->Post(0);
  for (const StepPtr& step : {pending, later}) {
    ExpectFailure(
        {Code::kFailedPrecondition, {"ep_dispatch", kLayerName, "finalized"}},
        step->Wait(0));
  }
  EXPECT_LT(Now() - begin, kWorld.timeout_s / 4);
}

TEST_P(Conformance, PeersOfAClosedRankDoNotWaitForIt) {
  EP_REQUIRE(any_order, "ops wait for a rank that will not come");
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareRandom(domain, kDims);
  const auto inputs = RandomInputs(Op::kDispatch, routed, AnyType());
  const StepPtr pending =
      Step::Make(domain, Op::kDispatch, {NextRun()}, inputs);
  const StepPtr later = Step::Make(domain, Op::kDispatch, {NextRun()}, inputs);
  const double begin = Now();
  for (int64_t rank : {1, 2, 3}) pending->Post(rank);
  (void)domain.groups[0]->Close();
  for (int64_t rank : {1, 2, 3}) later->Post(rank);
  for (const StepPtr& step : {pending, later}) {
    for (int64_t rank : {1, 2, 3}) {
      const Status status = step->Wait(rank);
      EXPECT_FALSE(status.ok());
      EXPECT_NE(std::string::npos, status.message().find("finalized"))
          << status.message();
    }
  }
  EXPECT_LT(Now() - begin, kWorld.timeout_s / 4);
}

}  // namespace
}  // namespace ep::testing
