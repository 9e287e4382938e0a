// SPDX-License-Identifier: Apache-2.0

// XLA's pool of threads, as the engine and the grouped matmul use it.

#ifndef EP_FFI_HANDLERS_THREAD_POOL_H_
#define EP_FFI_HANDLERS_THREAD_POOL_H_

#include <cstdint>
#include <functional>
#include <utility>

#include "ep_ffi/core/backend.h"
#include "ep_ffi/handlers/handover.h"
#include "xla/ffi/api/ffi.h"

namespace ep {

// XLA's own intra-op pool. It can be used until the handler returns.
class ThreadPoolExecutor : public Executor {
 public:
  explicit ThreadPoolExecutor(xla::ffi::ThreadPool pool) : pool_(pool) {}

  void Schedule(std::function<void()> task) override {
    auto run = [task = std::move(task)] {
      Handover::OfTasks().FromXla();
      task();
    };
    Handover::OfTasks().ToXla();
    const ScopedIgnoreWrites copies_of_run;
    pool_.Schedule(std::move(run));
  }
  int64_t num_threads() const override { return pool_.num_threads(); }

 private:
  xla::ffi::ThreadPool pool_;
};

}  // namespace ep

#endif  // EP_FFI_HANDLERS_THREAD_POOL_H_
