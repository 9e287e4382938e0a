// SPDX-License-Identifier: Apache-2.0

// Tests of groups that borrow a communicator: of another communicator than the
// one that is right. The conformance suite has the rest.

#include <gtest/gtest.h>

#include <optional>

#include "ep_ffi/backends/nccl/fake/fake.h"
#include "ep_ffi/backends/nccl/ranks.h"
#include "ep_ffi/backends/nccl/testing/group_fixture.h"

namespace ep::nccl {
namespace {

class LentTest : public NcclGroupTest {
 protected:
  // Connects the ranks; rank r borrows the communicator of rank (r + shift).
  std::vector<Status> Borrow(int64_t shift) {
    ExpectOk(NewUniqueId("", "", &id_));
    std::vector<Status> statuses(2);
    groups_.resize(2);
    lent_.resize(2);
    ForEachRank(2, [&](int64_t r) {
      const int64_t rank = (r + shift) % 2;
      NcclGroup::Options options = {};
      options.name = "world";
      options.sizes = SizesFor(kDims);
      options.sizes.ep_size = 2;
      options.timeout_s = 10;
      options.rank = r;
      options.device = r;
      ExpectOk(NcclGroup::Create(options, &groups_[r]));
      lent_[r] = std::make_shared<Lent>(r, 2, rank, id_);
      statuses[r] = groups_[r]->Borrow(lent_[r]->comm());
    });
    return statuses;
  }

  // Calls an op, for which XLA lends a communicator.
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

  std::string id_;
  std::vector<std::shared_ptr<Lent>> lent_;  // outlive the groups
  std::vector<std::shared_ptr<NcclGroup>> groups_;
};
INSTANTIATE_TEST_SUITE_P(Fake, LentTest, ::testing::Values(LentNccl()));

TEST_P(LentTest, ACommunicatorWithRanksInAnotherOrderIsRefused) {
  for (const Status& status : Borrow(/*shift=*/1)) {
    ExpectWords({"2 ranks", "whose rank", "EP_NCCL_COMMUNICATOR"}, status);
  }
}

TEST_P(LentTest, AGroupConnectsOnce) {
  for (const Status& status : Borrow(/*shift=*/0)) ExpectOk(status);
  ExpectWords({"a communicator already"}, groups_[0]->Borrow(lent_[0]->comm()));
}

TEST_P(LentTest, RanksOfAProcessAreFoundByDevice) {
  for (const Status& status : Borrow(/*shift=*/0)) ExpectOk(status);
  NcclRanks ranks({{4, groups_[0]}, {6, groups_[1]}});
  EXPECT_EQ(groups_[0].get(), ranks.OnDevice(4));
  EXPECT_EQ(groups_[1].get(), ranks.OnDevice(6));
  EXPECT_EQ(groups_[1].get(), ranks.At(1));
  EXPECT_EQ(nullptr, ranks.OnDevice(5));
  EXPECT_EQ(nullptr, ranks.At(2));
  ExpectWords({"GPU 5", "no rank"}, ranks.Connect(5, nullptr));
  ExpectWords({"several GPUs"}, ranks.StartTrace("trace"));
  ExpectOk(ranks.Check());
  ExpectOk(ranks.Close());
  ExpectWords({"was finalized"}, groups_[1]->Check());
}

// Such as the one that XLA makes after a failure.
TEST_P(LentTest, AnotherCommunicatorIsRefusedFromThenOn) {
  AllowLeaks();
  for (const Status& status : Borrow(/*shift=*/0)) ExpectOk(status);
  for (ncclComm_t other :
       {static_cast<ncclComm_t>(nullptr), lent_[1]->comm(), lent_[0]->comm()}) {
    EXPECT_NE(std::string::npos,
              Call(0, other).find("lends another communicator"));
  }
  // Groups that have failed are left on their communicators, which XLA keeps.
  for (const auto& lent : lent_) new std::shared_ptr<Lent>(lent);
}

}  // namespace
}  // namespace ep::nccl
