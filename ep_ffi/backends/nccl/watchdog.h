// SPDX-License-Identifier: Apache-2.0

// A thread that says where a rank waits.
//
// NCCL EP's kernels wait for their peers without a limit, and while they do no
// code of this backend need run: the host may be waiting for a result in XLA.
// Python knows what the other ranks do: it asks each rank for its place in the
// sequence of ops (ep/_src/backends/nccl/peers.py).

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

// Thread-safe.
class Watchdog {
 public:
  // Once the ops of `rank`, a name, have stood still for `timeout_s`, the
  // thread prints a line; after another `exit_after_s` it ends the process.
  Watchdog(std::shared_ptr<const Device> device, std::string rank,
           double timeout_s, double exit_after_s);
  ~Watchdog() { Stop(); }
  // Ends the thread. Idempotent.
  void Stop();

  // Gives the next op its number, under which its kernels count it.
  void Number(Routing* routing);
  // Adds the op that was enqueued with this number. `op` is its name.
  void Add(std::string op);

  // Where this rank stands.
  struct Place {
    int64_t num_ended;
    bool has_begun;    // the op after these
    int64_t num_left;  // ops that were enqueued and have not ended
    double still_s;    // since any of this has changed
    std::string text;  // the rest of a sentence about the rank
  };
  Place FindPlace();
  // Takes a sentence about the other ranks, or "", for what is said from now
  // on.
  void Hear(std::string others);
  std::string heard() const;

 private:
  void Watch();
  // Takes the ops that have ended.
  void Update() EP_REQUIRES(mutex_);
  bool HasBegun() const EP_REQUIRES(mutex_) {
    return progress_.begun > num_added_ - ops_.size();
  }
  // Says what this rank knows of the op at which it stands.
  std::string Describe() const EP_REQUIRES(mutex_);

  const std::shared_ptr<const Device> device_;
  const std::string rank_;
  const double timeout_s_;
  const double exit_after_s_;

  mutable Mutex mutex_;
  CondVar changed_;  // there is an op, or the end has come
  // The names of the ops that have not ended. The last has the number
  // `num_added_`.
  std::deque<std::string> ops_ EP_GUARDED_BY(mutex_);
  uint64_t num_added_ EP_GUARDED_BY(mutex_) = 0;
  std::string last_ended_ EP_GUARDED_BY(mutex_);
  Progress progress_ EP_GUARDED_BY(mutex_) = {};
  double moved_at_ EP_GUARDED_BY(mutex_);
  std::string heard_ EP_GUARDED_BY(mutex_);
  bool is_told_ EP_GUARDED_BY(mutex_) = false;  // since it stands still
  bool is_stopped_ EP_GUARDED_BY(mutex_) = false;

  std::thread thread_;  // the last member: it uses the others
};

}  // namespace ep::nccl

#endif  // EP_FFI_BACKENDS_NCCL_WATCHDOG_H_
