// SPDX-License-Identifier: Apache-2.0

// Conformance: ops of a domain's ranks are matched by run id and site, whatever
// the order in which ranks post them.

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <thread>

#include "ep_ffi/testing/conformance.h"

namespace ep::testing {
namespace {

// A step, with its inputs to compare its outputs with the oracle's.
struct Planned {
  Op op;
  std::vector<RankInput> inputs;
  StepPtr step;
};

TEST_P(OrderConformance, RanksComeInDifferentOrders) {
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareRandom(domain, kDims);
  std::vector<Planned> plan;
  for (int64_t run = 0; run < 4; ++run) {
    const int64_t run_id = NextRun();
    for (int64_t position = 0; position < 4; ++position) {
      for (int64_t clone : {0, 1}) {
        for (uint64_t program : {7, 8}) {
          const Op op = position % 2 ? Op::kCombine : Op::kDispatch;
          const Place place = {run_id, position, clone, program};
          const auto inputs = RandomInputs(op, routed, AnyType());
          plan.push_back({op, inputs, Step::Make(domain, op, place, inputs)});
        }
      }
    }
  }
  std::vector<std::vector<size_t>> orders(kDims.ep_size,
                                          std::vector<size_t>(plan.size()));
  for (std::vector<size_t>& order : orders) {
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_);
  }
  ForEachRank(kDims.ep_size, [&](int64_t rank) {
    for (size_t i : orders[rank]) plan[i].step->Post(rank);
    for (size_t i : orders[rank]) {
      ExpectOk(plan[i].step->Wait(rank));
    }
  });
  for (const Planned& planned : plan) {
    ExpectOracle(planned.op, routed, planned.inputs, planned.step);
  }
}

// The iterations of a loop have the same run id and site. A rank posts one only
// when the one before is complete, but may be ahead of its peers.
TEST_P(Conformance, IterationsOfALoopMeetInOrder) {
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareRandom(domain, kDims);
  const int64_t run_id = NextRun();
  std::vector<Planned> loop;
  for (int i = 0; i < 40; ++i) {
    const auto inputs = RandomInputs(Op::kDispatch, routed, AnyType());
    loop.push_back({Op::kDispatch, inputs,
                    Step::Make(domain, Op::kDispatch, {run_id}, inputs)});
  }
  ForEachRank(kDims.ep_size, [&](int64_t rank) {
    for (const Planned& iteration : loop) {
      iteration.step->Post(rank);
      ExpectOk(iteration.step->Wait(rank));
      if (rank == 1) std::this_thread::yield();
    }
  });
  for (const Planned& iteration : loop) {
    ExpectOracle(iteration.op, routed, iteration.inputs, iteration.step);
  }
}

TEST_P(Conformance, PostingDoesNotWaitForPeers) {
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareRandom(domain, kDims);
  const auto inputs = RandomInputs(Op::kDispatch, routed, AnyType());
  const StepPtr step = NewStep(domain, Op::kDispatch, inputs);
  // One thread posts for all ranks, so a post that waited would not return.
  for (int64_t rank = 0; rank < kDims.ep_size; ++rank) {
    // An op on a stream is done when it is enqueued.
    for (int64_t r = 0; r < rank; ++r) {
      EXPECT_EQ(domain.stream(r) != nullptr, step->IsDone(r));
    }
    step->Post(rank);
  }
  for (int64_t rank = 0; rank < kDims.ep_size; ++rank) {
    ExpectOk(step->Wait(rank));
  }
  ExpectOracle(Op::kDispatch, routed, inputs, step);
}

TEST_P(Conformance, DomainsAndGroupsDoNotMix) {
  PlanDims dims = kDims;
  dims.ep_size = 2;
  std::vector<Domain> domains = MakeWorld({dims, /*num_domains=*/2});
  domains.push_back(MakeDomain({dims}));
  const Place same_place = {NextRun()};
  std::vector<Routed> routed;
  std::vector<Planned> plan;
  for (const Domain& domain : domains) {
    routed.push_back(PrepareRandom(domain, dims));
    const auto inputs = RandomInputs(Op::kDispatch, routed.back(), AnyType());
    plan.push_back({Op::kDispatch, inputs,
                    Step::Make(domain, Op::kDispatch, same_place, inputs)});
  }
  ForEachRank(dims.ep_size, [&](int64_t rank) {
    for (const Planned& planned : plan) planned.step->Post(rank);
    for (const Planned& planned : plan) {
      ExpectOk(planned.step->Wait(rank));
    }
  });
  for (size_t i = 0; i < plan.size(); ++i) {
    ExpectOracle(Op::kDispatch, routed[i], plan[i].inputs, plan[i].step);
  }
}

}  // namespace
}  // namespace ep::testing
