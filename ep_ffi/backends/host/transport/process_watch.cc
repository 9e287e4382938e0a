// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/transport/process_watch.h"

#include <errno.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace ep::host {

ProcessWatch::ProcessWatch(int32_t pid) {
  if (pid == 0) return;
#ifdef SYS_pidfd_open  // Linux 5.3
  end_ = Fd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  had_ended_ = end_.get() < 0 && errno == ESRCH;
#endif
}

bool ProcessWatch::HasEnded() const {
  pollfd p = {end_.get(), POLLIN, 0};
  return had_ended_ || poll(&p, 1, 0) > 0;
}

}  // namespace ep::host
