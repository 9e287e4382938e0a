// File descriptors that are closed with their owners.

#ifndef EP_FFI_BACKENDS_HOST_FD_H_
#define EP_FFI_BACKENDS_HOST_FD_H_

#include <errno.h>
#include <string.h>
#include <unistd.h>

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

// What the system says when there is none.
inline Status SystemError(const char* what) {
  return Status(Code::kUnavailable, StrCat(what, ": ", strerror(errno)));
}

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_FD_H_
