// SPDX-License-Identifier: Apache-2.0

// How a process learns that another one on this host has ended.

#ifndef EP_FFI_BACKENDS_HOST_TRANSPORT_PROCESS_WATCH_H_
#define EP_FFI_BACKENDS_HOST_TRANSPORT_PROCESS_WATCH_H_

#include <errno.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#include "ep_ffi/backends/host/transport/fd.h"

namespace ep::host {

// Watches a process, which may have ended already. Where the system has no
// descriptors of processes (before Linux 5.3), it never seems to end.
class ProcessWatch {
 public:
  // Watches the process with the system's id `pid`, or nothing if that is 0.
  explicit ProcessWatch(int32_t pid) {
    if (pid == 0) return;
#ifdef SYS_pidfd_open  // Linux 5.3
    end_ = Fd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
    had_ended_ = end_.get() < 0 && errno == ESRCH;
#endif
  }

  // Returns a descriptor that is readable once the process has ended, or -1.
  int fd() const { return end_.get(); }
  bool HasEnded() const {
    pollfd p = {end_.get(), POLLIN, 0};
    return had_ended_ || poll(&p, 1, 0) > 0;
  }

 private:
  Fd end_;
  bool had_ended_ = false;  // before the watch began
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_TRANSPORT_PROCESS_WATCH_H_
