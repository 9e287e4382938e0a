// SPDX-License-Identifier: Apache-2.0

// Records the times and row counts of a group's exchanges in this process, and
// writes them to a file. Python writes the first line of the file
// (ep/_src/base/backend.py), and ep/_tools/trace/trace.py merges the files of
// all processes. A trace that is off costs a post and an exchange one relaxed
// atomic load each.

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

// An op in one launch of a program.
struct TracedOp {
  Op op = {};
  std::string layer;
  std::string program;
  uint64_t site = 0;  // see Site::id
  int64_t step = 0;   // the number of earlier launches of the program
  int32_t domain = 0;
};

// The work of one rank in an exchange. In ep_prepare, `rows` counts the rows
// that the rank will receive; in other ops, the slots that the rank writes or
// reads, with padding. All fields are -1 for ranks of other processes.
struct TracedRows {
  int64_t rows = -1;
  int64_t dropped = -1;  // in ep_prepare
  int64_t bytes = -1;
  std::vector<int32_t> tokens;  // in ep_prepare, by local expert
};

// A recorded exchange. Times are in seconds, on the clock of this process or of
// the GPU. Vectors are indexed by rank.
struct TracedExchange {
  TracedOp op;
  std::vector<double> came;     // arrival times; remote ranks: upper bounds
  std::optional<double> began;  // when the last rank arrived; none if unknown
  double ended = 0;
  std::vector<TracedRows> moved;
};

// A failed op. `ranks` lists the absent ranks if `are_absent`, else the ranks
// that disagreed with the majority.
struct TracedFailure {
  TracedOp op;
  std::vector<int32_t> ranks;
  bool are_absent;
};

// Thread-safe.
class Trace {
 public:
  Status Start(const std::string& path) EP_EXCLUDES(mutex_);

  // Returns the time if the trace is on, else 0.
  double Time() const { return is_on() ? Now() : 0; }
  bool is_on() const { return is_on_.load(std::memory_order_relaxed); }

  // Records an exchange; after kKept exchanges, only counts it. `waited` is the
  // total time, in seconds, that ranks of this process waited in the exchange.
  // No effect if the trace is off.
  void Add(TracedExchange exchange, double waited) EP_EXCLUDES(mutex_);

  // Counts an exchange without recording it.
  void Lose() EP_EXCLUDES(mutex_);

  // Returns the total seconds that ranks of this process waited in exchanges.
  double Waited() EP_EXCLUDES(mutex_);

  // Writes all recorded exchanges and a line about a failure, because the
  // process may terminate before Stop. No effect if the trace is off, or after
  // kFailed failures.
  void Fail(const TracedFailure& failure, const Status& status)
      EP_EXCLUDES(mutex_);

  // Writes all recorded exchanges and the number of lost exchanges, and closes
  // the file. No effect if the trace is off.
  Status Stop() EP_EXCLUDES(mutex_);

 private:
  static constexpr int64_t kKept = 1 << 18;
  static constexpr int64_t kFailed = 64;

  // Moves the recorded exchanges to the file.
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
