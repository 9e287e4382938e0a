// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/engine/pending.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "ep_ffi/core/clock.h"

namespace ep::host {
namespace {

constexpr int32_t kRanks = 2;
constexpr Key kKey = {/*domain=*/0, /*site_id=*/1, /*run_id=*/2};

class PendingTest : public ::testing::Test {
 protected:
  // Adds a post that is known by the number of its segment.
  ExchangePtr Add(const Key& key, int32_t rank, uint64_t segment) {
    Part part;
    part.is_posted = true;
    part.segment = segment;
    return pending_.Add(key, rank, std::move(part));
  }

  static std::vector<uint64_t> Segments(const ExchangePtr& exchange) {
    std::vector<uint64_t> segments;
    for (const Part& part : exchange->parts) segments.push_back(part.segment);
    return segments;
  }

  Pending pending_{kRanks, /*timeout_s=*/100};
};

TEST_F(PendingTest, TheLastPostCompletesAnExchange) {
  EXPECT_EQ(nullptr, pending_.Find(kKey, 0));
  EXPECT_EQ(nullptr, Add(kKey, 1, 11));
  EXPECT_EQ(nullptr, pending_.Find(kKey, 1));
  ASSERT_NE(nullptr, pending_.Find(kKey, 0));
  const ExchangePtr complete = Add(kKey, 0, 10);
  ASSERT_NE(nullptr, complete);
  EXPECT_EQ((std::vector<uint64_t>{10, 11}), Segments(complete));
  EXPECT_EQ(nullptr, pending_.Find(kKey, 0));
}

TEST_F(PendingTest, PostsOfOneKeyMeetInOrder) {
  EXPECT_EQ(nullptr, Add(kKey, 1, 11));
  EXPECT_EQ(nullptr, Add(kKey, 1, 21));
  EXPECT_EQ((std::vector<uint64_t>{10, 11}), Segments(Add(kKey, 0, 10)));
  EXPECT_EQ((std::vector<uint64_t>{20, 21}), Segments(Add(kKey, 0, 20)));
}

TEST_F(PendingTest, PostsOfOtherKeysDoNotMeet) {
  EXPECT_EQ(nullptr, Add(kKey, 1, 11));
  Key other = kKey;
  ++other.domain;
  EXPECT_EQ(nullptr, Add(other, 0, 10));
  other = kKey;
  ++other.site_id;
  EXPECT_EQ(nullptr, Add(other, 0, 10));
  other = kKey;
  ++other.run_id;
  EXPECT_EQ(nullptr, Add(other, 0, 10));
}

TEST_F(PendingTest, WhatIsTakenIsNoLongerPending) {
  Key other = kKey;
  ++other.run_id;
  EXPECT_EQ(nullptr, Add(kKey, 1, 11));
  EXPECT_EQ(nullptr, Add(kKey, 1, 21));
  EXPECT_EQ(nullptr, Add(other, 1, 31));
  const auto taken = pending_.Take(
      [](const Exchange& e) { return e.key.run_id == kKey.run_id; });
  ASSERT_EQ(2u, taken.size());
  EXPECT_EQ(11u, taken[0]->parts[1].segment);
  EXPECT_EQ(21u, taken[1]->parts[1].segment);
  EXPECT_EQ(nullptr, pending_.Find(kKey, 0));
  EXPECT_EQ((std::vector<uint64_t>{30, 31}), Segments(Add(other, 0, 30)));
}

TEST_F(PendingTest, AnExchangeIsLateWhenItsTimeIsUp) {
  EXPECT_EQ(nullptr, Add(kKey, 1, 11));
  EXPECT_TRUE(pending_.FindLate(Now()).empty());
  EXPECT_EQ(1u, pending_.FindLate(Now() + 101).size());
  Pending patient(kRanks, std::numeric_limits<double>::infinity());
  EXPECT_EQ(nullptr, patient.Add(kKey, 1, Part()));
  EXPECT_TRUE(patient.FindLate(Now() + 1e9).empty());
}

TEST(ExchangeStructTest, ItsNameIsThatOfTheFirstLocalRank) {
  Exchange exchange = {kKey, 0, kRanks, std::vector<Part>(kRanks)};
  EXPECT_EQ(Exchange::kNoRank, exchange.FirstLocalRank());
  Part& local = exchange.parts[1];
  local.done = [](const Status&) {};
  local.op.op = Op::kCombine;
  local.op.layer = "moe_3";
  EXPECT_EQ(1, exchange.FirstLocalRank());
  EXPECT_EQ("ep_combine(layer \"moe_3\")", exchange.OpName());
}

}  // namespace
}  // namespace ep::host
