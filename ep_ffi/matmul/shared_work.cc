// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/matmul/shared_work.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>

#include "ep_ffi/core/denormals.h"
#include "ep_ffi/core/mutex.h"

namespace ep {
namespace {

// The items of one RunShared call. A pool may start a task after the call; the
// task then finds no item, and does not use the destroyed `make_worker_`.
class SharedWork {
 public:
  SharedWork(int64_t num_items, const MakeWorker& make_worker)
      : num_items_(num_items), make_worker_(make_worker) {}

  void Work() {
    int64_t item = next_.fetch_add(1);
    if (item >= num_items_) return;
    const ScopedFlushDenormals flush;
    int64_t num_taken = 1;
    bool fails = false;
    try {
      const auto run = make_worker_();
      run(item);
      while ((item = next_.fetch_add(1)) < num_items_) {
        ++num_taken;
        run(item);
      }
    } catch (const std::exception&) {
      fails = true;
    }
    MutexLock lock(mutex_);
    if (fails) {
      // Takes all remaining items, so that the other threads stop.
      num_taken +=
          std::max<int64_t>(0, num_items_ - next_.exchange(num_items_));
      fails_ = true;
    }
    num_ended_ += num_taken;
    if (num_ended_ == num_items_) ended_.NotifyAll();
  }

  Status Wait() {
    MutexLock lock(mutex_);
    while (num_ended_ < num_items_) ended_.Wait(mutex_);
    return fails_ ? Status(Code::kResourceExhausted,
                           "grouped_matmul: there is no memory for its scratch "
                           "arrays; leave some to this process")
                  : Status();
  }

 private:
  const int64_t num_items_;
  const MakeWorker& make_worker_;
  std::atomic<int64_t> next_{0};

  Mutex mutex_;
  CondVar ended_;
  int64_t num_ended_ EP_GUARDED_BY(mutex_) = 0;
  bool fails_ EP_GUARDED_BY(mutex_) = false;
};

}  // namespace

Status RunShared(int64_t num_items, int64_t num_threads, Executor* executor,
                 const MakeWorker& make_worker) {
  const auto work = std::make_shared<SharedWork>(num_items, make_worker);
  try {
    for (int64_t i = 1; executor && i < std::min(num_threads, num_items); ++i) {
      executor->Schedule([work] { work->Work(); });
    }
  } catch (const std::exception&) {
    // Without these tasks, this thread runs the items.
  }
  work->Work();
  return work->Wait();
}

}  // namespace ep
