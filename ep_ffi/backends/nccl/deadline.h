// SPDX-License-Identifier: Apache-2.0

#ifndef EP_FFI_BACKENDS_NCCL_DEADLINE_H_
#define EP_FFI_BACKENDS_NCCL_DEADLINE_H_

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <string>
#include <system_error>
#include <thread>

#include "ep_ffi/core/status.h"

namespace ep::nccl {

// The longest timeout in seconds, some 30 years. The clocks of the standard
// library count nanoseconds in 64 bits, so an infinite timeout would overflow.
constexpr double kLongestWaitS = 1e9;

// Runs `call`, which waits for other ranks, on a new thread, and returns its
// result. Fails after `seconds`, which may be infinite, in which the result of
// `count_progress` has not changed. After a timeout the thread continues, so
// `call` must own the objects that it uses. `what` is the subject of the error
// message.
inline Status RunWithin(
    double seconds, const std::string& what, std::function<Status()> call,
    const std::function<uint64_t()>& count_progress = [] { return 0; }) {
  std::packaged_task<Status()> task(std::move(call));
  std::future<Status> result = task.get_future();
  try {
    std::thread(std::move(task)).detach();
  } catch (const std::system_error& e) {
    return Status(Code::kResourceExhausted,
                  StrCat(what, " needs a new thread: ", e.what(),
                         "; raise the limit of threads (ulimit -u)"));
  }
  const std::chrono::duration<double> wait(std::min(seconds, kLongestWaitS));
  uint64_t progress;
  do {
    progress = count_progress();
    if (result.wait_for(wait) == std::future_status::ready) {
      return result.get();
    }
  } while (progress != count_progress());
  return Status(Code::kDeadlineExceeded,
                StrCat(what, " took longer than timeout_s = ", seconds,
                       "; look for a rank that failed, or is not there yet"));
}

}  // namespace ep::nccl

#endif  // EP_FFI_BACKENDS_NCCL_DEADLINE_H_
