// SPDX-License-Identifier: Apache-2.0

// How the processes of a group connect: every pair gets a socket.
//
// Each process binds a socket to an abstract address with a random name, and
// listens, before it tells the others the name (ep/_src/backends/host.py). So
// nobody can take the name first, and the address vanishes with the socket. A
// process connects to the processes with smaller numbers and accepts the
// others. Connecting fails at once if a process is known to have died.
//
// The threat model of the engine:
//
//   who may reach it   a process of this user (SO_PEERCRED) and network; where
//                      ids of processes are known, only the expected process
//   what is checked    every byte that a peer sends or shares: a bad one fails
//                      the run, and does no other harm (../fuzz)
//   what is trusted    root, and this user, who could trace us anyway
//
// Both sides ask the kernel for the other process before they send or read a
// byte. A secret would keep nobody else out: JAX's key-value store would have
// to tell it, as it tells the names, and whoever reaches these sockets reaches
// the store, which asks for no credentials.

#ifndef EP_FFI_BACKENDS_HOST_TRANSPORT_HANDSHAKE_H_
#define EP_FFI_BACKENDS_HOST_TRANSPORT_HANDSHAKE_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ep_ffi/backends/host/topology.h"
#include "ep_ffi/backends/host/transport/fd.h"
#include "ep_ffi/backends/host/transport/process_watch.h"
#include "ep_ffi/core/status.h"

namespace ep::host {

class Handshake {
 public:
  // `listener` is the socket on which this process listens; it stays the
  // caller's, and is unused with one process. `watches` are of all processes.
  // Arguments that are references must outlive this object.
  Handshake(const Topology& topology, int listener, double timeout_s,
            const std::vector<ProcessWatch>& watches);

  // Connects this process with all others.
  Status Connect();

  // Returns the sockets by process, also after `Connect` failed.
  std::vector<Fd> TakeSockets() { return std::move(sockets_); }

 private:
  Status ConnectTo(int32_t process);
  Status AcceptOthers();
  // Waits until `fd` can be read. Returns false if time is up or a process has
  // died.
  bool Await(int fd) const;
  // Receives the number of the process at the other side. Returns -1 if none
  // comes until a time, or if that process has another id than expected.
  int32_t ReceiveHello(int fd, double until) const;
  // Returns the error for a connection that failed, perhaps because a process
  // died: this one or another.
  Status Unreachable(int32_t process) const;
  // Returns a process that is known to have died, or -1.
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
