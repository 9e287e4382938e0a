// SPDX-License-Identifier: Apache-2.0

// Connections to the other processes of a group on this host.
//
// Control goes over one Unix socket per pair of processes (SOCK_SEQPACKET:
// whole messages, in order); rows go through shared memory (segment.h). A
// socket carries the descriptors of segments, and tells when its peer closes
// it or dies, of whatever; where a child of the peer's holds it open, or there
// is none yet, the peer's process is known (Life). What is said there is in
// wire.h.
//
// One progress thread per group receives. It never waits for anything but
// messages and the next tick, and never runs a user's program. Senders do not
// wait either: what a socket does not take is queued for that thread.

#ifndef EP_FFI_BACKENDS_HOST_PEERS_H_
#define EP_FFI_BACKENDS_HOST_PEERS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ep_ffi/backends/host/handshake.h"
#include "ep_ffi/backends/host/launches.h"
#include "ep_ffi/backends/host/segment.h"
#include "ep_ffi/backends/host/wire.h"
#include "ep_ffi/core/status.h"

namespace ep::host {

class Peers {
 public:
  // Called on the progress thread.
  struct Handlers {
    // `memory` is the mapped segment; null if it could not be mapped, for a
    // reason that `mapped` tells, or if there is none.
    std::function<void(int32_t process, const Message&, const std::string& text,
                       const Mapping* memory, const Status& mapped)>
        on_post;
    std::function<void(const Message&, const std::string& text)> on_fail;
    // A peer closed its group (`orderly`), with a reason if it had one, or
    // died.
    std::function<void(int32_t process, bool orderly, const std::string& why)>
        on_gone;
    std::function<void()> on_tick;
  };

  // Connects every pair of processes.
  static Status Connect(const Handshake::Options& options, double tick_s,
                        std::unique_ptr<Peers>* out);
  ~Peers();

  // Whether the caller is the progress thread, which cannot destroy this.
  bool IsProgressThread() const {
    return std::this_thread::get_id() == progress_.get_id();
  }

  // Begins to receive. What peers sent before waits in the sockets.
  void Start(Handlers handlers);

  // A segment of at least `bytes`, which all processes know, for some to read.
  Status Acquire(size_t bytes, int32_t num_readers, Segment** out);
  HostMemory Memory() { return pool_.Memory(); }  // of its segments
  void SendPost(const std::vector<int32_t>& processes, Message message,
                const std::string& text);
  void SendRelease(int32_t process, uint64_t segment);
  void SendFail(const Launch& launch, const Status& status);
  // The last message; waits a moment for those still queued.
  void SendBye(const std::string& why);

 private:
  struct Link;

  Peers(const Handshake::Options& options, double tick_s);
  void Send(Link& link, const Message& message, const std::string& text,
            std::shared_ptr<const Fd> fd = nullptr);
  void Progress();
  void Receive(Link& link);
  // `received` tells why there is no descriptor, if there should be one.
  void Handle(Link& link, const Message& message, const std::string& text,
              int fd, const Status& received);
  void Drop(Link& link, bool orderly, const std::string& why);

  const double tick_s_;
  Handlers handlers_;
  SegmentPool pool_;
  std::vector<std::unique_ptr<Link>> links_;  // by process; null for this one
  std::vector<Life> lives_;                   // by process
  const Fd epoll_;
  const Fd wake_;  // eventfd that ends the progress thread
  std::thread progress_;
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_PEERS_H_
