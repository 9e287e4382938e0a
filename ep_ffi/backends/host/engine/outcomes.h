// SPDX-License-Identifier: Apache-2.0

// Records why runs and processes ended, and why the group did. Answers one
// question: can a post still arrive, and if not, why?
//
//   a run        continues, or has failed
//   a process    is alive, has closed its group, or has died
//   this group   is open; or has lost a process that died, and completes only
//                exchanges that have begun; or is closed
//
// States only advance in this order. If there are several reasons, the class
// reports the one that caused the others: first the closing of this group, then
// the first death, then the closing of another process.

#ifndef EP_FFI_BACKENDS_HOST_ENGINE_OUTCOMES_H_
#define EP_FFI_BACKENDS_HOST_ENGINE_OUTCOMES_H_

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <utility>

#include "ep_ffi/core/status.h"

namespace ep::host {

// Not thread-safe; the owner's lock guards it.
class Outcomes {
 public:
  // ---- Can a post still arrive? Ok if so, else the reason.

  // A post to this run?
  Status OfRun(int64_t run_id) const;
  // A post to an exchange that has begun?
  const Status& OfGroup() const { return closed_; }
  // The first post of an exchange?
  const Status& OfNewExchange() const {
    return closed_.ok() ? first_death_ : closed_;
  }
  // A post of another process?
  Status OfProcess(int32_t process) const;

  // ---- Events

  // A run fails. Returns false if it has failed before. The class remembers the
  // latest runs only, for the ranks that have not posted yet.
  bool FailRun(int64_t run_id, const Status& status);

  // A process closes its group (`is_orderly`), or dies; `status` is the error.
  // With an orderly close, `its_reason` may report the death of another
  // process, perhaps before this process knows it. Returns the reason for later
  // errors.
  Status Leave(int32_t process, bool is_orderly, const Status& status,
               const std::string& its_reason);

  // This process closes the group.
  void Close(const Status& status) { closed_ = status; }

  // A call of this process completes with an error, which the user sees.
  void ReportError() { is_error_reported_ = true; }
  bool is_error_reported() const { return is_error_reported_; }

  // Returns the reason that this group gives its peers when it closes: the
  // first death, or the error of the last run that lacked a process, or
  // nothing.
  const std::string& LeavingReason() const {
    return (first_death_.ok() ? last_unavailable_ : first_death_).message();
  }

 private:
  std::deque<std::pair<int64_t, Status>> failed_runs_;  // the latest ones
  Status last_unavailable_;         // of the last run that lacked a process
  std::map<int32_t, Status> left_;  // the processes that closed or died
  Status first_death_;
  Status closed_;
  bool is_error_reported_ = false;
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_ENGINE_OUTCOMES_H_
