// SPDX-License-Identifier: Apache-2.0

// The sockets on which the processes of a group listen for each other.

#ifndef EP_FFI_BACKENDS_HOST_TESTING_LISTENER_H_
#define EP_FFI_BACKENDS_HOST_TESTING_LISTENER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "ep_ffi/backends/host/topology.h"
#include "ep_ffi/backends/host/transport/fd.h"

namespace ep::host {

// Listens at an address with a new name, as ep/_src/backends/host.py does.
struct Listener {
  Listener();

  const std::string name;
  const Fd socket;
};

// The listeners of all processes of a group, for tests with threads in place of
// processes. Users know the processes by the numbers from 0 on.
class Listeners {
 public:
  explicit Listeners(int32_t num_processes) : listeners_(num_processes) {}

  int socket(int32_t process) const { return listeners_[process].socket.get(); }
  std::vector<Topology::Process> processes() const;
  // Returns a topology that has no ranks yet.
  Topology TopologyOf(int32_t process) const;

 private:
  std::vector<Listener> listeners_;
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_TESTING_LISTENER_H_
