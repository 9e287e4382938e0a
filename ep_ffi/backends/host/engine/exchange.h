// SPDX-License-Identifier: Apache-2.0

// How the ranks of an EP domain meet: the heart of the engine.
//
// Every op is an exchange. A rank *posts* a contribution: rows that its peers
// may read, and the work that it does once all peers have posted. The last
// post, wherever it comes from, completes the exchange; then each local rank's
// work pulls from its peers, and when all local work is done the calls of all
// local ranks complete (not earlier: a peer may still read their buffers).
//
//   same process       peers read the operand buffers themselves: one copy
//   another process    the poster stages its rows once in a shared segment,
//                      and completes without waiting for the readers
//
// Posting never waits. XLA:CPU runs a program's ready ops in any order, and a
// handler that waited would hold a thread that another rank needs.
//
// Whatever goes wrong on one rank fails the *run* on all ranks of the group:
// pending exchanges of that run end at once, later posts to it fail with the
// same message. Other runs are not touched, except that after a peer has died,
// or the group was closed, no exchange can begin.
//
// This file holds the order of events. Its parts:
//
//   pending.h    the exchanges that lack posts, and which a post belongs to
//   outcomes.h   whether a post can still come, and if not, why
//   batch.h      the work of a complete exchange
//   report.h     what messages say
//   peers.h      the other processes

#ifndef EP_FFI_BACKENDS_HOST_ENGINE_EXCHANGE_H_
#define EP_FFI_BACKENDS_HOST_ENGINE_EXCHANGE_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "ep_ffi/backends/host/engine/contribution.h"
#include "ep_ffi/backends/host/engine/launches.h"
#include "ep_ffi/backends/host/engine/outcomes.h"
#include "ep_ffi/backends/host/engine/pending.h"
#include "ep_ffi/backends/host/engine/posted_op.h"
#include "ep_ffi/backends/host/engine/report.h"
#include "ep_ffi/backends/host/engine/workers.h"
#include "ep_ffi/backends/host/topology.h"
#include "ep_ffi/backends/host/transport/peers.h"
#include "ep_ffi/backends/host/transport/shared_text.h"
#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/mutex.h"
#include "ep_ffi/core/status.h"
#include "ep_ffi/core/trace.h"

namespace ep::host {

// Thread-safe. One lock guards all that decides whether a post joins an
// exchange, so that each post either is in a pending exchange, which a failure
// finds, or finds the failure itself. The lock is not held while anything is
// sent, run or completed.
class Exchanges : public std::enable_shared_from_this<Exchanges> {
 public:
  struct Options {
    std::string group_name;
    double timeout_s;
    std::function<void(int64_t run_id, const Status&)> on_run_failed;
    double exit_after_s =
        std::numeric_limits<double>::infinity();  // see OnTick
  };

  static std::shared_ptr<Exchanges> Create(Options options,
                                           std::unique_ptr<Peers> peers);

  // Posts for the rank on `call.device`; `call.done` is called exactly once.
  void Post(const Call& call, int32_t domain, int32_t rank,
            Contribution contribution);

  // Completes a call that cannot be posted with an error, which names its op
  // and rank, and fails its run on all ranks.
  void FailCall(const Call& call, const Status& reason);

  // Fails a run in this process alone: another group, or another process, knows
  // that it has failed.
  void FailRunHere(int64_t run_id, const Status& status);

  // See core/trace.h.
  Status StartTrace(const std::string& path) { return trace_.Start(path); }
  Status StopTrace() { return trace_.Stop(); }
  double Waited() { return trace_.Waited(); }

  // Ends all pending exchanges, and the trace. Fails if a peer has run an op
  // that this process has not, unless an op has failed, which may be the
  // reason.
  Status Close();

 private:
  static constexpr int32_t kNoRank = Exchange::kNoRank;

  Exchanges(Options options, std::unique_ptr<Peers> peers);

  const Topology& topology() const { return peers_->topology(); }

  // ---- A post

  // Stages a local contribution for the other processes of its domain, and
  // tells them.
  Status Announce(const Key& key, const PostedOp& op, int32_t rank,
                  const Contribution& contribution) EP_EXCLUDES(mutex_);
  void OnPost(int32_t process, const Message& message, const std::string& names,
              const Mapping* memory, const Status& mapped);
  // Notes what a rank has posted last.
  void Note(int32_t domain, int32_t rank, const PostedOp& op)
      EP_EXCLUDES(mutex_);
  // Adds a part to its exchange, and returns that if it is complete now. Fails,
  // without taking the part, if the exchange cannot be completed any more.
  Status Add(const Key& key, int32_t rank, Part part, ExchangePtr* complete)
      EP_EXCLUDES(mutex_);
  // Returns why an exchange (null: a new one) that `rank` posts to cannot be
  // completed any more; ok if it can.
  Status WhyNotComplete(const Exchange* exchange, int32_t domain,
                        int32_t rank) const EP_REQUIRES(mutex_);

  // ---- A complete exchange

  // Runs an exchange, also on the executor's threads if there are any. The
  // calling thread may complete the call of the rank `own`.
  void Run(ExchangePtr exchange, Executor* executor, int32_t own);
  // Completes the calls of the local ranks and releases the peers' segments.
  // Completing resumes a program, which may block: a thread does it for the
  // rank whose handler it runs, or for any if it is a worker.
  void Finish(Exchange& exchange, const Status& status, int32_t own = kNoRank)
      EP_EXCLUDES(mutex_);

  // ---- The names of launches, which differ between processes

  // Returns what messages need to name an op, and its launch as NameLaunch.
  PostedOp NameOp(const Call& call) EP_EXCLUDES(mutex_);
  // Returns the name of a launch of this process, after the actions that were
  // deferred until the op at this site ran here.
  Launch NameLaunch(uint64_t site_id, int64_t run_id) EP_EXCLUDES(mutex_);
  // Calls `act` with the run id that a peer's launch has here: now, or once the
  // op has run here.
  void WithRunId(const Launch& launch, std::function<void(int64_t)> act)
      EP_EXCLUDES(mutex_);

  // ---- Failures

  // Completes a call that is in no exchange with an error, and fails its run on
  // all ranks.
  void CompleteWithError(const Call& call, const Status& status)
      EP_EXCLUDES(mutex_);
  // Fails a run in this process and in all others.
  void FailRunEverywhere(uint64_t site_id, int64_t run_id,
                         const Status& status);
  // Keeps an exchange in the trace, unless that was off when a post came.
  void TraceEnd(const Exchange& exchange);
  // Keeps in the trace that an exchange has failed.
  void TraceFailure(const Exchange& exchange, const Status& status);
  // Keeps in the trace that an op has failed because ranks that have not posted
  // (null: any other) have left.
  void TraceLeft(const PostedOp& op, int32_t domain, const Exchange* exchange,
                 const Status& status) EP_REQUIRES(mutex_);
  // Fails the pending exchanges for which `match` holds, and their runs on all
  // ranks, because posts that they lack cannot come any more. (A rank that
  // learns the reason in one exchange comes to no other exchange of its run.)
  template <typename Match>
  void FailPending(const Status& reason, Match match) EP_EXCLUDES(mutex_);
  void OnLeave(int32_t process, bool is_orderly, const std::string& its_reason)
      EP_EXCLUDES(mutex_);
  // Lets other processes read what the group does.
  void Publish() EP_REQUIRES(mutex_);
  // Publishes. Fails what is late, and warns once of an exchange that still
  // lacks posts a third of timeout_s after its first post.
  // Ends the process if a run has failed, `exit_after_s` is over, and the
  // process has neither closed the group nor run another op on each of its
  // devices: one may wait for a failed rank in a collective of XLA.
  void OnTick() EP_EXCLUDES(mutex_);

  const Options options_;
  std::vector<std::vector<int32_t>> readers_of_domain_;  // other processes

  Mutex mutex_;
  Pending pending_ EP_GUARDED_BY(mutex_);
  Outcomes outcomes_ EP_GUARDED_BY(mutex_);
  LastPosts last_posts_ EP_GUARDED_BY(mutex_);
  Launches launches_ EP_GUARDED_BY(mutex_);
  // A failure, the time when the process may end because of it, and the local
  // members of the topology that have run no other op since.
  Status failure_ EP_GUARDED_BY(mutex_);
  double exit_at_ EP_GUARDED_BY(mutex_) = 0;
  std::set<int32_t> waiting_ EP_GUARDED_BY(mutex_);
  bool has_warned_ EP_GUARDED_BY(mutex_) = false;  // see OnTick
  // Actions that wait, by site id, until the op has run here.
  std::map<uint64_t, std::vector<std::function<void()>>> deferred_
      EP_GUARDED_BY(mutex_);

  const double began_at_;
  SharedText progress_ EP_GUARDED_BY(mutex_);
  Trace trace_;
  Workers workers_;
  // The last member: its thread, which its destructor joins, uses all others.
  std::unique_ptr<Peers> peers_;
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_ENGINE_EXCHANGE_H_
