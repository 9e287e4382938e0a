// SPDX-License-Identifier: Apache-2.0

// Sockets on which the processes of a group wait for each other.

#ifndef EP_FFI_BACKENDS_HOST_TESTING_LISTENER_H_
#define EP_FFI_BACKENDS_HOST_TESTING_LISTENER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "ep_ffi/backends/host/fd.h"
#include "ep_ffi/backends/host/handshake.h"

namespace ep::host {

// Listens at an address with a new name, as ep/_src/host_backend.py does.
struct Listener {
  Listener();

  const std::string name;
  const Fd socket;
};

// The listeners of processes that are played by one.
class Listeners {
 public:
  explicit Listeners(int32_t num_processes) : listeners_(num_processes) {}

  int socket(int32_t process) const { return listeners_[process].socket.get(); }
  std::vector<std::string> addresses() const;
  // Returns what a process needs to connect to the others.
  Handshake::Options OptionsOf(int32_t process, double timeout_s = 30) const;

 private:
  std::vector<Listener> listeners_;
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_TESTING_LISTENER_H_
