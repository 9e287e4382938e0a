// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/nccl/ranks.h"

#include <thread>

namespace ep::nccl {

NcclGroup* NcclRanks::OnDevice(int32_t device) {
  if (ranks_.size() == 1) return &first();
  for (const Rank& rank : ranks_) {
    if (rank.device == device) return rank.group.get();
  }
  return nullptr;
}

Status NcclRanks::Connect(int32_t device, void* communicator) {
  NcclGroup* const rank = OnDevice(device);
  if (rank) return rank->Borrow(communicator);
  return Status(Code::kFailedPrecondition,
                StrCat("GPU ", device, " of this process has no rank"));
}

Status NcclRanks::StartTrace(const std::string& path) {
  if (ranks_.size() == 1) return first().StartTrace(path);
  return Status(Code::kInvalidArgument,
                "a process with several GPUs has no trace; start a process for "
                "each GPU");
}

Status NcclRanks::Check() {
  Status first_failure;
  for (const Rank& rank : ranks_) {
    const Status status = rank.group->Check();
    if (first_failure.ok()) first_failure = status;
  }
  return first_failure;
}

// Closes the ranks in parallel, because disconnecting is collective.
Status NcclRanks::Close() {
  std::vector<std::thread> threads;
  for (const Rank& rank : ranks_) {
    threads.emplace_back([&rank] { (void)rank.group->Close(); });
  }
  for (std::thread& thread : threads) thread.join();
  return Status();
}

}  // namespace ep::nccl
