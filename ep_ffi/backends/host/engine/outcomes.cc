// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/engine/outcomes.h"

#include <cstddef>

namespace ep::host {
namespace {

constexpr size_t kRememberedRuns = 256;

}  // namespace

Status Outcomes::OfRun(int64_t run_id) const {
  for (const auto& [failed, status] : failed_runs_) {
    if (failed == run_id) return status;
  }
  return Status();
}

Status Outcomes::OfProcess(int32_t process) const {
  const auto found = left_.find(process);
  if (found == left_.end()) return Status();
  return first_death_.ok() ? found->second : first_death_;
}

bool Outcomes::FailRun(int64_t run_id, const Status& status) {
  if (!OfRun(run_id).ok()) return false;
  failed_runs_.emplace_back(run_id, status);
  if (failed_runs_.size() > kRememberedRuns) failed_runs_.pop_front();
  if (status.code() == Code::kUnavailable) last_unavailable_ = status;
  return true;
}

Status Outcomes::Leave(int32_t process, bool is_orderly, const Status& status,
                       const std::string& its_reason) {
  left_.emplace(process, status);
  if (first_death_.ok() && !is_orderly) first_death_ = status;
  if (first_death_.ok() && !its_reason.empty()) {
    first_death_ = Status(Code::kUnavailable, its_reason);
  }
  return OfProcess(process);
}

}  // namespace ep::host
