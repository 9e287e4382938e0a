// SPDX-License-Identifier: Apache-2.0

// Tests that each rank refuses NVLink domains that NCCL EP cannot connect, and
// says why, before a rank enters a collective of NCCL EP.

#include "ep_ffi/backends/nccl/fabric.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>

#include "ep_ffi/backends/nccl/fake/fake.h"
#include "ep_ffi/backends/nccl/testing/group_fixture.h"

namespace ep::nccl {
namespace {

// A machine in a folder, whose network card and drivers are complete.
class FabricTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::filesystem::remove_all(root_);
    std::filesystem::create_directories(card_);
    std::filesystem::create_directories(peermem_);
    for (const char* name : kVariables) unsetenv(name);
  }
  void TearDown() override {
    for (const char* name : kVariables) unsetenv(name);
  }

  Status Check(const Fabric& fabric) const {
    return CheckFabric(fabric, root_.string());
  }

  static constexpr const char* kVariables[] = {
      "NCCL_GIN_ENABLE", "NCCL_GIN_TYPE", "NCCL_IB_DISABLE"};
  const std::filesystem::path root_ =
      std::filesystem::path(::testing::TempDir()) / "machine";
  const std::filesystem::path card_ = root_ / "sys/class/infiniband/mlx5_0";
  const std::filesystem::path peermem_ = root_ / "sys/module/nvidia_peermem";

  // Two hosts of eight GPUs.
  const Fabric good_ = {/*num_ranks=*/16, /*num_nvlinks=*/2, /*num_hosts=*/2,
                        /*has_gin=*/true, /*gpu_has_rdma=*/true};
};

TEST_F(FabricTest, HostsWithGinAreAccepted) {
  ExpectOk(Check(good_));
  setenv("NCCL_GIN_TYPE", "3", 1);
  setenv("NCCL_GIN_ENABLE", "1", 1);
  ExpectOk(Check(good_));
  Fabric fabric = good_;
  fabric.num_nvlinks = 4;  // two NVLink domains in each host
  ExpectOk(Check(fabric));
}

// NVLink may connect one host or, in a rack, several hosts. GIN is not needed.
TEST_F(FabricTest, OneNvlinkDomainIsAccepted) {
  for (int64_t num_hosts : {1, 4}) {
    Fabric fabric = good_;
    fabric.num_nvlinks = 1;
    fabric.num_hosts = num_hosts;
    fabric.has_gin = fabric.gpu_has_rdma = false;
    setenv("NCCL_GIN_ENABLE", "0", 1);
    ExpectOk(Check(fabric));
  }
}

TEST_F(FabricTest, WhatIsMissingIsNamed) {
  struct {
    std::vector<std::string> words;
    std::function<void(Fabric*)> change;
  } cases[] = {
      {{"8 of the 16 ranks", "one host name", "NCCL_LSA_TEAM_SIZE"},
       [](auto* f) { f->num_hosts = 1; }},
      {{"at most 33 NVLink domains", "34"},
       [](auto* f) { f->num_ranks = f->num_nvlinks = f->num_hosts = 34; }},
      // NCCL reports GIN, but its device communicator would fail.
      {{"NCCL_GIN_ENABLE = 0", "unset it"},
       [](auto*) { setenv("NCCL_GIN_ENABLE", "0", 1); }},
      {{"does not offer on all ranks", "NCCL_IB_DISABLE", "unset it"},
       [](auto* f) { f->has_gin = false, setenv("NCCL_IB_DISABLE", "1", 1); }},
      {{"no RDMA network card", "/sys/class/infiniband"},
       [&](auto* f) {
         f->has_gin = false, std::filesystem::remove_all(card_);
       }},
      {{"GPUDirect RDMA", "install a driver"},
       [](auto* f) { f->has_gin = f->gpu_has_rdma = false; }},
      {{"NCCL_GIN_TYPE = 3", "unset it"},
       [](auto* f) { f->has_gin = false, setenv("NCCL_GIN_TYPE", "3", 1); }},
      {{"nvidia_peermem", "DMA-BUF"},
       [&](auto* f) {
         f->has_gin = false, std::filesystem::remove_all(peermem_);
       }},
      {{"look at the other ranks", "NCCL_DEBUG=INFO"},
       [](auto* f) { f->has_gin = false; }},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.words.back());
    SetUp();
    Fabric fabric = good_;
    c.change(&fabric);
    ExpectWords(c.words, Check(fabric));
    ExpectWords({"docs/gpu.md"}, Check(fabric));
  }
}

TEST_F(FabricTest, EveryRankRefusesNvlinkDomainsThatItCannotConnect) {
  fake::TheMachine().nvlink_ranks = 2;
  for (bool has_gin : {false, true}) {
    fake::TheMachine().gin = has_gin;
    fake::TheMachine().num_hosts = has_gin ? 1 : 2;
    std::vector<std::shared_ptr<NcclGroup>> groups;
    const std::vector<Status> statuses =
        Connect(SizesFor(kDims), /*timeout_s=*/60, /*first_device=*/0, &groups);
    ASSERT_EQ(kDims.ep_size, static_cast<int64_t>(statuses.size()));
    for (const Status& status : statuses) {
      ExpectWords({"NVLink connects only 2 of the 4 ranks",
                   has_gin ? "one host name" : "GIN"},
                  status);
    }
  }
}

// The fake fails the test if a rank enters a collective of NCCL EP that the
// other ranks do not enter.
TEST_F(FabricTest, AfterTheRefusalOfOneRankNoRankEntersACollective) {
  const auto begin = std::chrono::steady_clock::now();
  fake::TheMachine().poor_device = 2;
  std::vector<std::shared_ptr<NcclGroup>> groups;
  const std::vector<Status> statuses =
      Connect(SizesFor(kDims), /*timeout_s=*/60, /*first_device=*/0, &groups);
  for (int64_t rank = 0; rank < kDims.ep_size; ++rank) {
    if (rank == 2) {
      ExpectWords({"bytes of GPU memory"}, statuses[rank]);
    } else {
      ExpectOk(statuses[rank]);
      ExpectWords({"not connected"}, groups[rank]->Check());
    }
  }
  groups.clear();
  EXPECT_GT(std::chrono::seconds(10), std::chrono::steady_clock::now() - begin);
}

}  // namespace
}  // namespace ep::nccl
