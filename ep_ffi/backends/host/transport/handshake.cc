// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/transport/handshake.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "ep_ffi/backends/host/transport/messages.h"
#include "ep_ffi/core/clock.h"

namespace ep::host {
namespace {

// Interval, in seconds, at which a waiting process polls for dead peers.
constexpr double kLookForDeathsS = 0.1;

// Waits until `fd` is readable. Returns false at the deadline.
bool WaitReadable(int fd, double deadline) {
  while (true) {
    const double left = deadline - Now();
    if (left <= 0) return false;
    pollfd p = {fd, POLLIN, 0};
    const int n = poll(&p, 1, static_cast<int>(std::min(left, 1.0) * 1e3) + 1);
    if (n > 0) return true;
    if (n < 0 && errno != EINTR) return false;
  }
}

// Asks the kernel for the credentials of the process at the other end.
ucred PeerOf(int fd) {
  ucred peer = {0, static_cast<uid_t>(-1), static_cast<gid_t>(-1)};
  socklen_t size = sizeof(peer);
  (void)getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size);
  return peer;
}

bool IsSameUser(int fd) { return PeerOf(fd).uid == geteuid(); }

bool SendHello(int fd, int32_t process) {
  const Hello hello = {process};
  return send(fd, &hello, sizeof(hello), MSG_NOSIGNAL) == sizeof(hello);
}

}  // namespace

Handshake::Handshake(const Topology& topology, int listener, double timeout_s,
                     const std::vector<ProcessWatch>& watches)
    : topology_(topology),
      listener_(listener),
      timeout_s_(timeout_s),
      deadline_(Now() + timeout_s),
      watches_(watches),
      sockets_(topology.num_processes()) {}

Status Handshake::Connect() {
  for (int32_t p = 0; p < topology_.process; ++p) {
    EP_RETURN_IF_ERROR(ConnectTo(p));
  }
  return AcceptOthers();
}

bool Handshake::Await(int fd) const {
  while (Now() < deadline_ && FindDead() < 0) {
    if (WaitReadable(fd, std::min(deadline_, Now() + kLookForDeathsS))) {
      return true;
    }
  }
  return false;
}

int32_t Handshake::ReceiveHello(int fd, double until) const {
  Hello hello;
  if (!WaitReadable(fd, until) ||
      recv(fd, &hello, sizeof(hello), 0) != sizeof(hello) ||
      hello.process < 0 || hello.process >= topology_.num_processes()) {
    return -1;
  }
  const int32_t pid = topology_.processes[hello.process].pid;
  return pid == 0 || pid == PeerOf(fd).pid ? hello.process : -1;
}

Status Handshake::ConnectTo(int32_t process) {
  sockaddr_un address;
  const socklen_t size =
      AddressOf(topology_.processes[process].address, &address);
  while (Now() < deadline_) {
    Fd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (fd.get() < 0) return SystemError("cannot create a socket");
    // Limits the wait of `connect` while many other processes connect.
    const timeval limit = {0, static_cast<suseconds_t>(kLookForDeathsS * 1e6)};
    setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
    if (connect(fd.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) {
      const bool is_busy = errno == EAGAIN || errno == EINTR;
      if (!is_busy || FindDead() >= 0) return Unreachable(process);
      continue;
    }
    if (IsSameUser(fd.get()) && SendHello(fd.get(), topology_.process) &&
        Await(fd.get()) && ReceiveHello(fd.get(), deadline_) == process) {
      sockets_[process] = std::move(fd);
      return Status();
    }
    if (Now() < deadline_) return Unreachable(process);
  }
  return Status(
      Code::kDeadlineExceeded,
      StrCat(topology_.ProcessName(process),
             " of the group did not answer within timeout_s = ", timeout_s_,
             " s of ep_bootstrap; it may be stopped or short of CPU time"));
}

Status Handshake::AcceptOthers() {
  while (true) {
    std::string missing;
    for (int32_t p = topology_.process + 1; p < topology_.num_processes();
         ++p) {
      if (sockets_[p].get() >= 0) continue;
      missing += (missing.empty() ? "" : ", ") + topology_.ProcessName(p);
    }
    if (missing.empty()) return Status();
    if (const int32_t dead = FindDead(); dead >= 0) return Unreachable(dead);
    if (Now() >= deadline_) {
      return Status(
          Code::kDeadlineExceeded,
          StrCat(missing, " of the group did not connect within timeout_s = ",
                 timeout_s_,
                 " s; all processes must call ep_bootstrap with the "
                 "same arguments"));
    }
    if (!Await(listener_)) continue;
    Fd fd(accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC));
    if (fd.get() < 0) {
      if (errno == ECONNABORTED || errno == EINTR) continue;
      return SystemError("cannot accept the other processes of the group");
    }
    // Rejects a process of another user, and continues to wait.
    if (!IsSameUser(fd.get())) continue;
    const int32_t process =
        ReceiveHello(fd.get(), std::min(deadline_, Now() + 5));
    if (process > topology_.process && sockets_[process].get() < 0 &&
        SendHello(fd.get(), topology_.process)) {
      sockets_[process] = std::move(fd);
    }
  }
}

int32_t Handshake::FindDead() const {
  for (int32_t p = 0; p < topology_.num_processes(); ++p) {
    if (watches_[p].HasEnded()) return p;
  }
  return -1;
}

Status Handshake::Unreachable(int32_t process) const {
  // The kernel closes the sockets of a process before it reports the death.
  int32_t dead = FindDead();
  for (int i = 0; i < 20 && dead < 0; ++i) {
    usleep(1000);
    dead = FindDead();
  }
  return Status(
      Code::kUnavailable,
      StrCat(topology_.ProcessName(dead < 0 ? process : dead),
             dead < 0 ? " gave up" : " died",
             " while the group was connected; see what it says, and restart "
             "the job"));
}

}  // namespace ep::host
