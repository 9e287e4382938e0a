// SPDX-License-Identifier: Apache-2.0

// Helpers for the C functions that Python calls by ctypes. All other symbols
// are hidden. A C function that can fail returns the status code, 0 for
// success, and writes the message to `error`.

#ifndef EP_FFI_CORE_EXPORT_H_
#define EP_FFI_CORE_EXPORT_H_

#include <cstdint>
#include <string>

#include "ep_ffi/core/status.h"

#define EP_EXPORT extern "C" __attribute__((visibility("default")))

namespace ep {

// The version of the interface between Python and the library: the types of the
// exported functions and handlers, the handlers' attributes, and the C structs
// and enums. If one of these changes, change the version here and in
// ep/_src/native/ffi.py. Before any other call, Python refuses a library of
// another version.
inline constexpr int32_t kInterfaceVersion = 7;

// Runs `body`, which returns a Status. Writes its message and returns its code.
template <typename Body>
int32_t Export(char* error, int64_t error_bytes, Body body) {
  const Status status = CatchIn(body);
  const std::string message = Truncated(status.message(), error_bytes - 1);
  error[message.copy(error, message.size())] = 0;
  return static_cast<int32_t>(status.code());
}

}  // namespace ep

#endif  // EP_FFI_CORE_EXPORT_H_
