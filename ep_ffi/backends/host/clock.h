// SPDX-License-Identifier: Apache-2.0
#ifndef EP_FFI_BACKENDS_HOST_CLOCK_H_
#define EP_FFI_BACKENDS_HOST_CLOCK_H_

#include <chrono>

namespace ep::host {

// Seconds of a clock that never goes back.
inline double Now() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_CLOCK_H_
