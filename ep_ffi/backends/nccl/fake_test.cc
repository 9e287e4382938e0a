// SPDX-License-Identifier: Apache-2.0

// Tests that the fake of CUDA, NCCL and NCCL EP detects calls that violate the
// contracts of the real libraries. The tests of the backend rely on the fake.

#include "ep_ffi/backends/nccl/fake/fake.h"

#include <cuda.h>
#include <gtest/gtest.h>
#include <nccl_ep.h>

#include "ep_ffi/backends/nccl/testing/group_fixture.h"

namespace ep::nccl {
namespace {

class FakeTest : public NcclGroupTest {
 protected:
  // Expects violations, of which the first contains these words.
  static void ExpectViolation(const std::string& words) {
    const std::vector<std::string> sentences = fake::TakeViolations();
    ExpectIn(sentences.empty() ? "nothing" : sentences[0], {words});
  }
};

TEST_F(FakeTest, RanksThatCallDifferentFunctionsAreCaught) {
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareRandom(domain, kDims);
  const StepPtr dispatch = NewMove(domain, Op::kDispatch, routed);
  const StepPtr combine = NewMove(domain, Op::kCombine, routed);
  for (int64_t rank = 0; rank < kDims.ep_size; ++rank) {
    (rank == 0 ? dispatch : combine)->Post(rank);
  }
  AwaitStreams(domain);
  ExpectViolation("rank 0 calls");
}

TEST_F(FakeTest, ConcurrentStreamsAreCaught) {
  AllowLeaks();
  fake::TheMachine().timeout_s = 0.5;
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareRandom(domain, kDims);
  const StepPtr step = NewMove(domain, Op::kDispatch, routed);
  step->Post(0);
  const auto stream = fake::NewStream(domain.devices[0]);
  Domain other = domain;
  other.streams[0] = stream.get();
  const StepPtr second = NewMove(other, Op::kDispatch, routed);
  second->Post(0);
  ExpectViolation("two streams");
  AwaitStreams(domain);
  AwaitStreams(other);
  (void)fake::TakeViolations();  // violations: the other ranks are absent
}

TEST_F(FakeTest, AStaleAddressIsCaught) {
  AllowLeaks();
  Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareRandom(domain, kDims);
  domain.enter = [](int64_t, const void*, int64_t bytes, Call* call) {
    return std::make_shared<fake::InHandler>(call, bytes);
  };
  const StepPtr step = NewMove(domain, Op::kDispatch, routed);
  step->Post(0);
  ExpectViolation("stale address");
  AwaitStreams(domain);
}

TEST_F(FakeTest, WrongCallsAreCaught) {
  void* memory;
  cuMemHostAlloc(&memory, 8, 0);
  ExpectViolation("no context is current");
  const std::shared_ptr<Device> device = OpenDevice(1);
  const Device::Scope scope(*device);
  cuMemFreeHost(&memory);
  ExpectViolation("did not make it");
  {
    const fake::InHandler handler(nullptr, 0);
    cuCtxSynchronize();
  }
  ExpectViolation("cuCtxSynchronize: waits or allocates");
  ncclUniqueId id;
  ncclGetUniqueId(&id);
  ncclComm_t comm;
  EXPECT_EQ(ncclSuccess, ncclCommInitRank(&comm, 1, id, 0));
  ncclEpGroup_t group;
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
  ncclEpGroupConfig_t old = config;
  --old.size;
  ncclEpCreateGroup(&group, comm, &old);
  ExpectViolation("config.size");
  ncclEpCreateGroup(&group, comm, &config);
  ExpectViolation("num_experts = ");
  ncclCommDestroy(comm);
}

}  // namespace
}  // namespace ep::nccl
