// SPDX-License-Identifier: Apache-2.0

// Conformance: no rank waits in vain. A run that has failed, a rank that does
// not come in time and a group that is closed end what waits for them.

#include <gtest/gtest.h>
#include <unistd.h>

#include <limits>

#include "ep_ffi/core/clock.h"
#include "ep_ffi/testing/conformance.h"

namespace ep::testing {
namespace {

TEST_P(OrderConformance, AFailureEndsItsRunAndNoOther) {
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
  // Later posts get the same error.
  for (int64_t rank : {1, 2, 3}) cause->Post(rank);
  for (int64_t rank : {1, 2, 3}) ExpectFailure(expected, cause->Wait(rank));
  early->Post(0);
  ExpectFailure(expected, early->Wait(0));

  other->Post(0);
  for (int64_t rank : {0, 1, 2, 3}) ExpectOk(other->Wait(rank));
  ExpectOracle(Op::kDispatch, routed, inputs, other);
}

TEST_P(OrderConformance, ARunCanBeFailedFromOutside) {
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
  const StepPtr step = NewMove(domain, Op::kDispatch, routed);
  for (int64_t rank : {0, 1, 3}) step->Post(rank);
  usleep(1'300'000);  // backends look for what is late once a second
  step->Post(2);
  ForEachRank(kDims.ep_size, [&](int64_t rank) { ExpectOk(step->Wait(rank)); });
  ExpectWorks(domain, Op::kDispatch, routed, AnyType());
}

TEST_P(OrderConformance, AnAbsentRankIsNamedInTime) {
  WorldOptions options = kWorld;
  options.timeout_s = 1;
  const Domain domain = MakeDomain(options);
  const Routed routed = PrepareRandom(domain, kDims);
  const int64_t run = NextRun();
  const auto inputs = RandomInputs(Op::kDispatch, routed, AnyType());
  const StepPtr step = Step::Make(domain, Op::kDispatch, {run}, inputs);
  const StepPtr next = Step::Make(domain, Op::kDispatch, {run, 1}, inputs);
  const Failure expected = {
      Code::kDeadlineExceeded,
      {"ep_dispatch", kLayerName, "timeout_s = 1 s", "for rank 2"}};
  const double begin = Now();
  for (int64_t rank : {0, 1, 3}) step->Post(rank);
  for (int64_t rank : {0, 1, 3}) ExpectFailure(expected, step->Wait(rank));
  EXPECT_GE(Now() - begin, options.timeout_s);
  EXPECT_LT(Now() - begin, 3 * options.timeout_s);
  // Rank 2 may not know of the failure yet, and would complete `step`, which
  // all others have posted. So it first posts `next`, where it must wait.
  for (const StepPtr& late : {next, step}) {
    late->Post(2);
    ExpectFailure(expected, late->Wait(2));
  }
  ExpectWorks(domain, Op::kDispatch, routed, AnyType());
}

TEST_P(FailureConformance, ClosingFailsWhatComes) {
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareRandom(domain, kDims);
  const StepPtr step = NewMove(domain, Op::kDispatch, routed);
  for (const auto& group : domain.groups) (void)group->Close();
  for (int64_t rank = 0; rank < kDims.ep_size; ++rank) {
    step->Post(rank);
    ExpectFailure(
        {Code::kFailedPrecondition, {"ep_dispatch", kLayerName, "finalized"}},
        step->Wait(rank));
  }
}

TEST_P(OrderConformance, ClosingEndsAllWaits) {
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareRandom(domain, kDims);
  const StepPtr own = NewMove(domain, Op::kDispatch, routed);
  const StepPtr theirs = NewMove(domain, Op::kDispatch, routed);
  const StepPtr later = NewMove(domain, Op::kDispatch, routed);
  const double begin = Now();
  own->Post(0);
  for (int64_t rank : {1, 2, 3}) theirs->Post(rank);
  (void)domain.groups[0]->Close();
  for (int64_t rank : {0, 1, 2, 3}) later->Post(rank);
  for (const StepPtr& step : {own, later}) {
    ExpectFailure(
        {Code::kFailedPrecondition, {"ep_dispatch", kLayerName, "finalized"}},
        step->Wait(0));
  }
  for (int64_t rank : {1, 2, 3}) {
    ExpectWords({"finalized"}, theirs->Wait(rank));
    ExpectWords({"finalized"}, later->Wait(rank));
  }
  EXPECT_LT(Now() - begin, kWorld.timeout_s / 4);
}

}  // namespace
}  // namespace ep::testing
