// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/engine/batch.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "ep_ffi/core/denormals.h"
#include "ep_ffi/core/faults.h"

namespace ep::host {
namespace {

// For fewer bytes, waking another thread takes longer than the work.
constexpr int64_t kBytesPerHelper = 32 << 10;

}  // namespace

Batch::Batch(ExchangePtr exchange) : exchange_(std::move(exchange)) {
  for (const Part& part : exchange_->parts) {
    const Contribution& c = part.contribution;
    arrays_.push_back(c.arrays);
    num_bytes_ += c.signature.staged_bytes();
    if (!part.done) continue;
    shares_.push_back({&c, num_chunks_});
    num_chunks_ += c.num_chunks;
  }
  num_unfinished_ = num_chunks_;
}

int64_t Batch::NumUsefulThreads(int64_t num_threads) const {
  return std::min({num_threads, std::max<int64_t>(1, num_chunks_),
                   1 + num_bytes_ / kBytesPerHelper});
}

bool Batch::Work() {
  const ScopedFlushDenormals flush;
  bool is_last = num_chunks_ == 0;
  for (int64_t chunk; (chunk = next_.fetch_add(1)) < num_chunks_;) {
    Status s = RunChunk(chunk);
    if (!s.ok()) {
      MutexLock lock(mutex_);
      if (status_.ok()) {
        status_ =
            Status(s.code(), StrCat(exchange_->OpName(), ": ", s.message()));
      }
    }
    is_last = num_unfinished_.fetch_sub(1) == 1;
  }
  return is_last;
}

Status Batch::RunChunk(int64_t chunk) const {
  const auto next = std::upper_bound(
      shares_.begin(), shares_.end(), chunk,
      [](int64_t c, const Share& share) { return c < share.first_chunk; });
  const Share& share = *std::prev(next);
  try {
    return share.contribution->run(arrays_, chunk - share.first_chunk);
  } catch (const std::exception& e) {  // XLA's threads would not catch it
    return NoMemory(e);
  }
}

Status Batch::status() {
  MutexLock lock(mutex_);
  return status_;
}

}  // namespace ep::host
