// SPDX-License-Identifier: Apache-2.0

// Tests warp.h on 32 host threads, which wait for each other in each shuffle.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <random>
#include <vector>

#include "ep_ffi/backends/nccl/kernels.h"
#include "ep_ffi/core/mutex.h"
#include "ep_ffi/testing/ranks.h"

#define __device__

namespace ep::nccl {
namespace {

using std::max;
using std::min;

// A warp of 32 host threads.
//
// Thread-safe. The lock guarantees that `gathered_` has the values of one round
// until all threads have returned them.
class Warp {
 public:
  // Waits until all threads call AllGather, and returns the values by lane.
  std::array<int32_t, kWarp> AllGather(int32_t lane, int32_t value) {
    MutexLock lock(mutex_);
    const int64_t round = round_;
    arriving_[lane] = value;
    if (++num_arrived_ == kWarp) {
      gathered_ = arriving_;
      num_arrived_ = 0;
      ++round_;
      changed_.NotifyAll();
    }
    while (round_ == round) changed_.Wait(mutex_);
    return gathered_;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::array<int32_t, kWarp> arriving_ EP_GUARDED_BY(mutex_);
  std::array<int32_t, kWarp> gathered_ EP_GUARDED_BY(mutex_);
  int num_arrived_ EP_GUARDED_BY(mutex_) = 0;
  int64_t round_ EP_GUARDED_BY(mutex_) = 0;
};

Warp warp;
thread_local int32_t this_lane;

int32_t __shfl_sync(uint32_t mask, int32_t value, int32_t from) {
  EXPECT_EQ(0xffffffff, mask);
  return warp.AllGather(this_lane, value)[from];
}

int32_t __shfl_up_sync(uint32_t mask, int32_t value, int32_t step) {
  return __shfl_sync(mask, value,
                     this_lane < step ? this_lane : this_lane - step);
}

int32_t __shfl_xor_sync(uint32_t mask, int32_t value, int32_t bits) {
  return __shfl_sync(mask, value, this_lane ^ bits);
}

}  // namespace
}  // namespace ep::nccl

#include "ep_ffi/backends/nccl/warp.h"

namespace ep::nccl {
namespace {

// Runs `body` on all lanes, expects equal results, and returns the result.
int32_t OnWarp(const std::function<int32_t(int32_t lane)>& body) {
  std::array<int32_t, kWarp> results;
  testing::ForEachRank(kWarp, [&](int64_t lane) {
    this_lane = lane;
    results[lane] = body(lane);
  });
  for (int32_t result : results) EXPECT_EQ(results[0], result);
  return results[0];
}

constexpr int32_t kCounts[] = {0, 1, 2, 31, 32, 33, 63, 64, 65, 200};

TEST(WarpTest, ScansAnyNumberOfValues) {
  std::mt19937 random;
  for (int32_t count : kCounts) {
    SCOPED_TRACE(count);
    std::vector<int32_t> values(count), loads(count, 0), sums(count, -1);
    for (int32_t& value : values) value = random() % 1000;
    const int32_t total = OnWarp([&](int32_t lane) {
      return WarpScan(
          lane, count,
          [&](int32_t i) {
            ++loads[i];
            return values[i];
          },
          [&](int32_t i, int32_t before) { sums[i] = before; });
    });
    int32_t sum = 0;
    for (int32_t i = 0; i < count; ++i) {
      EXPECT_EQ(1, loads[i]);
      EXPECT_EQ(sum, sums[i]);
      sum += values[i];
    }
    EXPECT_EQ(sum, total);
  }
}

TEST(WarpTest, FindsTheLargest) {
  std::mt19937 random;
  for (int32_t count : kCounts) {
    std::vector<int32_t> values(count);
    for (int32_t& value : values) value = random() % 1000;
    const int32_t largest = OnWarp([&](int32_t lane) {
      return WarpMax(lane, count, [&](int32_t i) { return values[i]; });
    });
    values.push_back(0);
    EXPECT_EQ(*std::max_element(values.begin(), values.end()), largest);
  }
}

TEST(WarpTest, FindsTheFirst) {
  for (int32_t count : kCounts) {
    for (int32_t first : {0, 1, 30, 31, 32, 40, 63, 199}) {
      const int32_t found = OnWarp([&](int32_t lane) {
        return WarpFind(lane, count, [&](int32_t i) { return i >= first; });
      });
      EXPECT_EQ(min(first, count), found) << count;
    }
  }
}

}  // namespace
}  // namespace ep::nccl
