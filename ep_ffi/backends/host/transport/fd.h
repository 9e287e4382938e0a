// SPDX-License-Identifier: Apache-2.0

// Owned file descriptors, and errors of system calls.

#ifndef EP_FFI_BACKENDS_HOST_TRANSPORT_FD_H_
#define EP_FFI_BACKENDS_HOST_TRANSPORT_FD_H_

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include <string>
#include <utility>

#include "ep_ffi/core/status.h"

namespace ep::host {

class Fd {
 public:
  explicit Fd(int fd = -1) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

// Returns the error of a failed system call: the reason, from `errno`, and a
// remedy.
inline Status SystemError(const std::string& what) {
  const int error = errno;
  const std::string why = what + ": " + strerror(error);
  switch (error) {
    case EMFILE:
    case ENFILE:
      return Status(Code::kResourceExhausted,
                    why + "; raise the limit of open files (ulimit -n)");
    case EFBIG:
      return Status(Code::kResourceExhausted,
                    why + "; raise the limit of file sizes (ulimit -f)");
    case ENOMEM:
    case ENOSPC:
      return Status(Code::kResourceExhausted,
                    why +
                        "; lower recv_capacity_per_rank or the number of "
                        "programs in flight");
    default:
      return Status(Code::kUnavailable, why);
  }
}

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_TRANSPORT_FD_H_
