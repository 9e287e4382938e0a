// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/nccl/fake/communicator.h"

#include <atomic>
#include <chrono>
#include <utility>

#include "ep_ffi/backends/nccl/fake/driver.h"
#include "ep_ffi/backends/nccl/fake/fake.h"

namespace ep::nccl::fake {

bool Clique::Exchange(int rank, const std::string& purpose, const void* mine,
                      Exchanged* exchanged) {
  MutexLock lock(mutex_);
  if (aborted_[rank]) return false;
  const uint64_t number = next_[rank]++;
  std::shared_ptr<Rendezvous>& entry = pending_[number];
  if (!entry) {
    static std::atomic<uint64_t> last{0};
    entry = std::make_shared<Rendezvous>();
    entry->number = ++last;
    entry->contributions.resize(size());
  }
  const std::shared_ptr<Rendezvous> rendezvous = entry;
  rendezvous->purposes[rank] = purpose;
  rendezvous->contributions[rank] = mine;
  if (rendezvous->purposes.size() == next_.size()) {
    pending_.erase(number);
    for (const auto& [other, theirs] : rendezvous->purposes) {
      if (theirs == rendezvous->purposes[0]) continue;
      RecordViolation(StrCat("rank 0 calls ", rendezvous->purposes[0],
                             ", rank ", other, " calls ", theirs));
      rendezvous->failed = true;
      break;
    }
    rendezvous->done = true;
    changed_.NotifyAll();
  }
  const auto deadline =
      std::chrono::steady_clock::now() +
      std::chrono::duration_cast<std::chrono::steady_clock::duration>(
          std::chrono::duration<double>(TheMachine().timeout_s));
  while (!rendezvous->done && !aborted_[rank] &&
         changed_.WaitUntil(mutex_, deadline)) {
  }
  if (!rendezvous->done) {
    // The ranks that still wait must not use this rank's contribution.
    rendezvous->purposes.erase(rank);
    if (aborted_[rank]) return false;
    RecordViolation(StrCat("rank ", rank, " timed out in ", purpose));
    rendezvous->done = rendezvous->failed = true;
    changed_.NotifyAll();
  }
  if (exchanged) {
    *exchanged = {rendezvous->number, rendezvous->contributions};
  }
  return !rendezvous->failed;
}

void Clique::Abort(int rank) {
  MutexLock lock(mutex_);
  aborted_[rank] = true;
  changed_.NotifyAll();
}

ncclResult_t Member::Enqueue(std::shared_ptr<Member> member, Contract& contract,
                             CUstream stream, std::function<void()> task) {
  if (contract.function() == TheMachine().failing &&
      member->device_ == TheMachine().failing_device) {
    return ncclSystemError;
  }
  {
    MutexLock lock(member->mutex_);
    if (!contract.Require(member->num_tasks_ == 0 || member->stream_ == stream,
                          "two streams use a communicator concurrently")) {
      return ncclInvalidUsage;
    }
    member->stream_ = stream;
    ++member->num_tasks_;
  }
  stream->Enqueue(contract.function(), [member, task = std::move(task)] {
    task();
    MutexLock lock(member->mutex_);
    --member->num_tasks_;
  });
  return ncclSuccess;
}

bool Member::IsBusy() {
  MutexLock lock(mutex_);
  return num_tasks_ > 0;
}

}  // namespace ep::nccl::fake
