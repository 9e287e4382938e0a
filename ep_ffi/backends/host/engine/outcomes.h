// SPDX-License-Identifier: Apache-2.0

// Remembers which runs and processes have ended, and the group, and why.
// Answers one question: can a post still come, and if not, why?
//
//   a run        goes on, or has failed
//   a process    is there, has closed its group, or has died
//   this group   is open; or has lost a process that died, and completes only
//                what was begun; or is closed
//
// No state is ever left for an earlier one. If there are several reasons, the
// likely cause of the others is reported: first that this group is closed, then
// the first death, then that a process has closed its group.

#ifndef EP_FFI_BACKENDS_HOST_ENGINE_OUTCOMES_H_
#define EP_FFI_BACKENDS_HOST_ENGINE_OUTCOMES_H_

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <utility>

#include "ep_ffi/core/status.h"

namespace ep::host {

// Not thread-safe: the owner's lock guards it.
class Outcomes {
 public:
  // ---- Can a post still come? Ok if so, else the reason.

  // A post to this run.
  Status OfRun(int64_t run_id) const;
  // A post to an exchange that has begun.
  const Status& OfGroup() const { return closed_; }
  // The first post of an exchange.
  const Status& OfNewExchange() const {
    return closed_.ok() ? first_death_ : closed_;
  }
  // A post of another process.
  Status OfProcess(int32_t process) const;

  // ---- What happens.

  // A run fails. Returns false if it has failed before. Only the latest runs
  // are remembered, for the ranks that are still to post to them.
  bool FailRun(int64_t run_id, const Status& status);

  // A process closes its group (`is_orderly`), or dies, which `status` says. In
  // the first case `its_reason` may tell that another process died, perhaps
  // before that is known here. Returns the reason to give from now on.
  Status Leave(int32_t process, bool is_orderly, const Status& status,
               const std::string& its_reason);

  // This process closes the group.
  void Close(const Status& status) { closed_ = status; }

  // A call of this process completes with an error, so that the user knows.
  void ReportError() { is_error_reported_ = true; }
  bool is_error_reported() const { return is_error_reported_; }

  // Returns why this group can do no more, for the processes that it leaves:
  // the first death, or how the last run ended that lacked a process; empty if
  // there is neither.
  const std::string& LeavingReason() const {
    return (first_death_.ok() ? last_unavailable_ : first_death_).message();
  }

 private:
  std::deque<std::pair<int64_t, Status>> failed_runs_;  // the latest
  Status last_unavailable_;         // of the last run that lacked a process
  std::map<int32_t, Status> left_;  // the processes that closed or died
  Status first_death_;
  Status closed_;
  bool is_error_reported_ = false;
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_ENGINE_OUTCOMES_H_
