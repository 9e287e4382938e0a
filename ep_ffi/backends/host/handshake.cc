// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/handshake.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "ep_ffi/backends/host/clock.h"
#include "ep_ffi/backends/host/wire.h"

namespace ep::host {
namespace {

// How often those who are still to connect are looked after.
constexpr double kLookAfterS = 0.1;

// Waits until `fd` can be read; false at the deadline.
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

// Returns the kernel's record of the process at the other end of a connection.
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

Life::Life(int32_t pid) {
  if (pid == 0) return;
#ifdef SYS_pidfd_open  // Linux 5.3
  end_ = Fd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  is_over_ = end_.get() < 0 && errno == ESRCH;
#endif
}

bool Life::IsOver() const {
  pollfd p = {end_.get(), POLLIN, 0};
  return is_over_ || poll(&p, 1, 0) > 0;
}

Handshake::Handshake(const Options& options, const std::vector<Life>& lives)
    : options_(options),
      deadline_(Now() + options.timeout_s),
      lives_(lives),
      sockets_(options.num_processes) {}

Status Handshake::Connect() {
  for (int32_t p = 0; p < options_.process; ++p) {
    Status dialled = Dial(p);
    if (!dialled.ok()) return dialled;
  }
  return Accept();
}

bool Handshake::Await(int fd) const {
  while (Now() < deadline_ && FindDead() < 0) {
    if (WaitReadable(fd, std::min(deadline_, Now() + kLookAfterS))) return true;
  }
  return false;
}

int32_t Handshake::ReceiveHello(int fd, double until) const {
  Hello hello;
  if (!WaitReadable(fd, until) ||
      recv(fd, &hello, sizeof(hello), 0) != sizeof(hello) ||
      hello.process < 0 || hello.process >= options_.num_processes) {
    return -1;
  }
  const int32_t pid = options_.pids.empty() ? 0 : options_.pids[hello.process];
  return pid == 0 || pid == PeerOf(fd).pid ? hello.process : -1;
}

Status Handshake::Dial(int32_t process) {
  sockaddr_un address;
  const socklen_t size = AddressOf(options_.addresses[process], &address);
  while (Now() < deadline_) {
    Fd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (fd.get() < 0) return SystemError("cannot create a socket");
    // How long it waits where many others want to connect.
    const timeval patience = {0, static_cast<suseconds_t>(kLookAfterS * 1e6)};
    setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
    if (connect(fd.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) {
      const bool is_busy = errno == EAGAIN || errno == EINTR;
      if (!is_busy || FindDead() >= 0) return Lost(process);
      continue;
    }
    if (IsSameUser(fd.get()) && SendHello(fd.get(), options_.process) &&
        Await(fd.get()) && ReceiveHello(fd.get(), deadline_) == process) {
      sockets_[process] = std::move(fd);
      return Status();
    }
    if (Now() < deadline_) return Lost(process);
  }
  return Status(
      Code::kDeadlineExceeded,
      StrCat(NameOf(process),
             " of the group did not answer within timeout_s = ",
             options_.timeout_s,
             " s of ep_bootstrap; it may be stopped or short of CPU time"));
}

Status Handshake::Accept() {
  while (true) {
    std::string missing;
    for (int32_t p = options_.process + 1; p < options_.num_processes; ++p) {
      if (sockets_[p].get() >= 0) continue;
      missing += (missing.empty() ? "" : ", ") + NameOf(p);
    }
    if (missing.empty()) return Status();
    if (const int32_t dead = FindDead(); dead >= 0) return Lost(dead);
    if (Now() >= deadline_) {
      return Status(
          Code::kDeadlineExceeded,
          StrCat(missing, " of the group did not connect within timeout_s = ",
                 options_.timeout_s,
                 " s; all processes must call ep_bootstrap with the "
                 "same arguments"));
    }
    if (!Await(options_.listener)) continue;
    Fd fd(accept4(options_.listener, nullptr, nullptr, SOCK_CLOEXEC));
    if (fd.get() < 0) {
      if (errno == ECONNABORTED || errno == EINTR) continue;
      return SystemError("cannot accept the other processes of the group");
    }
    // A stranger is turned away; the wait goes on.
    if (!IsSameUser(fd.get())) continue;
    const int32_t process =
        ReceiveHello(fd.get(), std::min(deadline_, Now() + 5));
    if (process > options_.process && sockets_[process].get() < 0 &&
        SendHello(fd.get(), options_.process)) {
      sockets_[process] = std::move(fd);
    }
  }
}

std::string Handshake::NameOf(int32_t process) const {
  return StrCat("process ", options_.process_ids.empty()
                                ? process
                                : options_.process_ids[process]);
}

int32_t Handshake::FindDead() const {
  for (int32_t p = 0; p < options_.num_processes; ++p) {
    if (lives_[p].IsOver()) return p;
  }
  return -1;
}

Status Handshake::Lost(int32_t process) const {
  // A process that dies is known to be dead a moment after its sockets close.
  int32_t dead = FindDead();
  for (int i = 0; i < 20 && dead < 0; ++i) {
    usleep(1000);
    dead = FindDead();
  }
  return Status(
      Code::kUnavailable,
      StrCat(NameOf(dead < 0 ? process : dead), dead < 0 ? " gave up" : " died",
             " while the group was connected; see what it says, and restart "
             "the job"));
}

}  // namespace ep::host
