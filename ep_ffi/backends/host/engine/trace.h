// SPDX-License-Identifier: Apache-2.0

// Keeps the times and the rows of each exchange of a group, and writes them to
// a file.
//
// A trace that is off costs a post one relaxed load, and the making of a
// function that is not called.

#ifndef EP_FFI_BACKENDS_HOST_ENGINE_TRACE_H_
#define EP_FFI_BACKENDS_HOST_ENGINE_TRACE_H_

#include <atomic>
#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "ep_ffi/backends/host/engine/pending.h"
#include "ep_ffi/backends/host/topology.h"
#include "ep_ffi/core/clock.h"
#include "ep_ffi/core/mutex.h"
#include "ep_ffi/core/status.h"

namespace ep::host {

// Thread-safe.
class Trace {
 public:
  // Creates the file with a line of JSON about this process, and keeps
  // exchanges from now on. Fails if it is on, or the file cannot be created.
  Status Start(const std::string& path, const Topology& topology)
      EP_EXCLUDES(mutex_);

  // Returns the time if the trace is on, else 0.
  double Time() const {
    return is_on_.load(std::memory_order_relaxed) ? Now() : 0;
  }

  // Keeps an exchange whose rows have been moved, unless the trace was off when
  // one of its posts came. Once it has kKept exchanges, it counts the others.
  void Add(const Exchange& exchange) EP_EXCLUDES(mutex_);

  // Returns the seconds for which local ranks have waited, from their posts to
  // the last one, in all exchanges that were added; a sum over ranks.
  double Waited() EP_EXCLUDES(mutex_);

  // Writes a line about an op that has failed because of `ranks` of a domain,
  // which have not posted, or (`are_absent` is false) not what most ranks have;
  // it follows what was kept before, because the process may end without a
  // Stop. No effect if the trace is off, or has kFailed of them.
  struct Failure {
    PostedOp op;
    int32_t domain;
    std::vector<int32_t> ranks;
    bool are_absent;
  };
  void Fail(const Failure& failure, const Status& status) EP_EXCLUDES(mutex_);

  // Keeps no more, and writes a line for each exchange that was kept, and a
  // last one about those that were not. Times are seconds of this process's
  // clock, as lists by rank. A rank of another process came when its post was
  // seen here. No effect if the trace is off.
  Status Stop() EP_EXCLUDES(mutex_);

 private:
  static constexpr int64_t kKept = 1 << 18;
  static constexpr int64_t kFailed = 64;

  struct Event {
    int32_t domain;
    PostedOp op;
    double began, ended;
    std::vector<double> came;  // by rank
    std::vector<Moved> moved;  // by rank; of remote ranks, -1
  };

  // Moves what was kept to the file.
  void Write() EP_REQUIRES(mutex_);

  std::atomic<bool> is_on_{false};
  Mutex mutex_;
  std::vector<Event> events_ EP_GUARDED_BY(mutex_);
  int64_t num_added_ EP_GUARDED_BY(mutex_) = 0;
  int64_t num_failed_ EP_GUARDED_BY(mutex_) = 0;
  double waited_ EP_GUARDED_BY(mutex_) = 0;
  std::string path_ EP_GUARDED_BY(mutex_);
  std::ofstream file_ EP_GUARDED_BY(mutex_);
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_ENGINE_TRACE_H_
