// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/workers.h"

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace ep::host {

struct Workers::State {
  std::mutex mutex;
  std::condition_variable wake;
  std::deque<std::function<void()>> tasks;
  size_t idle = 0;
  bool stop = false;
};

Workers::Workers() : state_(std::make_shared<State>()) {}

Workers::~Workers() {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->stop = true;
  state_->wake.notify_all();
}

void Workers::Run(std::function<void()> task) {
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->tasks.push_back(std::move(task));
    if (state_->tasks.size() <= state_->idle) {
      state_->wake.notify_one();
      return;
    }
  }
  try {
    std::thread(Loop, state_, /*park=*/true).detach();
  } catch (const std::system_error&) {
    Loop(state_, /*park=*/false);  // no thread to be had: run it here
  }
}

void Workers::Loop(std::shared_ptr<State> state, bool park) {
  std::unique_lock<std::mutex> lock(state->mutex);
  while (true) {
    while (!state->tasks.empty()) {
      std::function<void()> task = std::move(state->tasks.front());
      state->tasks.pop_front();
      lock.unlock();
      task();
      task = nullptr;  // may run destructors: not under the lock
      lock.lock();
    }
    if (state->stop || !park) return;
    ++state->idle;
    state->wake.wait(lock,
                     [&] { return state->stop || !state->tasks.empty(); });
    --state->idle;
  }
}

}  // namespace ep::host
