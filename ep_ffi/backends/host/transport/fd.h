// SPDX-License-Identifier: Apache-2.0

// Owned file descriptors, process descriptors, and errors of system calls.

#ifndef EP_FFI_BACKENDS_HOST_TRANSPORT_FD_H_
#define EP_FFI_BACKENDS_HOST_TRANSPORT_FD_H_

#include <errno.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ep_ffi/core/status.h"

namespace ep::host {

// Owns a file descriptor and closes it.
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

// Returns a descriptor that is readable after the process `pid` has ended, or
// none: if `pid` is 0, and before Linux 5.3, which added process descriptors.
// The process may have ended already.
inline Fd WatchEnd(int32_t pid) {
  if (pid == 0) return Fd();
  int end = -1;
#ifdef SYS_pidfd_open  // Linux 5.3
  end = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (end < 0 && errno == ESRCH) end = eventfd(/*initval=*/1, EFD_CLOEXEC);
#endif
  return Fd(end);
}

// Sends a message with copies of descriptors. Returns false if the call fails,
// with the reason in `errno`.
inline bool SendMessage(const Fd& socket, const std::string& bytes,
                        const std::vector<int>& fds, int flags) {
  iovec iov = {const_cast<char*>(bytes.data()), bytes.size()};
  msghdr header = {};
  header.msg_iov = &iov;
  header.msg_iovlen = 1;
  const size_t fd_bytes = fds.size() * sizeof(int);
  std::vector<char> control(fds.empty() ? 0 : CMSG_SPACE(fd_bytes));
  if (!fds.empty()) {
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    cmsghdr* c = CMSG_FIRSTHDR(&header);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(fd_bytes);
    memcpy(CMSG_DATA(c), fds.data(), fd_bytes);
  }
  return sendmsg(socket.get(), &header, flags | MSG_NOSIGNAL) >= 0;
}

// Returns the error of a failed system call, with the reason from `errno` and a
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
