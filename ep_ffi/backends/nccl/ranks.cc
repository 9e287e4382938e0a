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

Status NcclRanks::CheckMachine(int64_t num_hosts) {
  for (const Rank& rank : ranks_) {
    EP_RETURN_IF_ERROR(rank.group->CheckMachine(num_hosts));
  }
  return Status();
}

Status NcclRanks::Open() {
  return ForEach([](NcclGroup& rank) { return rank.Open(); });
}

Status NcclRanks::Check() {
  return ForEach([](NcclGroup& rank) { return rank.Check(); });
}

Status NcclRanks::Close() {
  return ForEach([](NcclGroup& rank) { return rank.Close(); });
}

Status NcclRanks::ForEach(const std::function<Status(NcclGroup&)>& call) const {
  std::vector<Status> statuses(ranks_.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    threads.emplace_back([&, i] { statuses[i] = call(*ranks_[i].group); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Status& status : statuses) EP_RETURN_IF_ERROR(status);
  return Status();
}

}  // namespace ep::nccl
