// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/peers.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <mutex>
#include <utility>

#include "ep_ffi/backends/host/clock.h"

namespace ep::host {
namespace {

// Marks what the progress thread is woken by, beside the number of a process.
constexpr uint64_t kLife = uint64_t{1} << 32;
constexpr uint64_t kWake = ~uint64_t{0};

}  // namespace

struct Peers::Link {
  struct Outgoing {
    std::string bytes;
    std::shared_ptr<const Fd> fd;  // null if there is none to send
  };

  Link(int32_t process, Fd socket)
      : process(process), socket(std::move(socket)) {}

  const int32_t process;
  const Fd socket;

  std::mutex mutex;  // guards the queue and the order of messages
  std::deque<Outgoing> queue;

  // Progress thread only.
  bool is_gone = false;
  std::map<uint64_t, Mapping> segments;
  Status mapped;  // why the last of those that are missing is

  // False if the socket is full; true also when the peer is gone, which the
  // progress thread reports.
  bool TrySend(const Outgoing& out) {
    iovec iov = {const_cast<char*>(out.bytes.data()), out.bytes.size()};
    msghdr header = {};
    header.msg_iov = &iov;
    header.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (out.fd) {
      header.msg_control = control;
      header.msg_controllen = sizeof(control);
      cmsghdr* c = CMSG_FIRSTHDR(&header);
      c->cmsg_level = SOL_SOCKET;
      c->cmsg_type = SCM_RIGHTS;
      c->cmsg_len = CMSG_LEN(sizeof(int));
      const int fd = out.fd->get();
      std::memcpy(CMSG_DATA(c), &fd, sizeof(fd));
    }
    ssize_t sent;
    do {
      sent = sendmsg(socket.get(), &header, MSG_DONTWAIT | MSG_NOSIGNAL);
    } while (sent < 0 && errno == EINTR);
    // The last is of this user, who has sent many descriptors that are still to
    // be received.
    return sent >= 0 ||
           (errno != EAGAIN && errno != ENOBUFS && errno != ETOOMANYREFS);
  }

  // Sends what the socket takes; true when the queue is empty.
  bool Flush() {
    while (!queue.empty() && TrySend(queue.front())) queue.pop_front();
    return queue.empty();
  }
};

Peers::Peers(const Handshake::Options& options, double tick_s)
    : tick_s_(tick_s),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  for (int32_t p = 0; p < options.num_processes; ++p) {
    const bool watched = p != options.process && !options.pids.empty();
    lives_.emplace_back(watched ? options.pids[p] : 0);
  }
}

Status Peers::Connect(const Handshake::Options& options, double tick_s,
                      std::unique_ptr<Peers>* out) {
  std::unique_ptr<Peers> peers(new Peers(options, tick_s));
  if (peers->epoll_.get() < 0 || peers->wake_.get() < 0) {
    return SystemError("cannot create the event queue of a group");
  }
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.u64 = kWake;
  epoll_ctl(peers->epoll_.get(), EPOLL_CTL_ADD, peers->wake_.get(), &event);

  Handshake handshake(options, peers->lives_);
  Status connected = handshake.Connect();
  for (Fd& socket : handshake.TakeSockets()) {
    const int32_t process = peers->links_.size();
    peers->links_.push_back(
        socket.get() < 0 ? nullptr
                         : std::make_unique<Link>(process, std::move(socket)));
  }
  if (!connected.ok()) {
    peers->SendBye(connected.message());
    return connected;
  }
  for (auto& link : peers->links_) {
    if (!link) continue;
    event.data.u64 = link->process;
    epoll_ctl(peers->epoll_.get(), EPOLL_CTL_ADD, link->socket.get(), &event);
    event.data.u64 |= kLife;
    epoll_ctl(peers->epoll_.get(), EPOLL_CTL_ADD,
              peers->lives_[link->process].fd(), &event);
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
    (void)!write(wake_.get(), &one, sizeof(one));
    progress_.join();
  }
}

Status Peers::Acquire(size_t bytes, int32_t num_readers, Segment** out) {
  int new_fd = -1;
  EP_RETURN_IF_ERROR(pool_.Acquire(bytes, num_readers, out, &new_fd));
  if (new_fd >= 0) {
    // The links share it: a copy for each could run into the limit of files.
    const auto fd = std::make_shared<const Fd>(new_fd);
    Message message = {};
    message.type = Message::kSegment;
    message.segment = (*out)->id;
    for (auto& link : links_) {
      if (link) Send(*link, message, "", fd);
    }
  }
  return Status();
}

void Peers::SendPost(const std::vector<int32_t>& processes, Message message,
                     const std::string& text) {
  message.type = Message::kPost;
  for (int32_t p : processes) Send(*links_[p], message, text);
}

void Peers::SendRelease(int32_t process, uint64_t segment) {
  Message message = {};
  message.type = Message::kRelease;
  message.segment = segment;
  Send(*links_[process], message, "");
}

void Peers::SendFail(const Launch& launch, const Status& status) {
  Message message = {};
  message.type = Message::kFail;
  message.launch = launch;
  message.code = static_cast<int32_t>(status.code());
  for (auto& link : links_) {
    if (link) Send(*link, message, status.message());
  }
}

void Peers::SendBye(const std::string& why) {
  Message message = {};
  message.type = Message::kBye;
  for (auto& link : links_) {
    if (link) Send(*link, message, why);
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
                 std::shared_ptr<const Fd> fd) {
  Link::Outgoing out = {Encode(message, text), std::move(fd)};
  std::lock_guard<std::mutex> lock(link.mutex);
  if (link.queue.empty() && link.TrySend(out)) return;
  link.queue.push_back(std::move(out));
  epoll_event event = {};
  event.events = EPOLLIN | EPOLLOUT;
  event.data.u64 = link.process;
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, link.socket.get(), &event);
}

void Peers::Progress() {
  const int tick_ms = std::max(1, static_cast<int>(tick_s_ * 1e3));
  double next_tick = Now() + tick_s_;
  epoll_event events[16];
  while (true) {
    // What has arrived comes before a tick, which may find this process late,
    // since it was stopped perhaps.
    const bool is_due = Now() >= next_tick;
    const int n = epoll_wait(epoll_.get(), events, 16, is_due ? 0 : tick_ms);
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
          epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, link.socket.get(), &event);
        }
      }
      if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) Receive(link);
      // What it had sent is received.
      if (source & kLife) Drop(link, /*orderly=*/false, "");
    }
    if (is_due) {
      handlers_.on_tick();
      next_tick = Now() + tick_s_;
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
    cmsghdr* c = size >= 0 ? CMSG_FIRSTHDR(&header) : nullptr;
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
    // There is room for one: it is lost if none can be opened.
    Status received;
    if (fd.get() < 0 && (header.msg_flags & MSG_CTRUNC)) {
      errno = EMFILE;
      received = SystemError("cannot receive a peer's shared memory");
    }
    Handle(link, message, text, fd.get(), received);
  }
}

void Peers::Handle(Link& link, const Message& message, const std::string& text,
                   int fd, const Status& received) {
  switch (message.type) {
    case Message::kSegment: {
      Mapping memory;
      Status mapped = received.ok() ? Mapping::OpenPeer(fd, &memory) : received;
      if (mapped.ok()) {
        link.segments.emplace(message.segment, std::move(memory));
      } else {
        link.mapped = std::move(mapped);  // a post in it will fail
      }
      return;
    }
    case Message::kPost: {
      auto found = link.segments.find(message.segment);
      return handlers_.on_post(
          link.process, message, text,
          found == link.segments.end() ? nullptr : &found->second, link.mapped);
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
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, link.socket.get(), nullptr);
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, lives_[link.process].fd(), nullptr);
  handlers_.on_gone(link.process, orderly, why);
}

}  // namespace ep::host
