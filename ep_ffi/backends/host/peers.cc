#include "ep_ffi/backends/host/peers.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <mutex>
#include <utility>

namespace ep::host {
namespace {

class Fd {
 public:
  explicit Fd(int fd = -1) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

double Now() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

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

// How often those who are still to connect are looked after.
constexpr double kLookAfterS = 0.1;

// Marks what the progress thread is woken by, beside the number of a process.
constexpr uint64_t kLife = uint64_t{1} << 32;
constexpr uint64_t kWake = ~uint64_t{0};

Status SystemError(const char* what) {
  return Status(Code::kUnavailable, StrCat(what, ": ", strerror(errno)));
}

}  // namespace

// Of a process on this host, which may be dead already.
class Peers::Life {
 public:
  explicit Life(int32_t pid) {
    if (pid == 0) return;
#ifdef SYS_pidfd_open  // Linux 5.3
    end_ = Fd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
    is_over_ = end_.get() < 0 && errno == ESRCH;
#endif
  }

  // Can be read from its end on; -1 if that is not known.
  int fd() const { return end_.get(); }

  bool IsOver() const {
    pollfd p = {end_.get(), POLLIN, 0};
    return is_over_ || poll(&p, 1, 0) > 0;
  }

 private:
  Fd end_;
  bool is_over_ = false;
};

struct Peers::Link {
  struct Outgoing {
    std::string bytes;
    Fd fd;
  };

  int32_t process;
  Fd socket;

  std::mutex mutex;  // guards the queue and the order of messages
  std::deque<Outgoing> queue;

  // Progress thread only.
  bool is_gone = false;
  std::map<uint64_t, Mapping> segments;

  // False if the socket is full; true also when the peer is gone, which the
  // progress thread reports.
  bool TrySend(const Outgoing& out) {
    iovec iov = {const_cast<char*>(out.bytes.data()), out.bytes.size()};
    msghdr header = {};
    header.msg_iov = &iov;
    header.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (out.fd.get() >= 0) {
      header.msg_control = control;
      header.msg_controllen = sizeof(control);
      cmsghdr* c = CMSG_FIRSTHDR(&header);
      c->cmsg_level = SOL_SOCKET;
      c->cmsg_type = SCM_RIGHTS;
      c->cmsg_len = CMSG_LEN(sizeof(int));
      const int fd = out.fd.get();
      std::memcpy(CMSG_DATA(c), &fd, sizeof(fd));
    }
    ssize_t sent;
    do {
      sent = sendmsg(socket.get(), &header, MSG_DONTWAIT | MSG_NOSIGNAL);
    } while (sent < 0 && errno == EINTR);
    return sent >= 0 || (errno != EAGAIN && errno != ENOBUFS);
  }

  // Sends what the socket takes; true when the queue is empty.
  bool Flush() {
    while (!queue.empty() && TrySend(queue.front())) queue.pop_front();
    return queue.empty();
  }
};

Peers::Peers(const Options& options) : options_(options) {
  for (int32_t p = 0; p < options.num_processes; ++p) {
    const bool watched = p != options.process && !options.pids.empty();
    lives_.emplace_back(watched ? options.pids[p] : 0);
  }
}

Status Peers::Connect(const Options& options, std::unique_ptr<Peers>* out) {
  std::unique_ptr<Peers> peers(new Peers(options));
  peers->links_.resize(options.num_processes);
  peers->epoll_ = epoll_create1(EPOLL_CLOEXEC);
  peers->wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (peers->epoll_ < 0 || peers->wake_ < 0) return SystemError("epoll");
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.u64 = kWake;
  epoll_ctl(peers->epoll_, EPOLL_CTL_ADD, peers->wake_, &event);

  Status connected = peers->Handshake();
  if (!connected.ok()) {
    peers->SendBye(connected.message());
    return connected;
  }
  for (auto& link : peers->links_) {
    if (!link) continue;
    event.data.u64 = link->process;
    epoll_ctl(peers->epoll_, EPOLL_CTL_ADD, link->socket.get(), &event);
    event.data.u64 |= kLife;
    epoll_ctl(peers->epoll_, EPOLL_CTL_ADD, peers->lives_[link->process].fd(),
              &event);
  }
  *out = std::move(peers);
  return Status();
}

void Peers::Start(Handlers handlers) {
  handlers_ = std::move(handlers);
  progress_ = std::thread([this] { Progress(); });
}

Peers::~Peers() {
  if (progress_.joinable()) {
    const uint64_t one = 1;
    (void)!write(wake_, &one, sizeof(one));
    progress_.join();
  }
  if (wake_ >= 0) close(wake_);
  if (epoll_ >= 0) close(epoll_);
}

// Everyone listens, dials the processes below, accepts those above.
Status Peers::Handshake() {
  if (options_.num_processes == 1) return Status();
  const double deadline = Now() + options_.timeout_s;
  Fd listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address;
  const socklen_t size = AddressOf(options_.secret, options_.process, &address);
  if (listener.get() < 0 ||
      bind(listener.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      listen(listener.get(), options_.num_processes) != 0) {
    return SystemError("cannot listen for the other processes of the group");
  }
  for (int32_t p = 0; p < options_.process; ++p) {
    Status dialled = Dial(p, deadline);
    if (!dialled.ok()) return dialled;
  }
  return Accept(listener.get(), deadline);
}

Status Peers::Dial(int32_t process, double deadline) {
  sockaddr_un address;
  const socklen_t size = AddressOf(options_.secret, process, &address);
  while (Now() < deadline) {
    Fd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (fd.get() < 0) return SystemError("cannot create a socket");
    if (connect(fd.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) {
      if (FindDead() >= 0) return Lost(process);
      usleep(2000);  // not listening yet
      continue;
    }
    const Hello hello = MakeHello(options_.secret, options_.process);
    int32_t answer = -1;
    if (send(fd.get(), &hello, sizeof(hello), MSG_NOSIGNAL) == sizeof(hello) &&
        ReceiveHello(fd.get(), options_.secret, deadline, &answer) &&
        answer == process) {
      links_[process] = std::make_unique<Link>();
      links_[process]->process = process;
      links_[process]->socket = std::move(fd);
      return Status();
    }
    if (Now() < deadline) return Lost(process);
  }
  return Status(Code::kDeadlineExceeded,
                StrCat("process ", process,
                       " of the group cannot be reached within timeout_s = ",
                       options_.timeout_s,
                       " s; all processes must run on this host, as one user "
                       "and in one network namespace, and all must call "
                       "ep_bootstrap"));
}

Status Peers::Accept(int listener, double deadline) {
  while (true) {
    std::string missing;
    for (int32_t p = options_.process + 1; p < options_.num_processes; ++p) {
      if (links_[p]) continue;
      missing += StrCat(missing.empty() ? "process " : ", process ", p);
    }
    if (missing.empty()) return Status();
    if (const int32_t dead = FindDead(); dead >= 0) return Lost(dead);
    if (Now() >= deadline) {
      return Status(
          Code::kDeadlineExceeded,
          StrCat(missing, " of the group did not connect within timeout_s = ",
                 options_.timeout_s,
                 " s; all processes must call ep_bootstrap with the "
                 "same arguments"));
    }
    if (!WaitReadable(listener, std::min(deadline, Now() + kLookAfterS))) {
      continue;
    }
    Fd fd(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
    int32_t process = -1;
    // A stranger is turned away; the wait goes on.
    if (fd.get() < 0 ||
        !ReceiveHello(fd.get(), options_.secret, std::min(deadline, Now() + 5),
                      &process)) {
      continue;
    }
    if (process <= options_.process || process >= options_.num_processes ||
        links_[process]) {
      continue;
    }
    const Hello hello = MakeHello(options_.secret, options_.process);
    if (send(fd.get(), &hello, sizeof(hello), MSG_NOSIGNAL) != sizeof(hello)) {
      continue;
    }
    links_[process] = std::make_unique<Link>();
    links_[process]->process = process;
    links_[process]->socket = std::move(fd);
  }
}

int32_t Peers::FindDead() const {
  for (int32_t p = 0; p < options_.num_processes; ++p) {
    if (lives_[p].IsOver()) return p;
  }
  return -1;
}

Status Peers::Lost(int32_t process) const {
  const int32_t dead = FindDead();
  return Status(
      Code::kUnavailable,
      StrCat("process ", dead < 0 ? process : dead,
             dead < 0 ? " gave up" : " died",
             " while the group was connected; see what it says, and restart "
             "the job"));
}

Segment* Peers::Acquire(size_t bytes, int32_t num_readers) {
  int new_fd = -1;
  Segment* segment = pool_.Acquire(bytes, num_readers, &new_fd);
  Fd fd(new_fd);
  if (segment && fd.get() >= 0) {
    Message message = {};
    message.type = Message::kSegment;
    message.segment = segment->id;
    for (auto& link : links_) {
      if (link) Send(*link, message, "", fd.get());
    }
  }
  return segment;
}

void Peers::SendPost(const std::vector<int32_t>& processes, Message message,
                     const std::string& text) {
  message.type = Message::kPost;
  for (int32_t p : processes) Send(*links_[p], message, text, -1);
}

void Peers::SendRelease(int32_t process, uint64_t segment) {
  Message message = {};
  message.type = Message::kRelease;
  message.segment = segment;
  Send(*links_[process], message, "", -1);
}

void Peers::SendFail(const Launch& launch, const Status& status) {
  Message message = {};
  message.type = Message::kFail;
  message.launch = launch;
  message.code = static_cast<int32_t>(status.code());
  for (auto& link : links_) {
    if (link) Send(*link, message, status.message(), -1);
  }
}

void Peers::SendBye(const std::string& why) {
  Message message = {};
  message.type = Message::kBye;
  for (auto& link : links_) {
    if (link) Send(*link, message, why, -1);
  }
  const double deadline = Now() + 1;
  for (auto& link : links_) {
    while (link && Now() < deadline) {
      std::unique_lock<std::mutex> lock(link->mutex);
      if (link->Flush()) break;
      lock.unlock();
      usleep(1000);
    }
  }
}

void Peers::Send(Link& link, const Message& message, const std::string& text,
                 int fd) {
  Link::Outgoing out;
  out.bytes = Encode(message, text);
  if (fd >= 0) out.fd = Fd(dup(fd));

  std::lock_guard<std::mutex> lock(link.mutex);
  if (link.queue.empty() && link.TrySend(out)) return;
  link.queue.push_back(std::move(out));
  epoll_event event = {};
  event.events = EPOLLIN | EPOLLOUT;
  event.data.u64 = link.process;
  epoll_ctl(epoll_, EPOLL_CTL_MOD, link.socket.get(), &event);
}

void Peers::Progress() {
  const int tick_ms = std::max(1, static_cast<int>(options_.tick_s * 1e3));
  double next_tick = Now() + options_.tick_s;
  epoll_event events[16];
  while (true) {
    const int n = epoll_wait(epoll_, events, 16, tick_ms);
    for (int i = 0; i < n; ++i) {
      const uint64_t source = events[i].data.u64;
      if (source == kWake) return;
      Link& link = *links_[source & ~kLife];
      if (events[i].events & EPOLLOUT) {
        std::lock_guard<std::mutex> lock(link.mutex);
        if (link.Flush()) {
          epoll_event event = {};
          event.events = EPOLLIN;
          event.data.u64 = source;
          epoll_ctl(epoll_, EPOLL_CTL_MOD, link.socket.get(), &event);
        }
      }
      if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) Receive(link);
      // What it had sent is received.
      if (source & kLife) Drop(link, /*orderly=*/false, "");
    }
    if (Now() >= next_tick) {
      handlers_.on_tick();
      next_tick = Now() + options_.tick_s;
    }
  }
}

// Receives all that has arrived.
void Peers::Receive(Link& link) {
  while (!link.is_gone) {
    char bytes[kMaxMessage];
    iovec iov = {bytes, sizeof(bytes)};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
    msghdr header = {};
    header.msg_iov = &iov;
    header.msg_iovlen = 1;
    header.msg_control = control;
    // Not CMSG_SPACE: a second descriptor would fit into its padding, and stay
    // open.
    header.msg_controllen = CMSG_LEN(sizeof(int));
    const ssize_t size =
        recvmsg(link.socket.get(), &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (size < 0 && errno == EAGAIN) return;
    // A peer that leaves with our messages unread resets the connection. That
    // is reported once, before what it had sent itself.
    if (size < 0 && (errno == EINTR || errno == ECONNRESET)) continue;
    Fd fd;
    cmsghdr* c = size > 0 ? CMSG_FIRSTHDR(&header) : nullptr;
    if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
      int received;
      std::memcpy(&received, CMSG_DATA(c), sizeof(received));
      fd = Fd(received);
    }
    Message message;
    std::string text;
    // The end of the file, or an error.
    if (size <= 0) return Drop(link, /*orderly=*/false, "");
    if (!Decode(bytes, size, &message, &text)) {
      // Garbage: the peer shall not wait for an answer.
      shutdown(link.socket.get(), SHUT_RDWR);
      return Drop(link, /*orderly=*/false, "");
    }
    Handle(link, message, text, fd.get());
  }
}

void Peers::Handle(Link& link, const Message& message, const std::string& text,
                   int fd) {
  switch (message.type) {
    case Message::kSegment: {
      Mapping memory;
      Status opened = Mapping::OpenPeer(fd, &memory);
      // A post in a segment that is not there fails with a clear message.
      if (opened.ok()) {
        link.segments.emplace(message.segment, std::move(memory));
      }
      return;
    }
    case Message::kPost: {
      auto found = link.segments.find(message.segment);
      return handlers_.on_post(
          link.process, message, text,
          found == link.segments.end() ? nullptr : &found->second);
    }
    case Message::kRelease:
      pool_.Release(message.segment);
      return;
    case Message::kFail:
      return handlers_.on_fail(message, text);
    case Message::kBye:
      return Drop(link, /*orderly=*/true, text);
  }
}

// The peer is gone: nothing more is received from it.
void Peers::Drop(Link& link, bool orderly, const std::string& why) {
  if (std::exchange(link.is_gone, true)) return;
  epoll_ctl(epoll_, EPOLL_CTL_DEL, link.socket.get(), nullptr);
  epoll_ctl(epoll_, EPOLL_CTL_DEL, lives_[link.process].fd(), nullptr);
  handlers_.on_gone(link.process, orderly, why);
}

}  // namespace ep::host
