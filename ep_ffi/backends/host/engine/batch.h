// SPDX-License-Identifier: Apache-2.0

// The work of a complete exchange: the chunks of all local ranks, which several
// threads may run.

#ifndef EP_FFI_BACKENDS_HOST_ENGINE_BATCH_H_
#define EP_FFI_BACKENDS_HOST_ENGINE_BATCH_H_

#include <atomic>
#include <cstdint>
#include <vector>

#include "ep_ffi/backends/host/engine/pending.h"
#include "ep_ffi/core/mutex.h"
#include "ep_ffi/core/status.h"

namespace ep::host {

// Any number of threads may call `Work` concurrently. `next_` gives each chunk
// to one thread, `num_unfinished_` shows which thread finishes last, and the
// lock guards `status_`, the first failure.
class Batch {
 public:
  explicit Batch(ExchangePtr exchange);

  // Returns the number of threads, 1 to `num_threads`, that speed up the work.
  int64_t NumUsefulThreads(int64_t num_threads) const;

  // Runs chunks until none is left. Returns true to exactly one caller, after
  // all chunks have run. Only this caller may call the methods below.
  bool Work();

  const ExchangePtr& exchange() const { return exchange_; }
  // Returns the first failure, whose message names the op.
  Status status();

 private:
  struct Share {
    const Contribution* contribution;
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

#endif  // EP_FFI_BACKENDS_HOST_ENGINE_BATCH_H_
