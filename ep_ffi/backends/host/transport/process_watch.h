// SPDX-License-Identifier: Apache-2.0

// Detects the end of another process of this host.

#ifndef EP_FFI_BACKENDS_HOST_TRANSPORT_PROCESS_WATCH_H_
#define EP_FFI_BACKENDS_HOST_TRANSPORT_PROCESS_WATCH_H_

#include <errno.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#include "ep_ffi/backends/host/transport/fd.h"

namespace ep::host {

// Watches a process, which may have ended already. Before Linux 5.3 there are
// no descriptors of processes, and the process never seems to end.
class ProcessWatch {
 public:
  // Watches the process `pid`, or no process if `pid` is 0.
  explicit ProcessWatch(int32_t pid) {
    if (pid == 0) return;
#ifdef SYS_pidfd_open  // Linux 5.3
    end_ = Fd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
    had_ended_ = end_.get() < 0 && errno == ESRCH;
#endif
  }

  // Returns a descriptor that is readable after the process has ended, or -1.
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
