// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/nccl/stamps.h"

#include <numeric>

namespace ep::nccl {

Status Stamps::Start(const std::string& path) {
  const int64_t counts = 2 * sizes_.num_local() * sizeof(int32_t);
  EP_RETURN_IF_ERROR(device_->AllocateRing(kRing * (sizeof(Stamp) + counts)));
  return trace_.Start(path);
}

Stamp* Stamps::StampOf(uint64_t number) const {
  return reinterpret_cast<Stamp*>(device_->ring()) + number % kRing;
}

int32_t* Stamps::CountsOf(uint64_t number) const {
  return reinterpret_cast<int32_t*>(device_->ring() + kRing * sizeof(Stamp)) +
         number % kRing * 2 * sizes_.num_local();
}

void Stamps::Give(Routing* routing) {
  if (!trace_.is_on()) return;
  routing->stamp = StampOf(routing->number);
  routing->stamp_counts = CountsOf(routing->number);
}

void Stamps::Add(TracedOp op, const Routing& routing, int64_t row_bytes) {
  if (!routing.stamp) return;
  Collect(/*all_have=*/false);
  enqueued_.push_back({std::move(op), routing.number, row_bytes});
  if (enqueued_.back().number - enqueued_.front().number < kRing) return;
  enqueued_.pop_front();  // the next op overwrites the oldest stamp
  trace_.Lose();
}

void Stamps::Collect(bool all_have) {
  const Progress progress = device_->ReadProgress();
  while (!enqueued_.empty()) {
    // All kernels of an op have ended once the next op has begun.
    const uint64_t number = enqueued_.front().number;
    const bool has_ended = progress.ended >= number && progress.begun > number;
    if (!all_have && !has_ended) break;
    Keep(std::move(enqueued_.front()));
    enqueued_.pop_front();
  }
}

void Stamps::Keep(Enqueued enqueued) {
  const Stamp& stamp = *StampOf(enqueued.number);
  TracedExchange exchange;
  exchange.ended = stamp.ended * 1e-9;
  exchange.came.assign(sizes_.ep_size, exchange.ended);
  exchange.came[rank_] = stamp.begun * 1e-9;
  exchange.moved.resize(sizes_.ep_size);
  TracedRows& moved = exchange.moved[rank_];
  moved = {stamp.rows, 0, stamp.rows * enqueued.row_bytes, {}};
  if (enqueued.op.op == Op::kPrepare) {
    const int32_t* tokens = CountsOf(enqueued.number);
    const int32_t* dropped = tokens + sizes_.num_local();
    moved.tokens.assign(tokens, dropped);
    moved.dropped =
        std::accumulate(dropped, dropped + sizes_.num_local(), int64_t{0});
  }
  exchange.op = std::move(enqueued.op);
  trace_.Add(std::move(exchange), /*waited=*/0);
}

Status Stamps::Stop() {
  enqueued_.clear();
  return trace_.Stop();
}

}  // namespace ep::nccl
