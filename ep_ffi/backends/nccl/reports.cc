// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/nccl/reports.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "ep_ffi/core/faults.h"

namespace ep::nccl {

void Reports::Begin(Routing* routing) {
  routing->ticket = ++last_ticket_;
  routing->report = device_->report(routing->ticket % kWindow);
}

void Reports::Add(const std::string& op, const Layer& layer, CUstream stream) {
  prepares_.push_back({last_ticket_, op, layer.top_k, layer.capacity, stream});
}

bool Reports::TakeOldest(Watchdog& watchdog, Status* out) {
  const Prepare oldest = std::move(prepares_.front());
  prepares_.pop_front();
  Outcome outcome;
  std::string stuck;
  while (
      !device_->TakeReport(oldest.ticket % kWindow, oldest.ticket, &outcome)) {
    *out = device_->FindFailure(oldest.stream);
    if (!out->ok()) return false;
    if (watchdog.IsStuck(&stuck)) {
      *out = Status(
          Code::kDeadlineExceeded,
          StrCat(oldest.op,
                 " did not run, because this rank has waited "
                 "timeout_s = ",
                 watchdog.timeout_s(), " s in ", stuck,
                 "; look for a rank that failed or runs another program"));
      return false;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  *out = ToStatus(outcome, oldest);
  return true;
}

int32_t Reports::NumberOf(const std::string& op) {
  const size_t number =
      std::find(numbered_ops_.begin(), numbered_ops_.end(), op) -
      numbered_ops_.begin();
  if (number == numbered_ops_.size()) numbered_ops_.push_back(op);
  return number;
}

Status Reports::TakeShared() {
  Outcome outcome;
  if (!device_->TakeReport(kShared, /*ticket=*/1, &outcome)) return Status();
  return ToStatus(outcome, Prepare());
}

Status Reports::ToStatus(const Outcome& outcome, const Prepare& prepare) const {
  const int64_t token = outcome.choice / std::max(prepare.top_k, int64_t{1});
  const int64_t k = outcome.choice - token * prepare.top_k;
  const auto on_rank = [&](const Status& status) {
    return Status(status.code(), StrCat(prepare.op, ", rank ", outcome.rank,
                                        ": ", status.message()));
  };
  switch (outcome.fault) {
    case Fault::kNone:
      return Status();
    case Fault::kIdOutOfRange:
      return on_rank(IdOutOfRange(token, k, outcome.value, sizes_.num_experts));
    case Fault::kRepeatedId:
      return on_rank(RepeatedId(token, k, outcome.value));
    case Fault::kOtherPlace:
      return on_rank(OtherPlace(outcome.value,
                                PlaceIndex(sizes_, domain_, outcome.rank),
                                sizes_.ep_size));
    case Fault::kOverflow: {
      const Status status =  // its message names the rank
          Overflow(outcome.rank, outcome.value, prepare.capacity);
      return Status(status.code(), StrCat(prepare.op, ": ", status.message()));
    }
    case Fault::kDisagreement:
      return Status(Code::kFailedPrecondition,
                    StrCat(prepare.op, ": rank 0 and rank ", outcome.rank,
                           " disagree on the op, its layer or its sizes, or on "
                           "the ops since the ep_prepare before; run the same "
                           "program on all ranks, and launch the programs of "
                           "one group from one thread"));
    case Fault::kForeignHandle:
      return Status(Code::kInvalidArgument,
                    StrCat("rank ", outcome.rank,
                           ": handle.mem is not what ep_prepare returned for "
                           "this layer on this rank; pass handles on as they "
                           "are"));
    case Fault::kNotFinite:
      return Status(
          Code::kInvalidArgument,
          StrCat(numbered_ops_[outcome.op], ", rank ", outcome.rank, ": out[",
                 outcome.choice, ", ", outcome.value, "] is not finite"));
  }
  return Status(Code::kInternal, "an unknown fault");
}

}  // namespace ep::nccl
