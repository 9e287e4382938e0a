// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/engine/exchange.h"

#include <algorithm>
#include <cstddef>
#include <exception>
#include <utility>

#include "ep_ffi/core/denormals.h"
#include "ep_ffi/core/faults.h"

namespace ep::host {
namespace {

// For fewer bytes, waking another thread takes longer than the work.
constexpr int64_t kBytesPerHelper = 32 << 10;

}  // namespace

int32_t Exchange::FirstLocalRank() const {
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    if (parts[rank].job) return static_cast<int32_t>(rank);
  }
  return kNoRank;
}

std::string Exchange::OpName() const {
  const int32_t rank = FirstLocalRank();
  return rank == kNoRank ? "" : parts[rank].op.Name();
}

const Part& Exchange::FirstPost() const {
  return *std::find_if(parts.begin(), parts.end(),
                       [](const Part& part) { return part.is_posted; });
}

Work::Work(ExchangePtr exchange) : exchange_(std::move(exchange)) {
  for (const Part& part : exchange_->parts) {
    arrays_.push_back(part.arrays);
    num_bytes_ += part.signature.staged_bytes();
    if (!part.job) continue;
    shares_.push_back({part.job.get(), num_chunks_});
    num_chunks_ += part.job->num_chunks();
  }
  num_unfinished_ = num_chunks_;
}

int64_t Work::NumUsefulThreads(int64_t num_threads) const {
  return std::min({num_threads, std::max<int64_t>(1, num_chunks_),
                   1 + num_bytes_ / kBytesPerHelper});
}

bool Work::Run() {
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

Status Work::RunChunk(int64_t chunk) const {
  const auto next = std::upper_bound(
      shares_.begin(), shares_.end(), chunk,
      [](int64_t c, const Share& share) { return c < share.first_chunk; });
  const Share& share = *std::prev(next);
  try {
    return share.job->RunChunk(arrays_, chunk - share.first_chunk);
  } catch (const std::exception& e) {  // XLA's threads would not catch it
    return NoMemory(e);
  }
}

Status Work::status() {
  MutexLock lock(mutex_);
  return status_;
}

}  // namespace ep::host
