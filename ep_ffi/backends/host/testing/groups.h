// SPDX-License-Identifier: Apache-2.0

// Groups of the host backend with threads in place of processes. A group knows
// its process by a number alone, so that sockets and shared memory are as real
// as between processes.

#ifndef EP_FFI_BACKENDS_HOST_TESTING_GROUPS_H_
#define EP_FFI_BACKENDS_HOST_TESTING_GROUPS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ep_ffi/backends/host/testing/listener.h"
#include "ep_ffi/backends/host/transport/fd.h"
#include "ep_ffi/testing/ranks.h"

namespace ep::host {

// Returns the domains of one group. Ranks are given to processes in turn; each
// process has one at least.
std::vector<testing::Domain> MakeHostWorld(const testing::WorldOptions& options,
                                           int32_t max_processes);

// A process of a group that does not run our code: it connects as one of the
// group, and then sends what no peer of ours would.
class Impostor {
 public:
  // Connects as process 1 to process 0, which `connect` creates meanwhile.
  explicit Impostor(
      const std::function<void(const Listeners& listeners)>& connect);

  // Sends a message of any bytes, with copies of descriptors.
  void Send(const std::string& bytes, const std::vector<int>& fds = {});
  // Returns the next message that process 0 has sent, which is empty if none
  // comes for a while.
  std::string Receive();
  // Ends the connection.
  void Leave() { socket_ = Fd(); }

 private:
  Fd socket_;
};

// A group of two processes. One is an impostor, which has all ranks but rank 0
// of the first domain.
struct GroupWithImpostor {
  explicit GroupWithImpostor(const testing::WorldOptions& options);
  ~GroupWithImpostor();

  std::vector<testing::Domain> domains;
  std::unique_ptr<Impostor> impostor;
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_TESTING_GROUPS_H_
