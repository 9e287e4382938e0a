// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/nccl/fake/communicator.h"

#include <atomic>
#include <chrono>
#include <utility>

#include "ep_ffi/backends/nccl/fake/driver.h"
#include "ep_ffi/backends/nccl/fake/fake.h"

namespace ep::nccl::fake {

namespace {

// More meetings than any clique has.
constexpr uint64_t kManyMeetings = uint64_t{1} << 32;

std::atomic<uint64_t> num_cliques{0};

}  // namespace

Clique::Clique(int size)
    : next_(size, 0),
      aborted_(size, false),
      first_number_(num_cliques++ * kManyMeetings) {}

bool Clique::Meet(int rank, const std::string& purpose, const void* mine,
                  Met* met) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (aborted_[rank]) return false;
  const uint64_t number = next_[rank]++;
  std::shared_ptr<Meeting>& entry = meetings_[number];
  if (!entry) {
    entry = std::make_shared<Meeting>();
    entry->brought.resize(size());
  }
  const std::shared_ptr<Meeting> meeting = entry;
  meeting->purposes[rank] = purpose;
  meeting->brought[rank] = mine;
  if (meeting->purposes.size() == next_.size()) {
    meetings_.erase(number);
    for (const auto& [other, theirs] : meeting->purposes) {
      if (theirs == meeting->purposes[0]) continue;
      RecordViolation(StrCat("rank 0 comes for ", meeting->purposes[0],
                             ", rank ", other, " for ", theirs));
      meeting->failed = true;
      break;
    }
    meeting->over = true;
    changed_.notify_all();
  }
  const bool ended = changed_.wait_for(
      lock, std::chrono::duration<double>(TheMachine().patience_s),
      [&] { return meeting->over || aborted_[rank]; });
  if (!meeting->over) {
    // Whoever still waits must not use what this rank brought.
    meeting->purposes.erase(rank);
    if (ended) return false;
    RecordViolation(StrCat("rank ", rank, " waits in vain with ", purpose));
    meeting->over = meeting->failed = true;
    changed_.notify_all();
  }
  if (met) *met = {first_number_ + number, meeting->brought};
  return !meeting->failed;
}

void Clique::Abort(int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  aborted_[rank] = true;
  changed_.notify_all();
}

ncclResult_t Member::Enqueue(std::shared_ptr<Member> member, Contract& contract,
                             CUstream stream, std::function<void()> task) {
  if (contract.function() == TheMachine().failing &&
      member->device_ == TheMachine().failing_device) {
    return ncclSystemError;
  }
  const auto run = [member, task = std::move(task)] {
    task();
    std::lock_guard<std::mutex> lock(member->mutex_);
    --member->num_tasks_;
  };
  const auto admit = [member, function = contract.function()](CUstream taker) {
    return member->Admit(function, taker);
  };
  return stream->Enqueue({run, admit}) ? ncclSuccess : ncclInvalidUsage;
}

bool Member::Admit(const std::string& function, CUstream stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  Contract contract(function);
  if (!contract.Demand(num_tasks_ == 0 || stream_ == stream,
                       "two streams use a communicator at once")) {
    return false;
  }
  stream_ = stream;
  ++num_tasks_;
  return true;
}

bool Member::IsBusy() {
  std::lock_guard<std::mutex> lock(mutex_);
  return num_tasks_ > 0;
}

}  // namespace ep::nccl::fake
