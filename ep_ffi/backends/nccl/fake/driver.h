// SPDX-License-Identifier: Apache-2.0

#ifndef EP_FFI_BACKENDS_NCCL_FAKE_DRIVER_H_
#define EP_FFI_BACKENDS_NCCL_FAKE_DRIVER_H_

#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <deque>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "ep_ffi/backends/nccl/fake/checks.h"
#include "ep_ffi/core/mutex.h"

// The primary context of a device. The fake has no other contexts.
struct CUctx_st {
  int device = 0;
  std::atomic<int> times_retained{0};
};

// A thread that runs enqueued tasks in order.
//
// Thread-safe. The lock guarantees that the first task stays in the queue while
// it runs, so an empty queue means that all tasks have run.
struct CUstream_st {
 public:
  explicit CUstream_st(CUcontext context);
  // Waits for all tasks and stops the thread. Leaks the object, because a
  // thread left behind after a timeout may still use it.
  void Close();
  bool IsClosed();

  CUcontext context() const { return context_; }
  // Enqueues a task; `name` is the name of a kernel or of the caller.
  void Enqueue(const std::string& name, std::function<void()> task);
  // Returns the names of the tasks that were enqueued since the last call.
  std::vector<std::string> TakeNames();
  void Synchronize();

 private:
  void Work();

  const CUcontext context_;
  ep::Mutex mutex_;
  ep::CondVar changed_;
  std::deque<std::function<void()>> tasks_ EP_GUARDED_BY(mutex_);
  std::vector<std::string> names_ EP_GUARDED_BY(mutex_);
  bool closed_ EP_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

namespace ep::nccl::fake {

size_t CountRetainedContexts();

// Returns the context that is current on this thread, or null.
CUcontext CurrentContext();

// Requires a current context and a call outside FFI handlers, because the
// function waits or allocates. Returns whether the call meets the contract.
bool MayWait(Contract contract);
// Requires that the context of this device is current.
void RequireContext(Contract& contract, int device);
// Requires that the stream exists and belongs to the current context.
void RequireStream(Contract& contract, CUstream stream);

bool HasKernel(const std::string& name);
// Copies the parameters, as a launch does, and returns a function that runs the
// kernel on `num_blocks` blocks of threads.
std::function<void()> BindKernel(const std::string& name, unsigned num_blocks,
                                 unsigned block_size, void** parameters);

}  // namespace ep::nccl::fake

#endif  // EP_FFI_BACKENDS_NCCL_FAKE_DRIVER_H_
