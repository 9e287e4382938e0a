// SPDX-License-Identifier: Apache-2.0

// Tests that the backend refuses unsupported libraries, GPUs, sizes, layers,
// rows and borrowed communicators.

#include "ep_ffi/backends/nccl/limits.h"

#include <gtest/gtest.h>

#include <optional>
#include <stdexcept>

#include "ep_ffi/backends/nccl/communicator.h"
#include "ep_ffi/backends/nccl/fake/fake.h"
#include "ep_ffi/backends/nccl/ranks.h"
#include "ep_ffi/backends/nccl/testing/group_fixture.h"

namespace ep::nccl {
namespace {

using LimitsTest = NcclGroupTest;

constexpr char kLimit[] = "NCCL EP's limit";

// Expects that no rank can connect, with these words in each error.
void ExpectRefused(const Sizes& sizes, const std::vector<std::string>& words) {
  std::vector<std::shared_ptr<NcclGroup>> groups;
  for (const Status& status :
       Connect(sizes, /*timeout_s=*/10, /*first_device=*/0, &groups)) {
    ExpectWords(words, status);
  }
}

TEST_F(LimitsTest, LayersBeyondTheLimitsAreRefused) {
  const Domain domain = MakeDomain(kWorld);
  struct {
    const char* words;
    std::function<void(PlanDims*)> change;
  } cases[] = {
      {"recv_capacity_per_rank = 128", [](auto* d) { d->capacity = 128; }},
      {"alignment = 3", [](auto* d) { d->alignment = 3; }},
      {"alignment = 128", [](auto* d) { d->alignment = 128; }},
      {"max_tokens_per_rank = 6", [](auto* d) { d->num_tokens = 7; }},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.words);
    PlanDims dims = kDims;
    c.change(&dims);
    ExpectWordsOnAll({"ep_prepare", testing::kLayerName, c.words},
                     NewPrepare(domain, dims));
  }
  PrepareRandom(domain, kDims);
}

TEST_F(LimitsTest, RowsBeyondTheLimitsAreRefused) {
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareRandom(domain, kDims);
  for (int64_t width : {4, 12, 2048}) {
    ExpectWordsOnAll(
        {"ep_dispatch", testing::kLayerName, StrCat("rows of ", width)},
        NewStep(domain, Op::kDispatch,
                RandomInputs(Op::kDispatch, routed, {width, DType::kFloat32})));
  }
  ExpectWorks(domain, Op::kDispatch, routed, AnyType());
}

// Beyond these limits, NCCL EP would terminate the process, fail at the first
// dispatch, or overflow an integer.
TEST(CreateTest, LibrariesMachinesAndSizesBeyondTheLimitsAreRefused) {
  struct {
    std::vector<std::string> words;
    std::function<void(Sizes*, fake::Machine*)> change;
  } cases[] = {
      {{"NCCL is 2.30.6", "2.30.7 to 2.32.3", "docs/gpu.md"},
       [](auto*, auto* m) { m->nccl_version = kOldestNccl - 1; }},
      {{"NCCL is 2.32.4"},
       [](auto*, auto* m) { m->nccl_version = kNewestNccl + 1; }},
      {{"only 2 of the 4 ranks", "need NCCL 2.30.7, but NCCL is 2.30.8",
        kLimit},
       [](auto*, auto* m) {
         m->nvlink_ranks = 2, m->nccl_version = kOldestNccl + 1;
       }},
      {{"compute capability 8", "Hopper"},
       [](auto*, auto* m) { m->compute_capability_major = 8; }},
      {{"invalid device ordinal"}, [](auto*, auto* m) { m->num_devices = 0; }},
      {{"ep_size = 1"}, [](auto* s, auto*) { s->ep_size = 1; }},
      {{"num_experts = 1025"}, [](auto* s, auto*) { s->num_experts = 1025; }},
      {{"recv_capacity_per_rank = 7"}, [](auto* s, auto*) { s->capacity = 7; }},
      {{"4194305 rows"}, [](auto* s, auto*) { s->capacity = (1 << 22) + 1; }},
      {{"24 bytes"}, [](auto* s, auto*) { s->max_row_bytes = 24; }},
      {{"max_num_sms = 17"}, [](auto* s, auto*) { s->max_num_sms = 17; }},
      {{"device API", kLimit}, [](auto*, auto* m) { m->device_api = false; }},
      {{"2 ranks of an NVLink domain have 2 experts", kLimit},
       [](auto* s, auto* m) { s->num_experts = 4, m->nvlink_ranks = 2; }},
      // The byte counts below come from NCCL EP's own functions.
      {{"rows of 76688 bytes need 232704 bytes", kLimit},
       [](auto* s, auto*) { s->max_row_bytes = 76688; }},
      {{"rows of 58000 bytes need 232704 bytes", kLimit},
       [](auto* s, auto* m) { s->max_row_bytes = 58000, m->nvlink_ranks = 2; }},
      {{"this GPU has 101376", kLimit},
       [](auto* s, auto* m) {
         s->max_row_bytes = 1 << 16, m->shared_bytes = 101376;
       }},
      // 34082848 = 32 MiB + 128 rows of tokens and slots + weights + bitmap.
      {{"needs 34082848 bytes of GPU memory beside JAX's, but 34082847",
        kLimit},
       [](auto*, auto* m) { m->free_bytes = 34082847; }},
      {{"times the 512 experts of an NVLink domain", kLimit},
       [](auto* s, auto*) { s->capacity = 1 << 22, s->num_experts = 512; }},
      {{"times num_experts = 1024 is more", kLimit},
       [](auto* s, auto*) {
         s->num_experts = 1024;
         s->max_tokens = s->capacity = (1 << 21);
       }},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.words[0]);
    Sizes sizes = SizesFor(kDims);
    fake::TheMachine() = fake::Machine();
    c.change(&sizes, &fake::TheMachine());
    ExpectRefused(sizes, c.words);
  }
}

TEST(CreateTest, TheLargestSizesOfAMachineAreAccepted) {
  Sizes sizes = SizesFor(kDims);
  Machine suits = {/*device_api=*/true, sizes.ep_size, /*shared_bytes=*/232448,
                   /*free_bytes=*/int64_t{1} << 40, kOldestNccl};
  sizes.max_row_bytes = 76672;
  ExpectOk(CheckMachine(sizes, suits));
  sizes.max_row_bytes = 57984;
  suits.nvlink_ranks = sizes.ep_size / 2;
  ExpectOk(CheckMachine(sizes, suits));
  suits.nvlink_ranks = sizes.ep_size;
  sizes.max_row_bytes = 1 << 15;
  sizes.num_experts = sizes.ep_size * 256;
  sizes.capacity = (1 << 21) - 1;
  ExpectOk(CheckMachine(sizes, suits));
}

TEST_F(LimitsTest, RanksOfOneNvlinkDomainConnectWithANewerNccl) {
  fake::TheMachine().nccl_version = kNewestNccl;
  PrepareRandom(MakeDomain(kWorld), kDims);
}

TEST(CreateTest, MoreRowsThan32BitsCanCountAreRefused) {
  Sizes sizes = {};
  sizes.num_experts = sizes.ep_size = 1024;
  sizes.max_tokens = sizes.capacity = 1 << 21;
  Layer layer = {/*top_k=*/1, /*alignment=*/1, sizes.capacity, /*drop=*/true,
                 Tail::kZero};
  ExpectWords({"2147483648 rows"}, CheckLayer(sizes, layer, 1));
  sizes.max_tokens /= 2;
  ExpectOk(CheckLayer(sizes, layer, 1));
  layer.top_k = 33;
  ExpectWords({"top_k = 33"}, CheckLayer(sizes, layer, 1));
}

// NCCL EP's C interface throws C++ exceptions.
TEST(CreateTest, AnExceptionOfNcclEpIsAnError) {
  const Libraries unused = {};
  const auto call = [&](const std::function<void()>& fail) {
    return CallNcclEp(unused, "ncclEpDispatch", [&] {
      fail();
      return ncclSuccess;
    });
  };
  ExpectWords({"ncclEpDispatch failed: Assertion"},
              call([] { throw std::runtime_error("Assertion"); }));
  ExpectWords({"ncclEpDispatch failed"}, call([] { throw 7; }));
}

class LentTest : public NcclGroupTest {
 protected:
  // Connects two ranks. Rank r borrows the communicator of rank r + shift.
  std::vector<Status> Borrow(int64_t shift) {
    Sizes sizes = SizesFor(kDims);
    sizes.ep_size = 2;
    return Connect(sizes, /*timeout_s=*/10, /*first_device=*/0, &groups_,
                   &lent_, shift);
  }

  // Calls an op with a borrowed communicator, and returns the error message.
  std::string Call(int64_t rank, ncclComm_t communicator) {
    Site site = {};
    ep::Call call = {};
    call.op = Op::kDispatch;
    call.site = &site;
    call.communicator = communicator;
    std::optional<Status> result;
    call.done = [&](Status status) { result = status; };
    groups_[rank]->Scatter(call, {});
    return result->message();
  }

  std::vector<std::shared_ptr<Lent>> lent_;  // must outlive the groups
  std::vector<std::shared_ptr<NcclGroup>> groups_;
};

TEST_F(LentTest, ACommunicatorWithRanksInAnotherOrderIsRefused) {
  for (const Status& status : Borrow(/*shift=*/1)) {
    ExpectWords({"2 ranks", "whose rank", "EP_NCCL_COMMUNICATOR"}, status);
  }
}

TEST_F(LentTest, AGroupConnectsOnce) {
  for (const Status& status : Borrow(/*shift=*/0)) ExpectOk(status);
  ExpectWords({"a communicator already"},
              groups_[0]->Join("", lent_[0]->comm()));
}

// XLA keeps its communicator while groups replace one another.
TEST_F(LentTest, GroupsUseOneCommunicatorInTurn) {
  for (int i = 0; i < 3; ++i) {
    for (const Status& status : Borrow(/*shift=*/0)) ExpectOk(status);
    ForEachRank(2, [&](int64_t rank) { ExpectOk(groups_[rank]->Close()); });
    groups_.clear();
  }
}

TEST_F(LentTest, RanksOfAProcessAreFoundByDevice) {
  for (const Status& status : Borrow(/*shift=*/0)) ExpectOk(status);
  NcclRanks ranks({{4, groups_[0]}, {6, groups_[1]}});
  EXPECT_EQ(groups_[0].get(), ranks.OnDevice(4));
  EXPECT_EQ(groups_[1].get(), ranks.OnDevice(6));
  EXPECT_EQ(groups_[1].get(), ranks.At(1));
  EXPECT_EQ(nullptr, ranks.OnDevice(5));
  EXPECT_EQ(nullptr, ranks.At(2));
  ExpectWords({"GPU 5", "no rank"}, ranks.Connect(5, nullptr));
  ExpectOk(ranks.Check());
  ExpectOk(ranks.Close());
  ExpectWords({"was finalized"}, groups_[1]->Check());
}

// After a failure XLA makes another communicator. The group stays failed.
TEST_F(LentTest, AnotherCommunicatorFailsTheGroup) {
  AllowLeaks();
  for (const Status& status : Borrow(/*shift=*/0)) ExpectOk(status);
  for (ncclComm_t other :
       {static_cast<ncclComm_t>(nullptr), lent_[1]->comm(), lent_[0]->comm()}) {
    ExpectIn(Call(0, other), {"lends another communicator"});
  }
  // Leaks the communicators, as XLA would, because failed groups use them.
  for (const auto& lent : lent_) new std::shared_ptr<Lent>(lent);
}

}  // namespace
}  // namespace ep::nccl
