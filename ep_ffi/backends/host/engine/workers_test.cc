// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/engine/workers.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <utility>
#include <vector>

namespace ep::host {
namespace {

bool IsReady(const std::future<void>& future) {
  return future.wait_for(std::chrono::seconds(30)) == std::future_status::ready;
}

TEST(WorkersTest, TasksThatBlockDoNotHoldUpOthers) {
  constexpr int kTasks = 50;
  Workers workers;
  std::promise<void> end;
  std::vector<std::promise<void>> begun(kTasks);
  const std::shared_future<void> ended = end.get_future().share();
  for (std::promise<void>& mine : begun) {
    workers.Run([&mine, ended] {
      mine.set_value();
      ended.wait();
    });
  }
  for (std::promise<void>& mine : begun) {
    EXPECT_TRUE(IsReady(mine.get_future()));
  }
  end.set_value();
}

TEST(WorkersTest, AcceptedTasksRunAfterTheirWorkersHaveEnded) {
  std::promise<void> ran;
  {
    Workers workers;
    workers.Run([&] { ran.set_value(); });
  }
  EXPECT_TRUE(IsReady(ran.get_future()));
}

TEST(WorkersTest, ATaskMayEndItsWorkers) {
  auto workers = std::make_shared<Workers>();
  std::promise<void> ended;
  Workers* raw = workers.get();
  raw->Run([workers = std::move(workers), &ended]() mutable {
    workers.reset();
    ended.set_value();
  });
  EXPECT_TRUE(IsReady(ended.get_future()));
}

}  // namespace
}  // namespace ep::host
