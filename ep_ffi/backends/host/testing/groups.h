// SPDX-License-Identifier: Apache-2.0

// Groups of the host backend whose processes are threads of the test. A group
// identifies its process by a number only, so sockets and shared memory work as
// between real processes.

#ifndef EP_FFI_BACKENDS_HOST_TESTING_GROUPS_H_
#define EP_FFI_BACKENDS_HOST_TESTING_GROUPS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ep_ffi/backends/host/testing/sockets.h"
#include "ep_ffi/backends/host/transport/fd.h"
#include "ep_ffi/testing/ranks.h"

namespace ep::host {

// Creates a group, and returns its EP domains. Assigns ranks to processes
// round-robin. Each process has at least one rank.
std::vector<testing::Domain> MakeHostGroup(const testing::WorldOptions& options,
                                           int32_t max_processes);

// A process that does not run our code: an impostor sends messages that no peer
// would send.
class Impostor {
 public:
  explicit Impostor(Fd socket) : socket_(std::move(socket)) {}

  // Sends a message of any bytes, with copies of descriptors.
  void Send(const std::string& bytes, const std::vector<int>& fds = {});
  // Returns the next message of process 0, or an empty string after a second.
  std::string Receive();
  void Leave() { socket_ = Fd(); }

 private:
  Fd socket_;
};

// A group of two processes. The second process is an impostor, to which all
// ranks except rank 0 of the first domain belong.
struct GroupWithImpostor {
  explicit GroupWithImpostor(const testing::WorldOptions& options);
  ~GroupWithImpostor();

  std::vector<testing::Domain> domains;
  std::unique_ptr<Impostor> impostor;
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_TESTING_GROUPS_H_
