// SPDX-License-Identifier: Apache-2.0

// Calls that wait for other ranks and cannot be told when to give up.

#ifndef EP_FFI_BACKENDS_NCCL_DEADLINE_H_
#define EP_FFI_BACKENDS_NCCL_DEADLINE_H_

#include <algorithm>
#include <chrono>
#include <functional>
#include <future>
#include <string>
#include <thread>

#include "ep_ffi/core/status.h"

namespace ep::nccl {

// Longer timeouts are cut to this, some 30 years, because the clocks of the
// standard library count nanoseconds in 64 bits.
constexpr double kLongestWaitS = 1e9;

// Runs `call` on a thread of its own, which is left behind if it takes longer
// than `seconds`, which may be infinite: `call` must own what it uses.
inline Status RunWithin(double seconds, const std::string& what,
                        std::function<Status()> call) {
  std::packaged_task<Status()> task(std::move(call));
  std::future<Status> result = task.get_future();
  std::thread(std::move(task)).detach();
  const std::chrono::duration<double> wait(std::min(seconds, kLongestWaitS));
  if (result.wait_for(wait) == std::future_status::ready) {
    return result.get();
  }
  return Status(Code::kDeadlineExceeded,
                StrCat(what, " took longer than timeout_s = ", seconds,
                       "; look for a rank that failed, or is not there yet"));
}

}  // namespace ep::nccl

#endif  // EP_FFI_BACKENDS_NCCL_DEADLINE_H_
