// SPDX-License-Identifier: Apache-2.0

// Connected sockets between the processes of a group, as
// ep/_src/native/sockets.py makes them.

#ifndef EP_FFI_BACKENDS_HOST_TESTING_SOCKETS_H_
#define EP_FFI_BACKENDS_HOST_TESTING_SOCKETS_H_

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "ep_ffi/backends/host/transport/fd.h"
#include "ep_ffi/backends/host/transport/topology.h"

namespace ep::host {

class Sockets {
 public:
  explicit Sockets(int32_t num_processes) : sockets_(num_processes) {
    for (auto& row : sockets_) row.resize(num_processes);
    for (int32_t p = 0; p < num_processes; ++p) {
      for (int32_t q = 0; q < p; ++q) {
        int pair[2];
        EXPECT_EQ(0, socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC,
                                /*protocol=*/0, pair));
        sockets_[p][q] = Fd(pair[0]);
        sockets_[q][p] = Fd(pair[1]);
      }
    }
  }

  // Returns the sockets of a process, indexed by the other process.
  std::vector<Fd> Take(int32_t process) { return std::move(sockets_[process]); }

 private:
  std::vector<std::vector<Fd>> sockets_;
};

// Returns an EP domain with a rank, of the same number and device, in each
// process. Process numbers and ids are equal.
inline Topology TopologyOf(int32_t process, int32_t num_processes) {
  Topology topology = {process, /*ep_size=*/num_processes, {}, {}};
  for (int32_t p = 0; p < num_processes; ++p) {
    topology.processes.push_back({p, /*pid=*/0});
    topology.members.push_back({/*process=*/p, /*device=*/p});
  }
  return topology;
}

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_TESTING_SOCKETS_H_
