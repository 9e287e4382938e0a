// SPDX-License-Identifier: Apache-2.0

// The fake driver, as the fakes of NCCL and NCCL EP see it.

#ifndef EP_FFI_BACKENDS_NCCL_FAKE_DRIVER_H_
#define EP_FFI_BACKENDS_NCCL_FAKE_DRIVER_H_

#include <cuda.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "ep_ffi/backends/nccl/fake/ledger.h"

// The primary context of a device; there are no others.
struct CUctx_st {
  explicit CUctx_st(int device) : device(device) {}

  const int device;
  std::atomic<int> times_retained{0};
};

struct CUstream_st {
 public:
  // A task that is enqueued, if `admit` is empty or takes the stream.
  struct Task {
    std::function<void()> run;
    std::function<bool(CUstream_st*)> admit = {};
  };

  explicit CUstream_st(CUcontext context);
  void Close();  // waits, too; what is left of it is never freed

  CUcontext context() const { return context_; }
  bool Enqueue(Task task);
  void Synchronize();

  // Puts tasks into `recorded` from now on; null ends the recording.
  void Record(std::vector<Task>* recorded);
  bool IsRecording();

 private:
  void Work();

  const CUcontext context_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;  // the first is running
  std::vector<Task>* recorded_ = nullptr;
  bool closed_ = false;
  std::thread thread_;
};

namespace ep::nccl::fake {

size_t CountRetainedContexts();
size_t CountHostAllocations();

// The context that is current on this thread, or null.
CUcontext CurrentContext();

// That the current context is of this device.
void DemandContext(Contract& contract, int device);
// That one can enqueue on it, in the context that is current.
void DemandStream(Contract& contract, CUstream stream);

}  // namespace ep::nccl::fake

#endif  // EP_FFI_BACKENDS_NCCL_FAKE_DRIVER_H_
