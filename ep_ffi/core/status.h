// SPDX-License-Identifier: Apache-2.0

// The result of an operation: a code that XLA and JAX users know, and a
// sentence that names the op, what was expected, what came, and the cure.

#ifndef EP_FFI_CORE_STATUS_H_
#define EP_FFI_CORE_STATUS_H_

#include <cstdint>
#include <string>
#include <utility>

#include "ep_ffi/core/str_cat.h"

namespace ep {

// The subset of the canonical codes that expert parallelism needs.
enum class Code : uint8_t {
  kOk,
  kInvalidArgument,     // this input is wrong, whatever the state
  kFailedPrecondition,  // the group or the handle is in the wrong state
  kResourceExhausted,   // more rows than the receive capacity; no memory
  kDeadlineExceeded,    // a peer did not come in time
  kUnavailable,         // a peer has ended
  kInternal,            // a bug in this library
};

// The exit code of a process that ends itself, since it would wait for ever.
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

// Returns from the enclosing function if `expr` is a failure.
#define EP_RETURN_IF_ERROR(expr)                    \
  do {                                              \
    if (::ep::Status s = (expr); !s.ok()) return s; \
  } while (false)

}  // namespace ep

#endif  // EP_FFI_CORE_STATUS_H_
