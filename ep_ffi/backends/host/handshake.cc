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

bool IsSameUser(int fd) {
  ucred peer;
  socklen_t size = sizeof(peer);
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 &&
         peer.uid == geteuid();
}

// Receives and checks a Hello; false if the other side is not of this group.
bool ReceiveHello(int fd, const std::string& secret, double deadline,
                  int32_t* process) {
  Hello hello;
  if (!IsSameUser(fd) || !WaitReadable(fd, deadline)) return false;
  if (recv(fd, &hello, sizeof(hello), 0) != sizeof(hello)) return false;
  const Hello expected = MakeHello(secret, hello.process);
  *process = hello.process;
  return std::memcmp(hello.secret, expected.secret, sizeof(hello.secret)) == 0;
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

Handshake::Handshake(int32_t process, const std::string& secret,
                     double timeout_s, const std::vector<Life>& lives,
                     const std::vector<int32_t>& ids)
    : process_(process),
      secret_(secret),
      timeout_s_(timeout_s),
      deadline_(Now() + timeout_s),
      lives_(lives),
      ids_(ids),
      sockets_(lives.size()) {}

Status Handshake::Connect() {
  if (num_processes() == 1) return Status();
  Fd listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address;
  const socklen_t size = AddressOf(secret_, process_, &address);
  if (listener.get() < 0 ||
      bind(listener.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      listen(listener.get(), num_processes()) != 0) {
    return SystemError("cannot listen for the other processes of the group");
  }
  for (int32_t p = 0; p < process_; ++p) {
    Status dialled = Dial(p);
    if (!dialled.ok()) return dialled;
  }
  return Accept(listener.get());
}

Status Handshake::Dial(int32_t process) {
  sockaddr_un address;
  const socklen_t size = AddressOf(secret_, process, &address);
  while (Now() < deadline_) {
    Fd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (fd.get() < 0) return SystemError("cannot create a socket");
    if (connect(fd.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) {
      if (FindDead() >= 0) return Lost(process);
      usleep(2000);  // not listening yet
      continue;
    }
    const Hello hello = MakeHello(secret_, process_);
    int32_t answer = -1;
    if (send(fd.get(), &hello, sizeof(hello), MSG_NOSIGNAL) == sizeof(hello) &&
        ReceiveHello(fd.get(), secret_, deadline_, &answer) &&
        answer == process) {
      sockets_[process] = std::move(fd);
      return Status();
    }
    if (Now() < deadline_) return Lost(process);
  }
  return Status(
      Code::kDeadlineExceeded,
      StrCat(NameOf(process),
             " of the group cannot be reached within timeout_s = ", timeout_s_,
             " s; all processes must run on this host, as one user "
             "and in one network namespace, and all must call "
             "ep_bootstrap"));
}

Status Handshake::Accept(int listener) {
  while (true) {
    std::string missing;
    for (int32_t p = process_ + 1; p < num_processes(); ++p) {
      if (sockets_[p].get() >= 0) continue;
      missing += (missing.empty() ? "" : ", ") + NameOf(p);
    }
    if (missing.empty()) return Status();
    if (const int32_t dead = FindDead(); dead >= 0) return Lost(dead);
    if (Now() >= deadline_) {
      return Status(
          Code::kDeadlineExceeded,
          StrCat(missing, " of the group did not connect within timeout_s = ",
                 timeout_s_,
                 " s; all processes must call ep_bootstrap with the "
                 "same arguments"));
    }
    if (!WaitReadable(listener, std::min(deadline_, Now() + kLookAfterS))) {
      continue;
    }
    Fd fd(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
    int32_t process = -1;
    // A stranger is turned away; the wait goes on.
    if (fd.get() < 0 ||
        !ReceiveHello(fd.get(), secret_, std::min(deadline_, Now() + 5),
                      &process)) {
      continue;
    }
    if (process <= process_ || process >= num_processes() ||
        sockets_[process].get() >= 0) {
      continue;
    }
    const Hello hello = MakeHello(secret_, process_);
    if (send(fd.get(), &hello, sizeof(hello), MSG_NOSIGNAL) != sizeof(hello)) {
      continue;
    }
    sockets_[process] = std::move(fd);
  }
}

std::string Handshake::NameOf(int32_t process) const {
  return StrCat("process ", ids_.empty() ? process : ids_[process]);
}

int32_t Handshake::FindDead() const {
  for (int32_t p = 0; p < num_processes(); ++p) {
    if (lives_[p].IsOver()) return p;
  }
  return -1;
}

Status Handshake::Lost(int32_t process) const {
  const int32_t dead = FindDead();
  return Status(
      Code::kUnavailable,
      StrCat(NameOf(dead < 0 ? process : dead), dead < 0 ? " gave up" : " died",
             " while the group was connected; see what it says, and restart "
             "the job"));
}

}  // namespace ep::host
