// SPDX-License-Identifier: Apache-2.0

// How the processes of a group connect: every pair gets a socket.
//
// Each process binds a socket to an abstract address with a random name, and
// listens, before it tells the others the name (ep/_src/host_backend.py). So
// nobody can take the name first, and the address vanishes with the socket. A
// process dials those below it and accepts those above it. Nobody waits for the
// dead.
//
// Everybody on the host can read the names of abstract sockets, and connect to
// them. But the kernel says who is at the other end of a connection
// (SO_PEERCRED). Both sides ask it before they send or read a byte, and hang up
// on another user; and on another process than the one that is expected, where
// the ids of processes are known.
//
// There is no secret, because it would keep nobody out. It would be told by
// JAX's key-value store, as the names are. That store asks nobody who they are,
// and whoever can reach these sockets is in our network namespace and can reach
// the store as well. What is left is an attacker who is the same user, who can
// stop or trace our processes anyway, or who is root.

#ifndef EP_FFI_BACKENDS_HOST_HANDSHAKE_H_
#define EP_FFI_BACKENDS_HOST_HANDSHAKE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "ep_ffi/backends/host/fd.h"
#include "ep_ffi/core/status.h"

namespace ep::host {

// Of a process on this host, which may be dead already.
class Life {
 public:
  explicit Life(int32_t pid);  // 0: of one that cannot be watched

  // Can be read from its end on; -1 if that is not known.
  int fd() const { return end_.get(); }
  bool IsOver() const;

 private:
  Fd end_;
  bool is_over_ = false;
};

class Handshake {
 public:
  struct Options {
    int32_t process;        // this one
    int32_t num_processes;  // of the group
    // A socket that listens, and where each process listens; unused with one
    // process. The socket stays the caller's.
    int listener;
    std::vector<std::string> addresses;
    double timeout_s;
    // By process: the system's ids, 0 where one is unknown. Or empty.
    std::vector<int32_t> pids = {};
    // By process: the number that users know it by. Or empty: the same.
    std::vector<int32_t> process_ids = {};
  };

  // `lives` are of all processes.
  Handshake(const Options& options, const std::vector<Life>& lives);

  Status Connect();

  // By process, also those that were there when it failed.
  std::vector<Fd> TakeSockets() { return std::move(sockets_); }

 private:
  Status Dial(int32_t process);
  Status Accept();
  // Waits until `fd` can be read; false if time is up or a process has died.
  bool Await(int fd) const;
  // Receives which process the other side is, until a time; -1 if it does not
  // say so, or is not that process.
  int32_t ReceiveHello(int fd, double until) const;
  // Why a process does not connect: a dead one, this or another.
  Status Lost(int32_t process) const;
  std::string NameOf(int32_t process) const;
  // A process that is known to have died, or -1.
  int32_t FindDead() const;

  const Options& options_;
  const double deadline_;
  const std::vector<Life>& lives_;
  std::vector<Fd> sockets_;
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_HANDSHAKE_H_
