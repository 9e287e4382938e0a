// SPDX-License-Identifier: Apache-2.0

// Listening sockets of a group's processes.

#ifndef EP_FFI_BACKENDS_HOST_TESTING_LISTENER_H_
#define EP_FFI_BACKENDS_HOST_TESTING_LISTENER_H_

#include <gtest/gtest.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstdint>
#include <string>
#include <vector>

#include "ep_ffi/backends/host/topology.h"
#include "ep_ffi/backends/host/transport/fd.h"
#include "ep_ffi/backends/host/transport/messages.h"

namespace ep::host {

// Listens at a new random address, as ep/_src/backends/host.py does.
struct Listener {
  Listener() {
    sockaddr_un address;
    const socklen_t size = AddressOf(name, &address);
    EXPECT_EQ(0,
              bind(socket.get(), reinterpret_cast<sockaddr*>(&address), size));
    EXPECT_EQ(0, listen(socket.get(), SOMAXCONN));
  }

  const std::string name = StrCat("ep_ffi-test-", Random());
  const Fd socket{::socket(AF_UNIX, SOCK_SEQPACKET, 0)};

 private:
  static uint64_t Random() {
    uint64_t number;
    EXPECT_EQ(8, getrandom(&number, sizeof(number), /*flags=*/0));
    return number;
  }
};

// The listeners of all processes of a group, for tests whose processes are
// threads. Process numbers and ids are equal.
class Listeners {
 public:
  explicit Listeners(int32_t num_processes) : listeners_(num_processes) {}

  int socket(int32_t process) const { return listeners_[process].socket.get(); }
  std::vector<Topology::Process> processes() const {
    std::vector<Topology::Process> processes;
    for (const Listener& listener : listeners_) {
      const auto id = static_cast<int32_t>(processes.size());
      processes.push_back({listener.name, id, /*pid=*/0});
    }
    return processes;
  }
  // Returns a topology without ranks.
  Topology TopologyOf(int32_t process) const {
    return {process, /*ep_size=*/1, processes(), /*members=*/{}};
  }

 private:
  std::vector<Listener> listeners_;
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_TESTING_LISTENER_H_
