// SPDX-License-Identifier: Apache-2.0

// Connections to the other processes of a group on this host.
//
// Each pair of processes has one Unix socket (SOCK_SEQPACKET: whole messages,
// in order), which carries messages (messages.h) and descriptors of segments.
// Python connects the sockets, and knows from the kernel which user and process
// is at the other end (ep/_src/native/sockets.py). What they send is checked: a
// message of a wrong form counts as the sender's death, a wrong value fails the
// run, and neither does other harm (../fuzz).
//
// Rows are in shared memory (segment.h). The socket reports that a peer closes
// the socket or dies; WatchEnd reports a death even if a child of the
// peer's process holds the socket open.
//
// One progress thread per group receives messages. The thread waits only for
// messages and the next tick, and never runs a user's program. Senders never
// wait: if a socket is full, the progress thread sends the message later.

#ifndef EP_FFI_BACKENDS_HOST_TRANSPORT_PEERS_H_
#define EP_FFI_BACKENDS_HOST_TRANSPORT_PEERS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ep_ffi/backends/host/transport/fd.h"
#include "ep_ffi/backends/host/transport/messages.h"
#include "ep_ffi/backends/host/transport/segment.h"
#include "ep_ffi/backends/host/transport/topology.h"
#include "ep_ffi/core/status.h"

namespace ep::host {

// Thread-safe after `Start`: any thread may send. A lock per connection keeps
// the messages in order. Only the progress thread uses received data, which
// needs no lock.
class Peers {
 public:
  // The functions that the progress thread calls.
  struct Callbacks {
    // `memory` is the mapped segment, or null if the segment is unknown or
    // could not be mapped, with the error `mapped`.
    std::function<void(int32_t process, const Message&, const std::string& text,
                       const Mapping* memory, const Status& mapped)>
        on_post;
    std::function<void(const Message&, const std::string& text)> on_fail;
    // A peer died, or closed its group (`is_orderly`), perhaps with a reason.
    std::function<void(int32_t process, bool is_orderly,
                       const std::string& its_reason)>
        on_leave;
    std::function<void()> on_tick;
  };

  // Takes the connected sockets by process; this process has none.
  static Status Create(Topology topology, std::vector<Fd> sockets,
                       double tick_s, std::unique_ptr<Peers>* out);
  // Stops, unless `Stop` was called.
  ~Peers();

  const Topology& topology() const { return topology_; }

  // Begins to receive messages, including messages that were sent before.
  void Start(Callbacks callbacks);
  // Joins the progress thread, which must not call this method. No callback
  // runs afterwards.
  void Stop();

  // Acquires a segment of at least `bytes` for these readers. Announces a new
  // segment to all processes.
  Status Acquire(size_t bytes, const std::vector<int32_t>& readers,
                 Segment** out);
  void SendPost(const std::vector<int32_t>& processes, Message message,
                const std::string& names);
  void SendRelease(int32_t process, uint64_t segment);
  void SendFail(const Launch& launch, const Status& status);
  // Sends kBye. Waits up to a second until all queued messages are sent.
  void SendBye(const std::string& reason);

 private:
  struct Link;

  Peers(Topology topology, double tick_s);
  void Send(Link& link, const Message& message, const std::string& text,
            std::shared_ptr<const Fd> fd = nullptr);
  void Progress();
  void Receive(Link& link);
  // Handles a message. `received` is an error if the descriptor was lost.
  void Handle(Link& link, const Message& message, const std::string& text,
              const Fd& fd, const Status& received);
  // Stops receiving from a peer that has left.
  void Drop(Link& link, bool is_orderly, const std::string& its_reason);

  const Topology topology_;
  const double tick_s_;
  Callbacks callbacks_;
  SegmentPool segments_;
  std::vector<std::unique_ptr<Link>> links_;  // by process; null for this one
  std::vector<Fd> ends_;                      // by process; see WatchEnd
  const Fd epoll_;
  const Fd stop_;  // an eventfd that stops the progress thread
  std::thread progress_;
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_TRANSPORT_PEERS_H_
