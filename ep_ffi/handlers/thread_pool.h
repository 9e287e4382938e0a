// SPDX-License-Identifier: Apache-2.0

// XLA's thread pool, for the host backend's engine and the grouped matmul.

#ifndef EP_FFI_HANDLERS_THREAD_POOL_H_
#define EP_FFI_HANDLERS_THREAD_POOL_H_

#include <cstdint>
#include <functional>
#include <utility>

#include "ep_ffi/core/backend.h"
#include "ep_ffi/handlers/tsan.h"
#include "xla/ffi/api/ffi.h"

namespace ep {

// XLA's intra-op pool, valid until the handler returns.
class ThreadPoolExecutor : public Executor {
 public:
  explicit ThreadPoolExecutor(xla::ffi::ThreadPool pool) : pool_(pool) {}

  void Schedule(std::function<void()> task) override {
    auto run = [task = std::move(task)] {
      TsanEdge::PoolTasks().Acquire();
      task();
    };
    TsanEdge::PoolTasks().Release();
    const ScopedIgnoreWrites copies_of_run;
    pool_.Schedule(std::move(run));
  }
  int64_t num_threads() const override { return pool_.num_threads(); }

 private:
  xla::ffi::ThreadPool pool_;
};

}  // namespace ep

#endif  // EP_FFI_HANDLERS_THREAD_POOL_H_
