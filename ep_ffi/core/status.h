// SPDX-License-Identifier: Apache-2.0

// The result of an operation: a code as in absl::Status, and a message that
// names the op, the expected and the actual values, and a remedy.

#ifndef EP_FFI_CORE_STATUS_H_
#define EP_FFI_CORE_STATUS_H_

#include <cstdint>
#include <exception>
#include <string>
#include <utility>

#include "ep_ffi/core/str_cat.h"

namespace ep {

// The canonical status codes that this library uses.
enum class Code : uint8_t {
  kOk,
  kInvalidArgument,     // the input is invalid in every state
  kFailedPrecondition,  // wrong state of the group or the handle
  kResourceExhausted,   // the capacity or the memory is too small
  kDeadlineExceeded,    // a peer did not post in time
  kUnavailable,         // a peer closed the group or died
  kInternal,            // a bug in this library
};

// The exit code of a process that terminates because it would wait
// indefinitely.
constexpr int kExitCode = 70;

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message)
      : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

// Runs `body`, which returns a Status. An exception becomes an error.
template <typename Body>
Status CatchIn(Body body) {
  try {
    return body();
  } catch (const std::exception& e) {
    return Status(Code::kInternal, e.what());
  }
}

// Returns the status `expr` from the enclosing function if it is an error.
#define EP_RETURN_IF_ERROR(expr)                    \
  do {                                              \
    if (::ep::Status s = (expr); !s.ok()) return s; \
  } while (false)

}  // namespace ep

#endif  // EP_FFI_CORE_STATUS_H_
