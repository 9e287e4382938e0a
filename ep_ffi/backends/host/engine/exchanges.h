// SPDX-License-Identifier: Apache-2.0

// Matches the posts of the ranks of an EP domain, and runs the ops.
//
// Every op is an exchange. A rank *posts* a job: rows that its peers may read,
// and work to run after all peers have posted. The last post completes the
// exchange. Then the job of each local rank reads the rows of its peers. After
// all local jobs, the engine completes the calls of all local ranks: until
// then, a local peer may read their buffers.
//
//   same process       peers read the operand buffers: one copy
//   another process    the poster copies its rows to a shared segment, and
//                      completes without waiting for the readers
//
// A post never waits. XLA:CPU runs the ready ops of a program in any order, and
// a handler that waited would block a thread that another rank needs.
//
// A failure of one rank fails the *run* (a launch of a program) on all ranks of
// the group: pending exchanges of the run and later posts to the run fail with
// the same message. Other runs continue. After a peer has died, or the group
// was closed, no new exchange can begin.
//
// This file determines the order of events. Other files of the engine:
//
//   exchange.h   the posts of an exchange, and the work of a complete exchange
//   pending.h    the exchanges that lack posts, and whether posts can arrive
//   launches.h   the names of launches, which differ between processes
//   report.h     the texts of messages
//   workers.h    the threads that complete calls

#ifndef EP_FFI_BACKENDS_HOST_ENGINE_EXCHANGES_H_
#define EP_FFI_BACKENDS_HOST_ENGINE_EXCHANGES_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "ep_ffi/backends/host/engine/exchange.h"
#include "ep_ffi/backends/host/engine/launches.h"
#include "ep_ffi/backends/host/engine/pending.h"
#include "ep_ffi/backends/host/engine/report.h"
#include "ep_ffi/backends/host/engine/workers.h"
#include "ep_ffi/backends/host/movers/job.h"
#include "ep_ffi/backends/host/transport/peers.h"
#include "ep_ffi/backends/host/transport/topology.h"
#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/mutex.h"
#include "ep_ffi/core/status.h"

namespace ep::host {

// Thread-safe. One lock guards the pending exchanges and the recorded failures.
// So no post misses a failure: either the failure finds the post in a pending
// exchange, or the post finds the recorded failure. No thread holds the lock
// while it sends messages, runs work or completes calls.
class Exchanges : public std::enable_shared_from_this<Exchanges> {
 public:
  struct Options {
    std::string group_name;
    double timeout_s;  // for ranks that wait for peers
    // Called once for each run that fails in this group.
    std::function<void(int64_t run_id, const Status&)> on_run_failed;
    double exit_after_s =
        std::numeric_limits<double>::infinity();  // see OnTick
  };

  static std::shared_ptr<Exchanges> Create(Options options,
                                           std::unique_ptr<Peers> peers);
  // Joins the progress thread, which uses the members, `peers_` included. The
  // unique_ptr of libc++ is already null when it calls ~Peers.
  ~Exchanges() { peers_->Stop(); }

  // Posts the job of a local rank. Calls its `call.done` exactly once.
  void Post(std::shared_ptr<const Job> job);

  // Fails a call that cannot be posted, and its run on all ranks. The error
  // names the op and the rank of the call.
  void FailCall(const Call& call, const Status& reason);

  // Fails a run in this process only, because the run has failed in another
  // process or, if `is_of_other_group`, in another group of this process.
  void FailRunHere(int64_t run_id, const Status& status,
                   bool is_of_other_group = false);

  // Fails all pending exchanges. Returns an error if a peer has run an op that
  // this process has not run, unless a call of this process has already
  // returned an error.
  Status Close();

 private:
  static constexpr int32_t kNoRank = Exchange::kNoRank;

  Exchanges(Options options, std::unique_ptr<Peers> peers);

  const Topology& topology() const { return peers_->topology(); }
  // Returns the index in `topology().members` of a rank.
  int32_t MemberOf(int32_t domain, int32_t rank) const {
    return domain * topology().ep_size + rank;
  }

  // ---- A post

  // Copies the arrays of a local rank to a shared segment, and sends a message
  // to the other processes of the domain.
  Status Announce(const Part& part);
  void OnPost(int32_t process, const Message& message, const std::string& names,
              const Mapping* memory, const Status& mapped);
  // Adds a valid post of another process, when its run id is known here.
  void AddPeers(int32_t domain, int32_t rank, Part part) EP_EXCLUDES(mutex_);
  // Adds a post to its exchange; see Pending::Add.
  Status Add(const Key& key, int32_t rank, Part part, ExchangePtr* complete)
      EP_REQUIRES(mutex_);

  // ---- A complete exchange

  // Runs a complete exchange on this thread and on threads of `executor`, if
  // any. This thread itself may complete the call of the rank `own`.
  void Run(ExchangePtr exchange, Executor* executor, int32_t own);
  // Completes the calls of the local ranks, and releases the peers' segments. A
  // completed call resumes a program, which may block. So this thread completes
  // only the call of `own`, and workers complete the other calls.
  void Finish(const ExchangePtr& exchange, const Status& status,
              int32_t own = kNoRank) EP_EXCLUDES(mutex_);

  // ---- Names of launches, which differ between processes

  // Names a call's op and launch, and records them as the latest post of a
  // member of the topology (kNoRank: none). Returns why no message may be sent.
  Status Begin(const Call& call, int32_t member, PostedOp* op)
      EP_EXCLUDES(mutex_);
  // Calls `act` with this process's run id of a peer's launch. If the run id is
  // unknown, defers `act` until the op runs in this process.
  void WithRunId(const Launch& launch, std::function<void(int64_t)> act)
      EP_EXCLUDES(mutex_);

  // ---- Failures

  // Fails a call that is in no exchange, and fails its run on all ranks.
  void CompleteWithError(const Call& call, const Status& status)
      EP_EXCLUDES(mutex_);
  void FailRunEverywhere(uint64_t site_id, int64_t run_id,
                         const Status& status);
  // Fails exchanges whose missing posts can no longer arrive. Also fails their
  // runs on all ranks, because a rank that fails in one exchange posts to no
  // other exchange of the run.
  void FailAll(const std::vector<ExchangePtr>& exchanges, const Status& reason)
      EP_EXCLUDES(mutex_);
  void OnLeave(int32_t process, bool is_orderly, const std::string& its_reason)
      EP_EXCLUDES(mutex_);
  // Fails exchanges that lack posts after timeout_s, and warns once of an
  // exchange that lacks posts after timeout_s / 3.
  //
  // Terminates the process `exit_after_s` seconds after a run of the group has
  // failed, if the process has neither closed the group nor run another op on
  // each of its devices: a device may wait for a failed rank in an XLA
  // collective.
  void OnTick() EP_EXCLUDES(mutex_);

  const Options options_;
  std::vector<std::vector<int32_t>> readers_of_domain_;  // other processes
  std::vector<std::vector<bool>> is_local_;              // by domain and rank

  Mutex mutex_;
  Pending pending_ EP_GUARDED_BY(mutex_);
  LastPosts last_posts_ EP_GUARDED_BY(mutex_);
  Launches launches_ EP_GUARDED_BY(mutex_);
  // For OnTick: a run's failure, the time to terminate the process, and the
  // local members of the topology that have run no op since the failure.
  Status failure_ EP_GUARDED_BY(mutex_);
  double exit_at_ EP_GUARDED_BY(mutex_) = 0;
  std::set<int32_t> waiting_ EP_GUARDED_BY(mutex_);
  bool has_warned_ EP_GUARDED_BY(mutex_) = false;  // see OnTick
  // Whether the user sees an error, because a call of this process failed.
  bool is_error_reported_ EP_GUARDED_BY(mutex_) = false;

  Workers workers_;
  const std::unique_ptr<Peers> peers_;
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_ENGINE_EXCHANGES_H_
