// SPDX-License-Identifier: Apache-2.0

// One exchange: the posts of the ranks of an EP domain, and the work after the
// last post. This file does not depend on processes, messages or failures.

#ifndef EP_FFI_BACKENDS_HOST_ENGINE_EXCHANGE_H_
#define EP_FFI_BACKENDS_HOST_ENGINE_EXCHANGE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "ep_ffi/backends/host/movers/job.h"
#include "ep_ffi/backends/host/transport/messages.h"
#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/mutex.h"
#include "ep_ffi/core/status.h"

namespace ep::host {

// An op that a rank posts, and the launch of the op.
struct PostedOp {
  Op op = {};  // may be invalid in a peer's message
  Launch launch = {};
  int64_t position = 0;     // index of the op in its program
  bool is_checked = false;  // checked mode of the layer; false for peers
  std::string layer;
  std::string program;

  // Returns the name of the op, ep_dispatch(layer "moe_3"). In checked mode,
  // appends the step: the number of earlier launches of the program.
  std::string Name() const { return NameOf(/*with_step=*/is_checked); }
  // Returns name, step, program and position, for comparing ranks.
  std::string FullName() const {
    return StrCat(NameOf(/*with_step=*/true), " of \"", program, "\", op ",
                  position);
  }

 private:
  std::string NameOf(bool with_step) const {
    std::string name = OpName(op, layer);
    if (with_step) name += StrCat(", step ", launch.number);
    return name;
  }
};

// One rank's post in an exchange.
struct Part {
  bool is_posted = false;  // false while the post is missing
  PostedOp op;
  Signature signature;
  Arrays arrays;
  // The job of a local rank, whose call waits; null if the rank is remote.
  std::shared_ptr<const Job> job;
  // A remote segment, which this process releases: its owner and its id.
  int32_t process = -1;
  uint64_t segment = 0;
};

// Identifies an exchange. All iterations of a loop have the same key.
struct Key {
  int32_t domain;
  uint64_t site_id;  // see Site::id
  int64_t run_id;    // of this process

  auto Tie() const { return std::tie(domain, site_id, run_id); }
  bool operator<(const Key& other) const { return Tie() < other.Tie(); }
};

struct Exchange {
  Key key;
  double began_at;  // see Now
  int32_t num_missing;
  std::vector<Part> parts;  // by rank

  static constexpr int32_t kNoRank = -1;
  // Returns the first rank whose call waits in this process, or kNoRank.
  int32_t FirstLocalRank() const;
  // Returns the name of the op that the first local rank posted.
  std::string OpName() const;
  // Returns the post of the first rank that has posted.
  const Part& FirstPost() const;
};
using ExchangePtr = std::shared_ptr<Exchange>;

// The work of a complete exchange: the chunks of the jobs of all local ranks.
//
// Any number of threads may call `Run` concurrently. `next_` gives each chunk
// to one thread, `num_unfinished_` shows which thread finishes last, and the
// lock guards `status_`, the first failure.
class Work {
 public:
  explicit Work(ExchangePtr exchange);

  // Returns the number of threads, 1 to `num_threads`, that speed up the work.
  int64_t NumUsefulThreads(int64_t num_threads) const;

  // Runs chunks until none is left. Returns true to exactly one caller, after
  // all chunks have run. Only this caller may call the methods below.
  bool Run();

  const ExchangePtr& exchange() const { return exchange_; }
  // Returns the first failure, whose message names the op.
  Status status();

 private:
  struct Share {
    const Job* job;
    int64_t first_chunk;
  };
  Status RunChunk(int64_t chunk) const;

  const ExchangePtr exchange_;
  std::vector<Arrays> arrays_;  // by rank
  std::vector<Share> shares_;   // of the local ranks
  int64_t num_chunks_ = 0;
  int64_t num_bytes_ = 0;
  std::atomic<int64_t> next_{0};
  std::atomic<int64_t> num_unfinished_{0};

  Mutex mutex_;
  Status status_ EP_GUARDED_BY(mutex_);
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_ENGINE_EXCHANGE_H_
