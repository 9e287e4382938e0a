// SPDX-License-Identifier: Apache-2.0

// Conformance: a backend matches the ops of a domain's ranks by run id and
// site, in any order of posting. All waits end when a run fails, a timeout
// expires, or a group closes.

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <thread>

#include "ep_ffi/core/clock.h"
#include "ep_ffi/testing/conformance.h"

namespace ep::testing {
namespace {

TEST_P(OrderConformance, RanksPostInDifferentOrders) {
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareRandom(domain, kDims);
  std::vector<StepPtr> steps;
  for (int64_t run = 0; run < 4; ++run) {
    const int64_t run_id = NextRun();
    for (int64_t position = 0; position < 4; ++position) {
      for (int64_t clone : {0, 1}) {
        for (uint64_t program : {7, 8}) {
          const Op op = position % 2 ? Op::kCombine : Op::kDispatch;
          steps.push_back(
              NewMove(domain, op, routed, {run_id, position, clone, program}));
        }
      }
    }
  }
  std::vector<std::vector<size_t>> orders(kDims.ep_size,
                                          std::vector<size_t>(steps.size()));
  for (std::vector<size_t>& order : orders) {
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_);
  }
  ForEachRank(kDims.ep_size, [&](int64_t rank) {
    for (size_t i : orders[rank]) steps[i]->Post(rank);
    for (size_t i : orders[rank]) ExpectOk(steps[i]->Wait(rank));
  });
  for (const StepPtr& step : steps) ExpectOracle(routed, step);
}

// The iterations of a loop have the same run id and site. A rank posts an
// iteration after the previous one is complete, but may be ahead of its peers.
TEST_P(Conformance, IterationsOfALoopMatchInOrder) {
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareRandom(domain, kDims);
  const int64_t run_id = NextRun();
  std::vector<StepPtr> loop;
  for (int i = 0; i < 40; ++i) {
    loop.push_back(NewMove(domain, Op::kDispatch, routed, {run_id}));
  }
  ForEachRank(kDims.ep_size, [&](int64_t rank) {
    for (const StepPtr& iteration : loop) {
      iteration->Post(rank);
      ExpectOk(iteration->Wait(rank));
      if (rank == 1) std::this_thread::yield();
    }
  });
  for (const StepPtr& iteration : loop) ExpectOracle(routed, iteration);
}

TEST_P(Conformance, PostingDoesNotWaitForPeers) {
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareRandom(domain, kDims);
  const StepPtr step = NewMove(domain, Op::kDispatch, routed);
  // One thread posts for all ranks, so a post that waits would never return.
  for (int64_t rank = 0; rank < kDims.ep_size; ++rank) {
    // An op on a stream is done once it is enqueued.
    for (int64_t r = 0; r < rank; ++r) {
      EXPECT_EQ(domain.stream(r) != nullptr, step->IsDone(r));
    }
    step->Post(rank);
  }
  for (int64_t rank = 0; rank < kDims.ep_size; ++rank) {
    ExpectOk(step->Wait(rank));
  }
  ExpectOracle(routed, step);
}

TEST_P(Conformance, DomainsAndGroupsDoNotMix) {
  PlanDims dims = kDims;
  dims.ep_size = 2;
  std::vector<Domain> domains = MakeWorld({dims, /*num_domains=*/2});
  domains.push_back(MakeDomain({dims}));
  const Place same_place = {NextRun()};
  std::vector<Routed> routed;
  std::vector<StepPtr> steps;
  for (const Domain& domain : domains) {
    routed.push_back(PrepareRandom(domain, dims));
    steps.push_back(NewMove(domain, Op::kDispatch, routed.back(), same_place));
  }
  ForEachRank(dims.ep_size, [&](int64_t rank) {
    for (const StepPtr& step : steps) step->Post(rank);
    for (const StepPtr& step : steps) ExpectOk(step->Wait(rank));
  });
  for (size_t i = 0; i < steps.size(); ++i) ExpectOracle(routed[i], steps[i]);
}

TEST_P(OrderConformance, AFailureEndsOnlyItsRun) {
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareRandom(domain, kDims);
  const int64_t doomed = NextRun();
  const StepPtr early = NewMove(domain, Op::kDispatch, routed, {doomed, 1});
  const StepPtr other = NewMove(domain, Op::kDispatch, routed);
  for (const StepPtr& step : {early, other}) {
    for (int64_t rank : {1, 2, 3}) step->Post(rank);
  }

  std::vector<RankInput> bad = early->inputs();
  bad[0].mem.clear();
  const StepPtr cause = Step::Make(domain, Op::kDispatch, {doomed, 2}, bad);
  cause->Post(0);
  const Failure expected = {Code::kInvalidArgument, {"rank 0", "0 bytes"}};
  ExpectFailure(expected, cause->Wait(0));
  for (int64_t rank : {1, 2, 3}) ExpectFailure(expected, early->Wait(rank));
  // Calls that a rank posts after the failure get the same error.
  for (int64_t rank : {1, 2, 3}) cause->Post(rank);
  for (int64_t rank : {1, 2, 3}) ExpectFailure(expected, cause->Wait(rank));
  early->Post(0);
  ExpectFailure(expected, early->Wait(0));

  other->Post(0);
  for (int64_t rank : {0, 1, 2, 3}) ExpectOk(other->Wait(rank));
  ExpectOracle(routed, other);
}

TEST_P(OrderConformance, ARunCanBeFailedFromOutside) {
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareRandom(domain, kDims);
  const int64_t run_id = NextRun();
  const StepPtr step = NewMove(domain, Op::kDispatch, routed, {run_id});
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
  usleep(1'300'000);  // backends check for timeouts once a second
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
  const StepPtr step = NewMove(domain, Op::kDispatch, routed, {run});
  const StepPtr next = NewMove(domain, Op::kDispatch, routed, {run, 1});
  const Failure expected = {
      Code::kDeadlineExceeded,
      {"ep_dispatch", kLayerName, "timeout_s = 1 s", "for rank 2"}};
  const double begin = Now();
  for (int64_t rank : {0, 1, 3}) step->Post(rank);
  for (int64_t rank : {0, 1, 3}) ExpectFailure(expected, step->Wait(rank));
  EXPECT_GE(Now() - begin, options.timeout_s);
  EXPECT_LT(Now() - begin, 3 * options.timeout_s);
  // Rank 2 may not know of the failure yet, and would complete `step`, which
  // all other ranks have posted. So rank 2 first posts `next`, and has to wait.
  for (const StepPtr& late : {next, step}) {
    late->Post(2);
    ExpectFailure(expected, late->Wait(2));
  }
  ExpectWorks(domain, Op::kDispatch, routed, AnyType());
}

TEST_P(FailureConformance, ClosingFailsLaterOps) {
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
