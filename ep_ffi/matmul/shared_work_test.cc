// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/matmul/shared_work.h"

#include <gtest/gtest.h>

#include <atomic>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "ep_ffi/core/mutex.h"

namespace ep {
namespace {

// Keeps tasks, as a pool does whose threads are busy.
class BusyPool : public Executor {
 public:
  void Schedule(std::function<void()> task) override {
    tasks.push_back(std::move(task));
  }
  int64_t num_threads() const override { return 4; }

  std::vector<std::function<void()>> tasks;
};

// Starts a thread for each task.
class Threads : public Executor {
 public:
  ~Threads() override {
    for (std::thread& thread : threads_) thread.join();
  }
  void Schedule(std::function<void()> task) override {
    threads_.emplace_back(std::move(task));
  }
  int64_t num_threads() const override { return 4; }

 private:
  std::vector<std::thread> threads_;
};

TEST(SharedWorkTest, NoTaskIsWaitedForThatHasNotStarted) {
  BusyPool pool;
  std::vector<int> runs(10);
  {
    int num_workers = 0;
    EXPECT_TRUE(RunShared(10, 4, &pool, [&] {
                  ++num_workers;
                  return [&](int64_t item) { ++runs[item]; };
                }).ok());
    EXPECT_EQ(1, num_workers);
  }
  EXPECT_EQ(std::vector<int>(10, 1), runs);
  EXPECT_EQ(3u, pool.tasks.size());
  // These find no item, and use nothing of the call.
  for (const auto& task : pool.tasks) task();
  EXPECT_EQ(std::vector<int>(10, 1), runs);
}

TEST(SharedWorkTest, OtherThreadsRunItemsThatTheCallAwaits) {
  Threads threads;
  std::atomic<int> num_workers{0}, num_ended{0};
  // No item ends before four threads have one.
  EXPECT_TRUE(RunShared(4, 4, &threads, [&] {
                ++num_workers;
                return [&](int64_t) {
                  while (num_workers < 4) std::this_thread::yield();
                  ++num_ended;
                };
              }).ok());
  EXPECT_EQ(4, num_ended);
}

TEST(SharedWorkTest, LackOfMemoryIsAStatus) {
  BusyPool pool;
  int num_runs = 0;
  const Status status = RunShared(3, 4, &pool, [&] {
    return [&](int64_t item) {
      ++num_runs;
      if (item == 1) throw std::bad_alloc();
    };
  });
  EXPECT_EQ(Code::kResourceExhausted, status.code());
  EXPECT_EQ(2, num_runs);
  for (const auto& task : pool.tasks) task();
  EXPECT_EQ(2, num_runs);
}

TEST(SharedWorkTest, SeveralThreadsMayLackMemory) {
  Threads threads;
  std::atomic<int> num_workers{0};
  // Four threads have an item before two of them fail.
  const Status status = RunShared(50, 4, &threads, [&] {
    const bool fails = num_workers++ % 2 == 0;
    while (num_workers < 4) std::this_thread::yield();
    if (fails) throw std::bad_alloc();
    return [](int64_t) {};
  });
  EXPECT_EQ(Code::kResourceExhausted, status.code());
}

TEST(SharedWorkTest, APoolMayTakeNoTasks) {
  class FullPool : public Executor {
   public:
    void Schedule(std::function<void()>) override { throw std::bad_alloc(); }
    int64_t num_threads() const override { return 4; }
  };
  FullPool pool;
  std::vector<int> runs(10);
  EXPECT_TRUE(RunShared(10, 4, &pool, [&] {
                return [&](int64_t item) { ++runs[item]; };
              }).ok());
  EXPECT_EQ(std::vector<int>(10, 1), runs);
}

TEST(SharedWorkTest, ThereMayBeNoItems) {
  EXPECT_TRUE(RunShared(0, 4, nullptr, nullptr).ok());
}

}  // namespace
}  // namespace ep
