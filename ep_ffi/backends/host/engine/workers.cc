// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/engine/workers.h"

#include <cstddef>
#include <deque>
#include <system_error>
#include <thread>
#include <utility>

#include "ep_ffi/core/denormals.h"
#include "ep_ffi/core/mutex.h"

namespace ep::host {

// The threads share the state, which outlives the Workers object.
struct Workers::State {
  Mutex mutex;
  CondVar changed;
  std::deque<std::function<void()>> tasks EP_GUARDED_BY(mutex);
  size_t num_idle EP_GUARDED_BY(mutex) = 0;
  bool is_stopped EP_GUARDED_BY(mutex) = false;
};

Workers::Workers() : state_(std::make_shared<State>()) {}

Workers::~Workers() {
  MutexLock lock(state_->mutex);
  state_->is_stopped = true;
  state_->changed.NotifyAll();
}

void Workers::Run(std::function<void()> task) {
  // An idle thread may run the task before NotifyOne, and destroy this object.
  const std::shared_ptr<State> state = state_;
  bool has_thread;
  {
    MutexLock lock(state->mutex);
    state->tasks.push_back(std::move(task));
    has_thread = state->tasks.size() <= state->num_idle;
  }
  // A thread that is woken while this one has the lock would sleep again.
  if (has_thread) return state->changed.NotifyOne();
  try {
    std::thread(Loop, state, /*keeps_waiting=*/true).detach();
  } catch (const std::system_error&) {
    Loop(state, /*keeps_waiting=*/false);  // here, since no thread can start
  }
}

void Workers::Loop(std::shared_ptr<State> state, bool keeps_waiting) {
  const ScopedFlushDenormals flush;
  MutexLock lock(state->mutex);
  while (true) {
    while (!state->tasks.empty()) {
      std::function<void()> task = std::move(state->tasks.front());
      state->tasks.pop_front();
      state->mutex.Unlock();
      task();
      task = nullptr;  // destroys the task without the lock
      state->mutex.Lock();
    }
    if (state->is_stopped || !keeps_waiting) return;
    ++state->num_idle;
    while (!state->is_stopped && state->tasks.empty()) {
      state->changed.Wait(state->mutex);
    }
    --state->num_idle;
  }
}

}  // namespace ep::host
