// SPDX-License-Identifier: Apache-2.0

// Shares the work of one thread with the threads of a pool.

#ifndef EP_FFI_MATMUL_SHARED_WORK_H_
#define EP_FFI_MATMUL_SHARED_WORK_H_

#include <cstdint>
#include <functional>

#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/status.h"

namespace ep {

// Makes a function that runs an item. Each thread makes one function, which has
// separate scratch memory.
using MakeWorker = std::function<std::function<void(int64_t item)>()>;

// Runs items 0 to `num_items` - 1 on up to `num_threads` threads: this thread
// and threads of the executor, which may be null. Returns after all items have
// finished. Waits only for items that have begun, because a pool may be full of
// blocked tasks. Flushes denormals as XLA:CPU does. Fails if a thread lacks
// memory.
Status RunShared(int64_t num_items, int64_t num_threads, Executor* executor,
                 const MakeWorker& make_worker);

}  // namespace ep

#endif  // EP_FFI_MATMUL_SHARED_WORK_H_
