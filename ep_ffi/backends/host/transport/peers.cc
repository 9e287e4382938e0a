// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/transport/peers.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <utility>

#include "ep_ffi/core/clock.h"
#include "ep_ffi/core/mutex.h"

namespace ep::host {
namespace {

// Event sources of the progress thread: a process number (its socket), a number
// with kProcessEnd (the process has ended), and kStop (from Stop).
constexpr uint64_t kProcessEnd = uint64_t{1} << 32;
constexpr uint64_t kStop = ~uint64_t{0};

// Adds a descriptor to `epoll`, or changes the events to wait for.
void Watch(const Fd& epoll, int operation, int fd, uint32_t events,
           uint64_t source) {
  epoll_event event = {};
  event.events = events;
  event.data.u64 = source;
  epoll_ctl(epoll.get(), operation, fd, &event);
}

}  // namespace

// The connection to one peer. The lock guards the queue. A new message is sent
// directly only if the queue is empty, which keeps the order.
struct Peers::Link {
  struct Outgoing {
    std::string bytes;
    std::shared_ptr<const Fd> fd;  // null if there is no descriptor
  };

  Link(int32_t process, Fd socket)
      : process(process), socket(std::move(socket)) {}

  const int32_t process;
  const Fd socket;

  Mutex mutex;
  std::deque<Outgoing> queue EP_GUARDED_BY(mutex);

  // Only the progress thread uses the members below.
  bool has_left = false;
  std::map<uint64_t, Mapping> segments;  // the peer's segments, mapped
  Status mapped;                         // error of a failed mapping, if any

  // Returns false if the socket is full. If the peer has left, returns true;
  // the progress thread reports that the peer has left.
  bool TrySend(const Outgoing& out) EP_REQUIRES(mutex) {
    const std::vector<int> fds =
        out.fd ? std::vector<int>{out.fd->get()} : std::vector<int>();
    while (!SendMessage(socket, out.bytes, fds, MSG_DONTWAIT)) {
      if (errno == EINTR) continue;
      // ETOOMANYREFS: processes of this user have sent too many descriptors
      // that are not received yet.
      return errno != EAGAIN && errno != ENOBUFS && errno != ENOMEM &&
             errno != ETOOMANYREFS;
    }
    return true;
  }

  // Sends queued messages until the socket is full. Returns whether the queue
  // is empty.
  bool Flush() EP_REQUIRES(mutex) {
    while (!queue.empty() && TrySend(queue.front())) queue.pop_front();
    return queue.empty();
  }
};

Peers::Peers(Topology topology, double tick_s)
    : topology_(std::move(topology)),
      tick_s_(tick_s),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  for (int32_t p = 0; p < topology_.num_processes(); ++p) {
    const int32_t pid = topology_.processes[p].pid;
    ends_.push_back(WatchEnd(p == topology_.process ? 0 : pid));
  }
}

Status Peers::Create(Topology topology, std::vector<Fd> sockets, double tick_s,
                     std::unique_ptr<Peers>* out) {
  std::unique_ptr<Peers> peers(new Peers(std::move(topology), tick_s));
  if (peers->epoll_.get() < 0 || peers->stop_.get() < 0) {
    return SystemError("cannot create the event queue of a group");
  }
  Watch(peers->epoll_, EPOLL_CTL_ADD, peers->stop_.get(), EPOLLIN, kStop);
  for (Fd& socket : sockets) {
    const uint64_t process = peers->links_.size();
    auto& link = peers->links_.emplace_back();
    if (socket.get() < 0) continue;
    link = std::make_unique<Link>(process, std::move(socket));
    Watch(peers->epoll_, EPOLL_CTL_ADD, link->socket.get(), EPOLLIN, process);
    Watch(peers->epoll_, EPOLL_CTL_ADD, peers->ends_[process].get(), EPOLLIN,
          process | kProcessEnd);
  }
  *out = std::move(peers);
  return Status();
}

void Peers::Start(Callbacks callbacks) {
  callbacks_ = std::move(callbacks);
  progress_ = std::thread([this] { Progress(); });
}

Peers::~Peers() { Stop(); }

void Peers::Stop() {
  if (!progress_.joinable()) return;
  const uint64_t one = 1;
  (void)!write(stop_.get(), &one, sizeof(one));
  progress_.join();
}

Status Peers::Acquire(size_t bytes, const std::vector<int32_t>& readers,
                      Segment** out) {
  Fd new_fd;
  EP_RETURN_IF_ERROR(segments_.Acquire(bytes, readers, out, &new_fd));
  if (new_fd.get() >= 0) {
    // All links share one descriptor, because the number of files is limited.
    const auto fd = std::make_shared<const Fd>(std::move(new_fd));
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
                     const std::string& names) {
  message.type = Message::kPost;
  for (int32_t p : processes) Send(*links_[p], message, names);
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

void Peers::SendBye(const std::string& reason) {
  Message message = {};
  message.type = Message::kBye;
  for (auto& link : links_) {
    if (link) Send(*link, message, reason);
  }
  const double deadline = Now() + 1;
  for (auto& link : links_) {
    const auto is_flushed = [&link] {
      MutexLock lock(link->mutex);
      return link->Flush();
    };
    while (link && Now() < deadline && !is_flushed()) usleep(1000);
  }
}

void Peers::Send(Link& link, const Message& message, const std::string& text,
                 std::shared_ptr<const Fd> fd) {
  Link::Outgoing out = {Encode(message, text), std::move(fd)};
  MutexLock lock(link.mutex);
  if (link.queue.empty() && link.TrySend(out)) return;
  link.queue.push_back(std::move(out));
  Watch(epoll_, EPOLL_CTL_MOD, link.socket.get(), EPOLLIN | EPOLLOUT,
        link.process);
}

void Peers::Progress() {
  const int tick_ms = std::max(1, static_cast<int>(tick_s_ * 1e3));
  double next_tick = Now() + tick_s_;
  epoll_event events[16];
  while (true) {
    // If the tick is overdue (this process was stopped), first handles the
    // messages that have arrived.
    const bool is_due = Now() >= next_tick;
    const int n = epoll_wait(epoll_.get(), events, 16, is_due ? 0 : tick_ms);
    for (int i = 0; i < n; ++i) {
      const uint64_t source = events[i].data.u64;
      if (source == kStop) return;
      Link& link = *links_[source & ~kProcessEnd];
      if (events[i].events & EPOLLOUT) {
        MutexLock lock(link.mutex);
        if (link.Flush()) {
          Watch(epoll_, EPOLL_CTL_MOD, link.socket.get(), EPOLLIN, source);
        }
      }
      if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) Receive(link);
      // The process has ended, and Receive has read all its messages.
      if (source & kProcessEnd) Drop(link, /*is_orderly=*/false, "");
    }
    if (is_due) {
      callbacks_.on_tick();
      next_tick = Now() + tick_s_;
    }
  }
}

void Peers::Receive(Link& link) {
  while (!link.has_left) {
    char bytes[kMaxMessage];
    iovec iov = {bytes, sizeof(bytes)};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
    msghdr header = {};
    header.msg_iov = &iov;
    header.msg_iovlen = 1;
    header.msg_control = control;
    // Uses CMSG_LEN, since a second descriptor would fit into the padding of
    // CMSG_SPACE and stay open.
    header.msg_controllen = CMSG_LEN(sizeof(int));
    const ssize_t size =
        recvmsg(link.socket.get(), &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (size < 0 && errno == EAGAIN) return;
    // A peer that leaves without reading our messages resets the connection.
    // The kernel reports the reset once, before the peer's last messages.
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
    // A size of 0 is the end of the stream; a negative size is an error.
    if (size <= 0) return Drop(link, /*is_orderly=*/false, "");
    if (!Decode(bytes, size, &message, &text)) {
      // The peer does not run our code, and must not wait for an answer.
      shutdown(link.socket.get(), SHUT_RDWR);
      return Drop(link, /*is_orderly=*/false, "");
    }
    // The buffer has space for the descriptor, so the kernel drops the
    // descriptor only if this process may open no more files.
    Status received;
    if (fd.get() < 0 && (header.msg_flags & MSG_CTRUNC)) {
      errno = EMFILE;
      received = SystemError("cannot receive a peer's shared memory");
    }
    Handle(link, message, text, fd, received);
  }
}

void Peers::Handle(Link& link, const Message& message, const std::string& text,
                   const Fd& fd, const Status& received) {
  switch (message.type) {
    case Message::kSegment: {
      Mapping memory;
      Status mapped = received.ok() ? Mapping::OpenPeer(fd, &memory) : received;
      if (mapped.ok()) {
        link.segments.emplace(message.segment, std::move(memory));
      } else {
        link.mapped = std::move(mapped);  // posts in this segment fail
      }
      return;
    }
    case Message::kPost: {
      auto found = link.segments.find(message.segment);
      return callbacks_.on_post(
          link.process, message, text,
          found == link.segments.end() ? nullptr : &found->second, link.mapped);
    }
    case Message::kRelease:
      segments_.Release(link.process, message.segment);
      return;
    case Message::kFail:
      return callbacks_.on_fail(message, text);
    case Message::kBye:
      return Drop(link, /*is_orderly=*/true, text);
  }
}

void Peers::Drop(Link& link, bool is_orderly, const std::string& its_reason) {
  if (std::exchange(link.has_left, true)) return;
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, link.socket.get(), nullptr);
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, ends_[link.process].get(), nullptr);
  shutdown(link.socket.get(), SHUT_WR);  // TrySend then drops all messages
  {
    MutexLock lock(link.mutex);
    link.queue.clear();
  }
  callbacks_.on_leave(link.process, is_orderly, its_reason);
}

}  // namespace ep::host
