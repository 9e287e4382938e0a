// SPDX-License-Identifier: Apache-2.0

// Connects the processes of a group: every pair gets a socket.
//
// Each process binds a socket to an abstract address with a random name and
// listens, before it publishes the name (ep/_src/backends/host.py). So no
// process can take the name first, and the address vanishes with the socket. A
// process connects to processes with smaller numbers, and accepts the other
// processes. Connecting fails as soon as a process is known to have died.
//
// The threat model of the engine:
//
//   reachable by  processes of this user (SO_PEERCRED) in this network
//                 namespace; if pids are known, only the expected process
//   checked       every byte that a peer sends or shares; a bad byte fails the
//                 run and does no other harm (../fuzz)
//   trusted       root, and this user, who could trace this process anyway
//
// Both sides query the kernel for the peer's credentials before they send or
// read a byte. A secret would add nothing: JAX's key-value store, which
// distributes the names, would distribute the secret, and the store asks for no
// credentials.

#ifndef EP_FFI_BACKENDS_HOST_TRANSPORT_HANDSHAKE_H_
#define EP_FFI_BACKENDS_HOST_TRANSPORT_HANDSHAKE_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ep_ffi/backends/host/topology.h"
#include "ep_ffi/backends/host/transport/fd.h"
#include "ep_ffi/core/status.h"

namespace ep::host {

class Handshake {
 public:
  // `listener` is the listening socket of this process, unused in a group of
  // one process. The caller closes the socket. `watches` is indexed by process.
  // The references must outlive this object.
  Handshake(const Topology& topology, int listener, double timeout_s,
            const std::vector<ProcessWatch>& watches);

  Status Connect();

  // Returns the sockets by process, also after `Connect` failed.
  std::vector<Fd> TakeSockets() { return std::move(sockets_); }

 private:
  Status ConnectTo(int32_t process);
  Status AcceptOthers();
  // Waits until `fd` is readable. Returns false at the deadline, or if a
  // process has died.
  bool Await(int fd) const;
  // Receives the number of the process that connects. Returns -1 at the time
  // `until`, or if the process does not have the expected pid.
  int32_t ReceiveHello(int fd, double until) const;
  // Returns the error of a failed connection, and names a dead process, if any.
  Status Unreachable(int32_t process) const;
  // Returns the number of a dead process, or -1.
  int32_t FindDead() const;

  const Topology& topology_;
  const int listener_;
  const double timeout_s_;
  const double deadline_;
  const std::vector<ProcessWatch>& watches_;
  std::vector<Fd> sockets_;
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_TRANSPORT_HANDSHAKE_H_
