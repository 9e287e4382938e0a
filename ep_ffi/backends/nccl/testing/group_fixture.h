// SPDX-License-Identifier: Apache-2.0

// The nccl backend over the fake, for the tests of this folder: ranks are
// threads, devices are numbers, and a call that the real libraries would not
// survive is a violation, which fails the test.

#ifndef EP_FFI_BACKENDS_NCCL_TESTING_GROUP_FIXTURE_H_
#define EP_FFI_BACKENDS_NCCL_TESTING_GROUP_FIXTURE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ep_ffi/backends/nccl/group.h"
#include "ep_ffi/backends/nccl/limits.h"
#include "ep_ffi/testing/conformance.h"

namespace ep::nccl {

using testing::Choices;
using testing::Domain;
using testing::ExpectOk;
using testing::ExpectWords;
using testing::ForEachRank;
using testing::kDims;
using testing::kDTypes;
using testing::kMoves;
using testing::kWorld;
using testing::RandomChoices;
using testing::RankInput;
using testing::Routed;
using testing::RowType;
using testing::Step;
using testing::StepPtr;
using testing::WorldOptions;

// Allows this test to end without destroying all objects of the libraries.
void AllowLeaks();

// Waits until the condition holds, at most two seconds.
void Await(const std::function<bool()>& condition);

// Waits until the fake has ended the work of a group that gave up. Until then
// it may write to the buffers of the ops.
void AwaitStreams(const Domain& domain);

// Returns the sizes of a group that serves layers of these dimensions.
Sizes SizesFor(const PlanDims& dims);

// A communicator that a test lends to a rank, as XLA does.
class Lent {
 public:
  // Collective over the ranks of `id`.
  Lent(int32_t device, int32_t ep_size, int32_t rank, const std::string& id);
  ~Lent();

  ncclComm_t comm() const { return comm_; }

 private:
  Libraries nccl_;
  std::shared_ptr<Device> device_;
  ncclComm_t comm_ = nullptr;
};

// Connects the ranks of one domain, on devices from `first_device` on. Returns
// the results by rank. `lent` gets the communicators that the groups borrow,
// each that of the rank `shift` further; if it is null they make their own.
std::vector<Status> Connect(const Sizes& sizes, double timeout_s,
                            int32_t first_device,
                            std::vector<std::shared_ptr<NcclGroup>>* groups,
                            std::vector<std::shared_ptr<Lent>>* lent = nullptr,
                            int64_t shift = 0);

// Connects ranks on the devices from 0 on, and expects that all can.
std::vector<std::shared_ptr<NcclGroup>> ConnectAll(
    double timeout_s, std::vector<std::shared_ptr<Lent>>* lent = nullptr);

// Expects that each element is NaN.
void ExpectNan(const RowType& type, const testing::RankData& data);

// Describes the backend for the conformance suite.
testing::Backend FakeNccl();
// The same for one process with all GPUs, over communicators of the test, as
// XLA lends them.
testing::Backend LentNccl();

// The base of tests for properties that only this backend has.
class NcclGroupTest : public testing::BackendTest {
 protected:
  NcclGroupTest() : BackendTest(FakeNccl()) {}

  // Makes a domain whose ranks wait for one second.
  Domain MakeImpatient() {
    WorldOptions options = kWorld;
    options.timeout_s = 1;
    return MakeDomain(options);
  }
  // Prepares a routing in which rank 1 has a fault.
  Routed PrepareFault(const Domain& domain, const PlanDims& dims);
};

}  // namespace ep::nccl

#endif  // EP_FFI_BACKENDS_NCCL_TESTING_GROUP_FIXTURE_H_
