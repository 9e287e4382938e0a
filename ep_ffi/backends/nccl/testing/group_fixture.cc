// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/nccl/testing/group_fixture.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>
#include <utility>

#include "ep_ffi/backends/nccl/fake/fake.h"
#include "ep_ffi/backends/nccl/ranks.h"
#include "ep_ffi/testing/formats.h"

namespace ep::nccl {
namespace {

constexpr int64_t kMaxRowBytes = 4096;

// Receive rows that a group has beyond the capacity of the tests' layers.
constexpr int64_t kMoreRows = 8;

// Waits until threads left over from earlier tests destroy no more objects.
void AwaitThreadsOfEarlierTests() {
  fake::Resources now;
  while (now != fake::CountResources()) {
    now = fake::CountResources();
    Sleep(0.3);
  }
}

// A listener that checks that each test leaves no violations and no leaks.
class FakeChecker : public ::testing::EmptyTestEventListener {
 public:
  static void AllowLeaks() { leaks_allowed_ = true; }

 private:
  void OnTestStart(const ::testing::TestInfo&) override {
    if (std::exchange(leaks_allowed_, false)) AwaitThreadsOfEarlierTests();
    before_ = fake::CountResources();
    fake::TheMachine() = fake::Machine();
  }
  void OnTestEnd(const ::testing::TestInfo&) override {
    for (const std::string& violation : fake::TakeViolations()) {
      ADD_FAILURE() << violation;
    }
    if (leaks_allowed_) return;
    // The thread that connected a group may destroy its objects a little later.
    for (int i = 0; i < 200 && fake::CountResources() != before_; ++i) {
      Sleep(0.01);
    }
    EXPECT_EQ(before_, fake::CountResources());
  }

  static bool leaks_allowed_;
  fake::Resources before_;
};

bool FakeChecker::leaks_allowed_ = false;

[[maybe_unused]] const bool is_checked = [] {
  ::testing::UnitTest::GetInstance()->listeners().Append(new FakeChecker());
  return true;
}();

std::vector<Domain> MakeWorld(const WorldOptions& options, bool is_lent) {
  std::vector<Domain> domains(options.num_domains);
  for (int32_t i = 0; i < options.num_domains; ++i) {
    const int64_t ep_size = options.dims.ep_size;
    Sizes sizes = SizesFor(options.dims);
    sizes.capacity += kMoreRows;
    std::vector<std::shared_ptr<NcclGroup>> groups;
    std::vector<std::shared_ptr<Lent>> lent(ep_size);
    for (const Status& status : Connect(sizes, options.timeout_s, i * ep_size,
                                        &groups, is_lent ? &lent : nullptr)) {
      ExpectOk(status);
    }
    Domain& domain = domains[i];
    std::vector<NcclRanks::Rank> ranks;
    std::vector<std::shared_ptr<CUstream_st>> streams;
    for (int32_t rank = 0; rank < ep_size; ++rank) {
      domain.devices.push_back(i * ep_size + rank);
      ranks.push_back({domain.devices[rank], groups[rank]});
      streams.push_back(fake::NewStream(domain.devices[rank]));
      domain.streams.push_back(streams[rank].get());
    }
    domain.groups.assign(groups.begin(), groups.end());
    if (is_lent) {  // one process for all GPUs
      const auto all = std::make_shared<NcclRanks>(ranks);
      for (int32_t rank = 0; rank < ep_size; ++rank) {
        domain.groups[rank] = {all, all->OnDevice(domain.devices[rank])};
      }
    }
    domain.enter = [lent](int64_t rank, const void* mem, int64_t bytes,
                          Call* call) {
      if (lent[rank]) call->communicator = lent[rank]->comm();
      return std::make_shared<fake::InHandler>(mem, bytes);
    };
    domain.synchronize = [streams, groups = domain.groups](int64_t rank) {
      return groups[rank]->Check();
    };
  }
  return domains;
}

PlanDims Fit(PlanDims dims) {
  const auto round_up = [](int64_t value, int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
  };
  while (dims.alignment & (dims.alignment - 1)) ++dims.alignment;
  dims.capacity =
      std::max({dims.capacity, round_up(dims.num_tokens, 4), int64_t{4}});
  dims.capacity = round_up(dims.capacity, dims.alignment);
  return dims;
}

}  // namespace

void AllowLeaks() { FakeChecker::AllowLeaks(); }

void Sleep(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

void AwaitStreams(const Domain& domain) {
  for (void* stream : domain.streams) {
    fake::Synchronize(static_cast<CUstream>(stream));
  }
}

std::shared_ptr<Device> OpenDevice(int32_t ordinal) {
  Libraries libraries;
  ExpectOk(Libraries::Load("", "", &libraries));
  std::shared_ptr<Device> device;
  ExpectOk(Device::Open(libraries, ordinal, /*num_reports=*/1, &device));
  return device;
}

Lent::Lent(int32_t device, int32_t ep_size, int32_t rank, const std::string& id)
    : device_(OpenDevice(device)) {
  const Device::Scope scope(*device_);
  ncclUniqueId unique_id;
  std::memcpy(&unique_id, id.data(), sizeof(unique_id));
  EXPECT_EQ(ncclSuccess, ncclCommInitRank(&comm_, ep_size, unique_id, rank));
}

Lent::~Lent() {
  const Device::Scope scope(*device_);
  EXPECT_EQ(ncclSuccess, ncclCommDestroy(comm_));
}

Sizes SizesFor(const PlanDims& dims) {
  return {dims.num_experts, dims.ep_size, std::max<int64_t>(dims.num_tokens, 1),
          dims.capacity,    kMaxRowBytes, /*max_num_sms=*/0};
}

std::vector<Status> Connect(const Sizes& sizes, double timeout_s,
                            int32_t first_device,
                            std::vector<std::shared_ptr<NcclGroup>>* groups,
                            std::vector<std::shared_ptr<Lent>>* lent,
                            int64_t shift) {
  NcclGroup::Options common = {};
  common.name = "world";
  common.sizes = sizes;
  common.timeout_s = timeout_s;
  std::string id;
  const Status made = NewUniqueId("", "", &id);
  if (!made.ok()) return {made};
  groups->resize(sizes.ep_size);
  if (lent) lent->resize(sizes.ep_size);
  std::vector<Status> statuses(sizes.ep_size);
  ForEachRank(sizes.ep_size, [&](int64_t rank) {
    NcclGroup::Options mine = common;
    mine.rank = rank;
    mine.device = first_device + rank;
    std::shared_ptr<NcclGroup>& group = (*groups)[rank];
    statuses[rank] = NcclGroup::Create(mine, &group);
    if (!statuses[rank].ok()) return;
    if (lent && !(*lent)[rank]) {
      (*lent)[rank] = std::make_shared<Lent>(
          mine.device, sizes.ep_size, (rank + shift) % sizes.ep_size, id);
    }
    statuses[rank] = group->Join(id, lent ? (*lent)[rank]->comm() : nullptr);
    if (!statuses[rank].ok()) return;
    statuses[rank] = group->CheckMachine(fake::TheMachine().num_hosts);
  });
  for (const Status& status : statuses) {
    if (!status.ok()) return statuses;
  }
  ForEachRank(sizes.ep_size,
              [&](int64_t rank) { statuses[rank] = (*groups)[rank]->Open(); });
  return statuses;
}

std::vector<std::shared_ptr<NcclGroup>> ConnectAll(
    double timeout_s, std::vector<std::shared_ptr<Lent>>* lent) {
  std::vector<std::shared_ptr<NcclGroup>> groups;
  for (const Status& status : Connect(SizesFor(kDims), timeout_s,
                                      /*first_device=*/0, &groups, lent)) {
    ExpectOk(status);
  }
  return groups;
}

void ExpectNan(const RowType& type, const testing::RankData& data) {
  const int64_t count = data.rows.size() / ByteWidth(type.dtype);
  for (int64_t i = 0; i < count; ++i) {
    ASSERT_TRUE(std::isnan(testing::Load(type.dtype, data.rows.data(), i)))
        << "row " << i / type.width;
  }
  for (float weight : data.weights) ASSERT_TRUE(std::isnan(weight));
}

testing::Backend FakeNccl() {
  testing::Backend backend;
  backend.name = "nccl";
  backend.make = [](const WorldOptions& options) {
    return MakeWorld(options, /*is_lent=*/false);
  };
  backend.fit = Fit;
  backend.width_multiple = 8;
  backend.min_ep_size = 2;
  backend.fuses_weights = false;
  backend.repeatable_handles = false;
  backend.any_order = false;
  backend.checks_every_op = false;
  return backend;
}

testing::Backend LentNccl() {
  testing::Backend backend = FakeNccl();
  backend.make = [](const WorldOptions& options) {
    return MakeWorld(options, /*is_lent=*/true);
  };
  return backend;
}

Routed NcclGroupTest::PrepareFault(const Domain& domain, const PlanDims& dims) {
  Choices topk_idx = RandomChoices(random_, dims);
  topk_idx[1][2] = dims.num_experts;
  const StepPtr step = NewPrepare(domain, dims, topk_idx);
  for (const Status& status : step->Run()) {
    EXPECT_EQ(Code::kInvalidArgument, status.code()) << status.message();
  }
  Routed routed = {
      dims, testing::LayOut(dims, Choices(dims.ep_size, topk_idx[0])), {}};
  const std::vector<int32_t> none(dims.num_local_experts(), 0);
  for (int64_t rank = 0; rank < dims.ep_size; ++rank) {
    const testing::RankOutput& out = step->output(rank);
    EXPECT_EQ(none, out.group_sizes);
    EXPECT_EQ(none, out.token_counts);
    EXPECT_EQ(-1, out.total_recv_tokens);
    EXPECT_EQ(none, out.dropped_counts);
    EXPECT_EQ(-1, out.max_recv_tokens);
    EXPECT_EQ(std::vector<uint8_t>(dims.num_choices(), 0), out.kept);
    routed.mems.push_back(out.mem);
  }
  return routed;
}

}  // namespace ep::nccl
