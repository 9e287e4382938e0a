// SPDX-License-Identifier: Apache-2.0

// A monotonic clock.

#ifndef EP_FFI_CORE_CLOCK_H_
#define EP_FFI_CORE_CLOCK_H_

#include <chrono>

namespace ep {

// Returns the monotonic time in seconds.
inline double Now() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace ep

#endif  // EP_FFI_CORE_CLOCK_H_
