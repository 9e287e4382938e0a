// SPDX-License-Identifier: Apache-2.0

// The exchanges that lack posts, and the reasons why a post can no longer
// arrive.
//
// Posts match by key, never by order of arrival. In a loop a key recurs, but a
// rank posts iteration i + 1 only after iteration i has completed. So a post
// belongs to the oldest exchange of its key that lacks the rank's post.
//
// A post can no longer arrive after one of these states:
//
//   a run        continues, or has failed
//   a process    is alive, has closed its group, or has died
//   this group   is open; or has lost a process that died, and completes only
//                exchanges that have begun; or is closed
//
// States only advance in this order. Of several reasons, the class reports the
// root cause: the closing of this group, else the first death, else the closing
// of another process.

#ifndef EP_FFI_BACKENDS_HOST_ENGINE_PENDING_H_
#define EP_FFI_BACKENDS_HOST_ENGINE_PENDING_H_

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ep_ffi/backends/host/engine/exchange.h"
#include "ep_ffi/backends/host/transport/topology.h"
#include "ep_ffi/core/status.h"

namespace ep::host {

// Not thread-safe; the owner's lock guards this object. The caller owns the
// returned exchanges, which are no longer pending.
class Pending {
 public:
  // The topology outlives this object.
  explicit Pending(const Topology& topology) : topology_(topology) {}

  // Adds a post. Sets `complete` to the exchange if no other post is missing.
  // Returns an error, and does not add the post, if the exchange can no longer
  // complete.
  Status Add(const Key& key, int32_t rank, Part part, ExchangePtr* complete);

  // Returns the exchanges that began by `time`. The exchanges stay pending.
  std::vector<const Exchange*> FindBegunBy(double time) const;

  // ---- Events, after which exchanges can no longer complete

  // Records a failed run. Returns false if the run has failed before. Remembers
  // only the latest failed runs, for ranks that post to them later.
  bool FailRun(int64_t run_id, const Status& status,
               std::vector<ExchangePtr>* failed);

  // Records that a process closed its group (`is_orderly`) or died, with the
  // error `status`. A process that closes may report in `its_reason` that
  // another process died, which this process may not know yet. Returns the
  // reason for later errors.
  Status Leave(int32_t process, bool is_orderly, const Status& status,
               const std::string& its_reason, std::vector<ExchangePtr>* failed);

  // Records that this process closes the group. Returns all exchanges.
  std::vector<ExchangePtr> Close(const Status& status);

  // Returns Ok before `Close`, else its status.
  const Status& closed() const { return closed_; }
  // Returns the reason that this group sends to its peers when it closes: the
  // first death, else the error of the last run that lacked a process, else "".
  const std::string& LeavingReason() const {
    return (first_death_.ok() ? last_unavailable_ : first_death_).message();
  }

 private:
  // Exchanges of equal keys are sorted by their start, the earliest first.
  using Entries = std::multimap<Key, ExchangePtr>;

  // Returns Ok if an exchange (null: a new exchange) can still complete after a
  // post of `rank`, else the reason why not.
  Status WhyNotComplete(const Exchange* exchange, int32_t domain,
                        int32_t rank) const;
  // Returns Ok if a post to this run can still arrive, else the reason.
  Status OfRun(int64_t run_id) const;
  // Returns Ok if a post of this process can still arrive, else the reason.
  Status OfProcess(int32_t process) const;
  // Removes and returns the exchanges for which `match` holds.
  template <typename Match>
  std::vector<ExchangePtr> Take(Match match);

  const Topology& topology_;
  Entries exchanges_;
  std::deque<std::pair<int64_t, Status>> failed_runs_;  // most recent last
  Status last_unavailable_;         // of the last run that lacked a process
  std::map<int32_t, Status> left_;  // the processes that closed or died
  Status first_death_;
  Status closed_;
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_ENGINE_PENDING_H_
