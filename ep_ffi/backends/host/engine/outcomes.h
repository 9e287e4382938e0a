// SPDX-License-Identifier: Apache-2.0

// Records failed runs, processes that left, and the closing of this group.
// Answers one question: can a post still arrive, and if not, why?
//
//   a run        continues, or has failed
//   a process    is alive, has closed its group, or has died
//   this group   is open; or has lost a process that died, and completes only
//                exchanges that have begun; or is closed
//
// States only advance in this order. Of several reasons, the class reports the
// root cause: the closing of this group, else the first death, else the closing
// of another process.

#ifndef EP_FFI_BACKENDS_HOST_ENGINE_OUTCOMES_H_
#define EP_FFI_BACKENDS_HOST_ENGINE_OUTCOMES_H_

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <utility>

#include "ep_ffi/core/status.h"

namespace ep::host {

// Not thread-safe; the owner's lock guards this object.
class Outcomes {
 public:
  // ---- Whether a post can still arrive

  // Returns Ok if a post to this run can still arrive, else the reason.
  Status OfRun(int64_t run_id) const;
  // Returns Ok if a post to a begun exchange can still arrive, else the reason.
  const Status& OfGroup() const { return closed_; }
  // Returns Ok if a new exchange can still begin, else the reason.
  const Status& OfNewExchange() const {
    return closed_.ok() ? first_death_ : closed_;
  }
  // Returns Ok if a post of another process can still arrive, else the reason.
  Status OfProcess(int32_t process) const;

  // ---- Events

  // Records a failed run. Returns false if the run has failed before. Remembers
  // only the latest failed runs, for ranks that post to them later.
  bool FailRun(int64_t run_id, const Status& status);

  // Records that a process closed its group (`is_orderly`) or died, with the
  // error `status`. A process that closes may report in `its_reason` that
  // another process died, which this process may not know yet. Returns the
  // reason for later errors.
  Status Leave(int32_t process, bool is_orderly, const Status& status,
               const std::string& its_reason);

  // Records that this process closes the group.
  void Close(const Status& status) { closed_ = status; }

  // Records that the user sees an error, because a call of this process fails.
  void ReportError() { is_error_reported_ = true; }
  bool is_error_reported() const { return is_error_reported_; }

  // Returns the reason that this group sends to its peers when it closes: the
  // first death, else the error of the last run that lacked a process, else "".
  const std::string& LeavingReason() const {
    return (first_death_.ok() ? last_unavailable_ : first_death_).message();
  }

 private:
  std::deque<std::pair<int64_t, Status>> failed_runs_;  // most recent last
  Status last_unavailable_;         // of the last run that lacked a process
  std::map<int32_t, Status> left_;  // the processes that closed or died
  Status first_death_;
  Status closed_;
  bool is_error_reported_ = false;
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_ENGINE_OUTCOMES_H_
