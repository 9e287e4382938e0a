// SPDX-License-Identifier: Apache-2.0

// Fixtures that test the nccl backend over fake libraries. Ranks are threads,
// GPUs are numbers, and a violation fails the test; see fake.h.

#ifndef EP_FFI_BACKENDS_NCCL_TESTING_GROUP_FIXTURE_H_
#define EP_FFI_BACKENDS_NCCL_TESTING_GROUP_FIXTURE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ep_ffi/backends/nccl/group.h"
#include "ep_ffi/backends/nccl/limits.h"
#include "ep_ffi/testing/conformance.h"

namespace ep::nccl {

using testing::Choices;
using testing::Domain;
using testing::ExpectIn;
using testing::ExpectOk;
using testing::ExpectRuns;
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

// Allows the current test to leave objects of the libraries behind.
void AllowLeaks();

void Sleep(double seconds);

// Waits until the streams are idle. After a group has given up, the fake may
// still write to the buffers of its ops.
void AwaitStreams(const Domain& domain);

// Returns the sizes of a group for layers with these dimensions.
Sizes SizesFor(const PlanDims& dims);

// Opens a device with one report.
std::shared_ptr<Device> OpenDevice(int32_t ordinal);

// A communicator that a rank borrows from the test, instead of from XLA.
class Lent {
 public:
  // Collective over the ranks that share `id`.
  Lent(int32_t device, int32_t ep_size, int32_t rank, const std::string& id);
  ~Lent();

  ncclComm_t comm() const { return comm_; }

 private:
  const std::shared_ptr<Device> device_;
  ncclComm_t comm_ = nullptr;
};

// Connects the ranks of one domain, on devices from `first_device` on. Returns
// the results by rank. Opens the groups if all ranks have passed the checks, as
// bootstrap does. With `lent`, rank r borrows the communicator of rank r +
// shift from `lent`, which this function fills if it is empty; otherwise each
// group creates its own communicator.
std::vector<Status> Connect(const Sizes& sizes, double timeout_s,
                            int32_t first_device,
                            std::vector<std::shared_ptr<NcclGroup>>* groups,
                            std::vector<std::shared_ptr<Lent>>* lent = nullptr,
                            int64_t shift = 0);

// Connects ranks on the devices from 0 on, and expects success.
std::vector<std::shared_ptr<NcclGroup>> ConnectAll(
    double timeout_s, std::vector<std::shared_ptr<Lent>>* lent = nullptr);

void ExpectNan(const RowType& type, const testing::RankData& data);

// Describe the backend for the conformance suite: with a process per GPU, and
// with one process for all GPUs, which borrows communicators.
testing::Backend FakeNccl();
testing::Backend LentNccl();

// The base class of tests that only the nccl backend passes.
class NcclGroupTest : public testing::BackendTest {
 protected:
  NcclGroupTest() : BackendTest(FakeNccl()) {}

  static constexpr double kTimeoutS = 1;

  Domain MakeImpatient() {
    WorldOptions options = kWorld;
    options.timeout_s = kTimeoutS;
    return MakeDomain(options);
  }
  // Makes a domain whose host does not wait for the device, as in XLA.
  Domain MakeAsynchronous() {
    Domain domain = MakeImpatient();
    domain.synchronize = nullptr;
    return domain;
  }
  // Prepares a routing that has a fault on rank 1.
  Routed PrepareFault(const Domain& domain, const PlanDims& dims);
};

}  // namespace ep::nccl

#endif  // EP_FFI_BACKENDS_NCCL_TESTING_GROUP_FIXTURE_H_
