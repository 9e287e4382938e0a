// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/engine/launches.h"

#include <gtest/gtest.h>

#include <limits>

namespace ep::host {
namespace {

constexpr uint64_t kSite = 5;

TEST(LaunchesTest, RunIdsThatAreNearAreTheSame) {
  Launches here, there;
  (void)here.Name(kSite, 1001);
  // A peer has seen the second launch first, and so counts from there.
  for (int64_t run_id : {1002, 1001, 1003}) {
    EXPECT_EQ(run_id, here.RunId(there.Name(kSite, run_id)));
  }
}

TEST(LaunchesTest, RunIdsThatAreFarAreMatchedByNumber) {
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  // The last are of fingerprints that are nearer than most.
  for (int64_t first : {int64_t{1} << 40, kMin, kMax - 10, -kMax / 2,
                        kMax / 2 + 1 - (1 << 19)}) {
    Launches here, there;
    (void)here.Name(kSite, kMax / 2 + 1);
    for (int64_t i = 0; i < 3; ++i) {
      EXPECT_EQ(kMax / 2 + 1 + i, here.RunId(there.Name(kSite, first + i)));
    }
  }
}

TEST(LaunchesTest, RunIdsStayNearAfterManyLaunches) {
  constexpr uint64_t kOtherSite = 6;
  Launches here;
  for (int64_t run_id = 0; run_id < 10'000; ++run_id) {
    (void)here.Name(kSite, run_id);
  }
  // The op at the other site runs in few launches, and a peer's is its first.
  EXPECT_EQ(10'001, here.RunId({kOtherSite, 10'001, 0}));
  EXPECT_FALSE(here.RunId({kOtherSite, 1, 0}).has_value());
}

// An op has two sites where there are two executables, and what is known of the
// launches of the first says nothing about the second.
TEST(LaunchesTest, ExecutablesAreLaunchedInAnyOrder) {
  constexpr int64_t kFirst = int64_t{1} << 40, kSecond = 1000;
  Launches here, there;
  (void)here.Name(kSite, kFirst);
  const Launch launch = there.Name(kSite + 1, kSecond);
  EXPECT_EQ(kFirst, here.RunId(there.Name(kSite, kFirst)));
  EXPECT_FALSE(here.RunId(launch).has_value());
  (void)here.Name(kSite + 1, kSecond);
  EXPECT_EQ(kSecond, here.RunId(launch));
}

TEST(LaunchesTest, ALaunchIsReachedWithThoseBeforeIt) {
  Launches launches;
  EXPECT_FALSE(launches.HasReached({7, 100, 0}));
  launches.Reach({7, 102, 2});
  launches.Reach({7, 101, 1});
  EXPECT_TRUE(launches.HasReached({7, 100, 0}));
  EXPECT_TRUE(launches.HasReached({7, 102, 2}));
  EXPECT_FALSE(launches.HasReached({7, 103, 3}));
  EXPECT_FALSE(launches.HasReached({8, 100, 0}));
}

}  // namespace
}  // namespace ep::host
