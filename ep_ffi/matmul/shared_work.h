// SPDX-License-Identifier: Apache-2.0

// Lets the threads of a pool run a part of one thread's work.

#ifndef EP_FFI_MATMUL_SHARED_WORK_H_
#define EP_FFI_MATMUL_SHARED_WORK_H_

#include <cstdint>
#include <functional>

#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/status.h"

namespace ep {

// Makes a function that runs one item. Each thread that helps makes its own,
// with its own scratch memory.
using MakeWorker = std::function<std::function<void(int64_t item)>()>;

// Runs items 0 to `num_items` - 1, each on one of up to `num_threads` threads:
// this one and the threads of the executor, which may be null. It returns when
// all items have ended, and waits only for items that another thread has begun:
// a pool may be full of tasks that are blocked. Denormals are flushed, as
// XLA:CPU does it. Fails if a thread lacks memory.
Status RunShared(int64_t num_items, int64_t num_threads, Executor* executor,
                 const MakeWorker& make_worker);

}  // namespace ep

#endif  // EP_FFI_MATMUL_SHARED_WORK_H_
