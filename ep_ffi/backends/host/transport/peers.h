// SPDX-License-Identifier: Apache-2.0

// Connections to the other processes of a group on this host.
//
// Control goes over one Unix socket per pair of processes (SOCK_SEQPACKET:
// whole messages, in order); rows go through shared memory (segment.h). A
// socket carries the descriptors of segments, and tells when its peer closes it
// or dies. Where a child of the peer's process holds the socket open, the end
// of that process is seen itself (process_watch.h). The messages are in wire.h.
//
// One progress thread per group receives. It never waits for anything but
// messages and the next tick, and never runs a user's program. Senders do not
// wait either: what a socket does not take is queued for that thread.

#ifndef EP_FFI_BACKENDS_HOST_TRANSPORT_PEERS_H_
#define EP_FFI_BACKENDS_HOST_TRANSPORT_PEERS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ep_ffi/backends/host/topology.h"
#include "ep_ffi/backends/host/transport/fd.h"
#include "ep_ffi/backends/host/transport/process_watch.h"
#include "ep_ffi/backends/host/transport/segment.h"
#include "ep_ffi/backends/host/transport/messages.h"
#include "ep_ffi/core/status.h"

namespace ep::host {

// Thread-safe after `Start`: any thread may send. A lock per connection keeps
// the order of its messages. What is received belongs to the progress thread
// alone and needs no lock.
class Peers {
 public:
  // Called on the progress thread.
  struct Callbacks {
    // `memory` is the mapped segment. It is null if there is none, or if it
    // could not be mapped, for the reason in `mapped`.
    std::function<void(int32_t process, const Message&, const std::string& text,
                       const Mapping* memory, const Status& mapped)>
        on_post;
    std::function<void(const Message&, const std::string& text)> on_fail;
    // A peer closed its group (`is_orderly`), with a reason if it had one, or
    // died.
    std::function<void(int32_t process, bool is_orderly,
                       const std::string& its_reason)>
        on_leave;
    std::function<void()> on_tick;
  };

  // Connects every pair of processes. `listener` is as for Handshake.
  static Status Connect(Topology topology, int listener, double timeout_s,
                        double tick_s, std::unique_ptr<Peers>* out);
  // Waits for the progress thread, and so must not be called on it.
  ~Peers();

  const Topology& topology() const { return topology_; }
  // The segments of this process, as long as this object lives.
  std::weak_ptr<SegmentPool> segments() const { return segments_; }

  // Begins to receive. What peers sent before waits in the sockets.
  void Start(Callbacks callbacks);

  // Finds a segment of at least `bytes`, which all processes know and these
  // will read.
  Status Acquire(size_t bytes, const std::vector<int32_t>& readers,
                 Segment** out);
  void SendPost(const std::vector<int32_t>& processes, Message message,
                const std::string& names);
  void SendRelease(int32_t process, uint64_t segment);
  void SendFail(const Launch& launch, const Status& status);
  // Sends the last message, and waits a moment for those still queued.
  void SendBye(const std::string& reason);

 private:
  struct Link;

  Peers(Topology topology, double tick_s);
  void Send(Link& link, const Message& message, const std::string& text,
            std::shared_ptr<const Fd> fd = nullptr);
  void Progress();
  // Receives all that has arrived.
  void Receive(Link& link);
  // Acts on a message. `received` is why `fd` is empty if it should not be.
  void Handle(Link& link, const Message& message, const std::string& text,
              const Fd& fd, const Status& received);
  // Stops receiving from a peer that has left.
  void Drop(Link& link, bool is_orderly, const std::string& its_reason);

  const Topology topology_;
  const double tick_s_;
  Callbacks callbacks_;
  const std::shared_ptr<SegmentPool> segments_;
  std::vector<std::unique_ptr<Link>> links_;  // by process; null for this one
  std::vector<ProcessWatch> watches_;         // by process
  const Fd epoll_;
  const Fd stop_;  // eventfd that ends the progress thread
  std::thread progress_;
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_TRANSPORT_PEERS_H_
