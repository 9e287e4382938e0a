// SPDX-License-Identifier: Apache-2.0

// Keeps the times and the rows of each exchange of a group in this process, and
// writes them to a file, of which Python has written the first line
// (ep/_src/base/backend.py). ep/_tools/trace/trace.py merges the files of all
// processes.
//
// A trace that is off costs an exchange a relaxed load.

#ifndef EP_FFI_CORE_TRACE_H_
#define EP_FFI_CORE_TRACE_H_

#include <atomic>
#include <cstdint>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/clock.h"
#include "ep_ffi/core/mutex.h"
#include "ep_ffi/core/status.h"

namespace ep {

// An op in a launch of a program.
struct TracedOp {
  Op op = {};
  std::string layer;
  std::string program;
  uint64_t site = 0;  // see Site::id
  int64_t step = 0;   // how often the program was launched before
  int32_t domain = 0;
};

// What a rank has moved. Rows are what ep_prepare found that the rank receives,
// or the slots, with padding, that a mover fills or reads. All are -1 of a rank
// of another process.
struct TracedRows {
  int64_t rows = -1;
  int64_t dropped = -1;  // of ep_prepare
  int64_t bytes = -1;
  std::vector<int32_t> tokens;  // of ep_prepare, by local expert
};

// An exchange. Times are seconds of this process's clock, or this GPU's. Lists
// are by rank.
struct TracedExchange {
  TracedOp op;
  std::vector<double> came;     // of another process's rank: came at the latest
  std::optional<double> began;  // to move rows, when the last rank had come;
                                // none if this process does not know it
  double ended = 0;
  std::vector<TracedRows> moved;
};

// An op that has failed because of `ranks` of its domain, which have not come
// to it, or (`are_absent` is false) not with what most ranks have.
struct TracedFailure {
  TracedOp op;
  std::vector<int32_t> ranks;
  bool are_absent;
};

// Thread-safe.
class Trace {
 public:
  // Opens the file, and keeps exchanges from now on.
  Status Start(const std::string& path) EP_EXCLUDES(mutex_);

  // Returns the time if the trace is on, else 0.
  double Time() const { return is_on() ? Now() : 0; }
  bool is_on() const { return is_on_.load(std::memory_order_relaxed); }

  // Keeps an exchange in which ranks of this process waited `waited` seconds in
  // all. Once it has kKept exchanges, it counts the others. No effect if the
  // trace is off.
  void Add(TracedExchange exchange, double waited) EP_EXCLUDES(mutex_);

  // Counts an exchange that was not kept.
  void Lose() EP_EXCLUDES(mutex_);

  // Returns the seconds that ranks of this process have waited.
  double Waited() EP_EXCLUDES(mutex_);

  // Writes a line about a failure, after what was kept before, because the
  // process may end without a Stop. No effect if the trace is off, or has
  // kFailed of them.
  void Fail(const TracedFailure& failure, const Status& status)
      EP_EXCLUDES(mutex_);

  // Keeps no more, and writes a line for each exchange that was kept, and a
  // last one about those that were not. No effect if the trace is off.
  Status Stop() EP_EXCLUDES(mutex_);

 private:
  static constexpr int64_t kKept = 1 << 18;
  static constexpr int64_t kFailed = 64;

  // Moves what was kept to the file.
  void Write() EP_REQUIRES(mutex_);

  std::atomic<bool> is_on_{false};
  Mutex mutex_;
  std::vector<TracedExchange> kept_ EP_GUARDED_BY(mutex_);
  int64_t num_kept_ EP_GUARDED_BY(mutex_) = 0;
  int64_t num_lost_ EP_GUARDED_BY(mutex_) = 0;
  int64_t num_failed_ EP_GUARDED_BY(mutex_) = 0;
  double waited_ EP_GUARDED_BY(mutex_) = 0;
  std::string path_ EP_GUARDED_BY(mutex_);
  std::ofstream file_ EP_GUARDED_BY(mutex_);
};

}  // namespace ep

#endif  // EP_FFI_CORE_TRACE_H_
