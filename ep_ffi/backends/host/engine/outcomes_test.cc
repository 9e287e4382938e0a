// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/engine/outcomes.h"

#include <gtest/gtest.h>

namespace ep::host {
namespace {

Status Gone(const std::string& text) {
  return Status(Code::kUnavailable, text);
}

TEST(OutcomesTest, TheLatestFailedRunsAreRemembered) {
  Outcomes outcomes;
  for (int64_t run = 0; run < 1000; ++run) {
    EXPECT_TRUE(outcomes.FailRun(run, Gone("")));
  }
  EXPECT_TRUE(outcomes.OfRun(0).ok());
  EXPECT_FALSE(outcomes.OfRun(900).ok());
}

TEST(OutcomesTest, AfterAProcessHasClosedTheOthersGoOn) {
  Outcomes outcomes;
  EXPECT_EQ(
      "closed",
      outcomes.Leave(1, /*is_orderly=*/true, Gone("closed"), "").message());
  EXPECT_EQ("closed", outcomes.OfProcess(1).message());
  EXPECT_TRUE(outcomes.OfProcess(2).ok());
  EXPECT_TRUE(outcomes.OfNewExchange().ok());
  EXPECT_EQ("", outcomes.LeavingReason());
}

TEST(OutcomesTest, AfterADeathNothingBegins) {
  Outcomes outcomes;
  EXPECT_EQ(
      "died",
      outcomes.Leave(1, /*is_orderly=*/false, Gone("died"), "").message());
  EXPECT_EQ("died", outcomes.OfNewExchange().message());
  EXPECT_TRUE(outcomes.OfGroup().ok());
  EXPECT_TRUE(outcomes.OfProcess(2).ok());
}

TEST(OutcomesTest, WhatFollowsFromADeathIsToldAsThatDeath) {
  Outcomes outcomes;
  (void)outcomes.Leave(1, /*is_orderly=*/false, Gone("1 died"), "");
  (void)outcomes.Leave(2, /*is_orderly=*/true, Gone("2 closed"), "");
  (void)outcomes.Leave(3, /*is_orderly=*/false, Gone("3 died"), "");
  for (int32_t process : {1, 2, 3}) {
    EXPECT_EQ("1 died", outcomes.OfProcess(process).message());
  }
}

TEST(OutcomesTest, AProcessThatClosesMayTellOfADeathFirst) {
  Outcomes outcomes;
  EXPECT_EQ("1 died",
            outcomes.Leave(2, /*is_orderly=*/true, Gone("2 closed"), "1 died")
                .message());
  EXPECT_EQ("1 died", outcomes.OfNewExchange().message());
  EXPECT_EQ("1 died", outcomes.LeavingReason());
}

TEST(OutcomesTest, ClosingComesBeforeAllOtherReasons) {
  Outcomes outcomes;
  (void)outcomes.Leave(1, /*is_orderly=*/false, Gone("died"), "");
  outcomes.Close(Status(Code::kFailedPrecondition, "finalized"));
  EXPECT_EQ("finalized", outcomes.OfGroup().message());
  EXPECT_EQ("finalized", outcomes.OfNewExchange().message());
}

TEST(OutcomesTest, ALeavingProcessTellsOfTheRunThatLackedAnother) {
  Outcomes outcomes;
  EXPECT_TRUE(outcomes.FailRun(1, Gone("2 closed")));
  EXPECT_TRUE(outcomes.FailRun(2, Status(Code::kInvalidArgument, "bad ids")));
  EXPECT_EQ("2 closed", outcomes.LeavingReason());
}

}  // namespace
}  // namespace ep::host
