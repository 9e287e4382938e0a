// SPDX-License-Identifier: Apache-2.0

// How a process learns that another one on this host has ended.

#ifndef EP_FFI_BACKENDS_HOST_TRANSPORT_PROCESS_WATCH_H_
#define EP_FFI_BACKENDS_HOST_TRANSPORT_PROCESS_WATCH_H_

#include <cstdint>

#include "ep_ffi/backends/host/transport/fd.h"

namespace ep::host {

// Watches a process, which may have ended already. Where the system has no
// descriptors of processes (before Linux 5.3), it never seems to end.
class ProcessWatch {
 public:
  // Watches the process with the system's id `pid`, or nothing if that is 0.
  explicit ProcessWatch(int32_t pid);

  // Returns a descriptor that is readable once the process has ended, or -1.
  int fd() const { return end_.get(); }
  bool HasEnded() const;

 private:
  Fd end_;
  bool had_ended_ = false;  // before the watch began
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_TRANSPORT_PROCESS_WATCH_H_
