// SPDX-License-Identifier: Apache-2.0

// The real code of warps: 32 threads, which wait for each other in each
// shuffle.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "ep_ffi/backends/nccl/kernels.h"

#define __device__

namespace ep::nccl {
namespace {

using std::min;

// The threads of a warp, of which each tells all others a value.
class Warp {
 public:
  std::array<int32_t, kWarp> Tell(int32_t lane, int32_t value) {
    std::unique_lock<std::mutex> lock(mutex_);
    const int64_t turn = turn_;
    coming_[lane] = value;
    if (++num_came_ == kWarp) {
      told_ = coming_;
      num_came_ = 0;
      ++turn_;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return turn_ > turn; });
    return told_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::array<int32_t, kWarp> coming_, told_;
  int num_came_ = 0;
  int64_t turn_ = 0;
};

Warp warp;
thread_local int32_t this_lane;

int32_t __shfl_sync(uint32_t mask, int32_t value, int32_t from) {
  EXPECT_EQ(0xffffffff, mask);
  return warp.Tell(this_lane, value)[from];
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

// Runs `body` on all lanes, and returns what lane 0 returns.
int32_t OnWarp(const std::function<int32_t(int32_t lane)>& body) {
  std::array<int32_t, kWarp> results;
  std::vector<std::thread> threads;
  for (int32_t i = 0; i < kWarp; ++i) {
    threads.emplace_back([&, i] {
      this_lane = i;
      results[i] = body(i);
    });
  }
  for (std::thread& thread : threads) thread.join();
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
