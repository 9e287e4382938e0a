// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/nccl/ranks.h"

#include <functional>
#include <future>

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
  if (rank) return rank->Join("", static_cast<ncclComm_t>(communicator));
  return Status(Code::kFailedPrecondition,
                StrCat("GPU ", device, " of this process has no rank"));
}

Status NcclRanks::CheckMachine(int64_t num_hosts) {
  return ForEach([&](NcclGroup& rank) { return rank.CheckMachine(num_hosts); });
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
  // Where no thread can start, the call runs in `get`.
  std::vector<std::future<Status>> results;
  for (const Rank& rank : ranks_) {
    results.push_back(std::async(call, std::ref(*rank.group)));
  }
  Status first;
  for (std::future<Status>& result : results) {
    const Status status = result.get();
    if (first.ok()) first = status;
  }
  return first;
}

}  // namespace ep::nccl
