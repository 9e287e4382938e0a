// SPDX-License-Identifier: Apache-2.0

#ifndef EP_FFI_BACKENDS_NCCL_WATCHDOG_H_
#define EP_FFI_BACKENDS_NCCL_WATCHDOG_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <thread>

#include "ep_ffi/backends/nccl/device.h"
#include "ep_ffi/backends/nccl/kernels.h"
#include "ep_ffi/core/mutex.h"

namespace ep::nccl {

// A thread that reports the op in which a rank waits.
//
// NCCL EP's kernels wait for their peers without a timeout. Meanwhile the host
// may wait in XLA for a result, and runs no other code of this backend. Python
// asks each rank for its position in the sequence of ops, and tells every rank
// about the other ranks (ep/_src/backends/nccl/peers.py).
//
// Thread-safe.
class Watchdog {
 public:
  // `rank` is a name for messages. If no op makes progress for `timeout_s`, the
  // thread prints a line, and `exit_after_s` later terminates the process.
  Watchdog(std::shared_ptr<const Device> device, std::string rank,
           double timeout_s, double exit_after_s);
  ~Watchdog() { Stop(); }
  double timeout_s() const { return timeout_s_; }
  // Stops the thread. Idempotent.
  void Stop();

  // Assigns a number to the next op, whose kernels write it to Progress.
  void Number(Routing* routing);
  // Adds the op named `op`, which was enqueued with the number from Number.
  void Add(std::string op);

  // Returns whether an op has waited for other ranks for `timeout_s`, and
  // describes this op in `op`.
  bool IsStuck(std::string* op);

  // The position of this rank in the sequence of its ops.
  struct Place {
    int64_t num_ended;
    bool has_begun;    // whether the op after the ended ops has begun
    int64_t num_left;  // enqueued ops that have not ended
    double still_s;    // seconds since the last progress
    std::string text;  // predicate of a sentence about the rank
  };
  Place FindPlace();
  // Sets the sentence about the other ranks, or "", for later messages.
  void Hear(std::string others);
  std::string heard() const;

 private:
  void Watch();
  // Removes the ops that have ended.
  void Update() EP_REQUIRES(mutex_);
  bool HasBegun() const EP_REQUIRES(mutex_) {
    return progress_.begun > num_added_ - ops_.size();
  }
  // Describes the op in which this rank waits.
  std::string Describe() const EP_REQUIRES(mutex_);

  const std::shared_ptr<const Device> device_;
  const std::string rank_;
  const double timeout_s_;
  const double exit_after_s_;

  mutable Mutex mutex_;
  CondVar changed_;  // an op was added, or the thread must stop
  // The names of the ops that have not ended; the last one is op `num_added_`.
  std::deque<std::string> ops_ EP_GUARDED_BY(mutex_);
  uint64_t num_added_ EP_GUARDED_BY(mutex_) = 0;
  std::string last_ended_ EP_GUARDED_BY(mutex_);
  Progress progress_ EP_GUARDED_BY(mutex_) = {};
  double moved_at_ EP_GUARDED_BY(mutex_);
  std::string heard_ EP_GUARDED_BY(mutex_);
  bool is_told_ EP_GUARDED_BY(mutex_) = false;  // printed since last progress
  bool is_stopped_ EP_GUARDED_BY(mutex_) = false;

  std::thread thread_;  // last, because it uses the other members
};

}  // namespace ep::nccl

#endif  // EP_FFI_BACKENDS_NCCL_WATCHDOG_H_
