// SPDX-License-Identifier: Apache-2.0

// One rendezvous of all ranks of an EP domain: the heart of the engine.
//
// Every op is an exchange. A rank *posts* a contribution: rows that its peers
// may read, and the work that it does once all peers have posted. The last
// post, wherever it comes from, makes the exchange ready; then each local
// rank's work pulls from its peers, and when all local work is done all local
// ranks complete (not earlier: a peer may still read their buffers).
//
//   same process       peers read the operand buffers themselves: one copy
//   another process    the poster stages its rows once in a shared segment,
//                      and completes without waiting for the readers
//
// Posting never waits. XLA:CPU runs a program's ready ops in any order, and a
// handler that waited would hold a thread that another rank needs.
//
// Matching. Ops meet by domain, run id, program, position and clone, never by
// arrival. Within a loop the same key recurs, but a rank posts iteration i + 1
// only after i completed, so the oldest exchange that lacks the rank's post is
// the right one.
//
// Failure. Whatever goes wrong on one rank fails the *run* on all ranks of
// the group: pending exchanges of that run end at once, later posts to it
// fail with the same message. Other runs are not touched, except that a dead
// peer or a closed group fails everything.

#ifndef EP_FFI_BACKENDS_HOST_EXCHANGE_H_
#define EP_FFI_BACKENDS_HOST_EXCHANGE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ep_ffi/backends/host/launches.h"
#include "ep_ffi/backends/host/peers.h"
#include "ep_ffi/backends/host/signature.h"
#include "ep_ffi/backends/host/topology.h"
#include "ep_ffi/backends/host/workers.h"
#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/status.h"

namespace ep::host {

// The two arrays that a rank posts; their sizes are in its signature.
struct Table {
  const std::byte* first = nullptr;
  const std::byte* second = nullptr;
};

struct Contribution {
  Signature signature;
  Table table;
  // Copies the table to a segment; only called if another process needs it.
  std::function<void(std::byte* first, std::byte* second)> stage;
  // The work of this rank, in chunks that may run at the same time.
  int64_t num_chunks = 0;
  std::function<Status(const std::vector<Table>& ranks, int64_t chunk)> run;
};

class Exchanges : public std::enable_shared_from_this<Exchanges> {
 public:
  struct Options {
    std::string group_name;
    Topology topology;
    double timeout_s;
    std::function<void(int64_t run_id, const Status&)> on_run_failed;
  };

  static std::shared_ptr<Exchanges> Create(Options options,
                                           std::unique_ptr<Peers> peers);

  // Posts for the rank on `call.device`; `call.done` is called exactly once.
  void Post(const Call& call, int32_t domain, int32_t rank,
            Contribution contribution);

  // Fails the run on all ranks and completes `call`: bad input on this one.
  void Fail(const Call& call, Status status);

  // Fails a run that another group, or another process, knows to have failed.
  void FailRun(int64_t run_id, const Status& status);

  // Ends all that is pending. Fails if a peer has run what this process has
  // not, unless an op has failed, which may be why.
  Status Close();

  HostMemory Memory() { return peers_->Memory(); }

  const Topology& topology() const { return options_.topology; }

 private:
  struct Key {
    int32_t domain;
    uint64_t program;
    int64_t run_id;
    int64_t position;
    int64_t clone;

    auto Tie() const {
      return std::tie(domain, program, run_id, position, clone);
    }
    bool operator<(const Key& other) const { return Tie() < other.Tie(); }
  };

  // What a rank did last, for those who wait for it.
  struct Posted {
    Launch launch;
    std::string text;  // empty: nothing yet; see Names
  };

  // A rank's part of an exchange.
  struct Part {
    bool posted = false;
    std::string text;           // see Names
    Contribution contribution;  // of a remote rank: signature and table only
    // Of a local rank.
    std::function<void(Status)> done;
    // Of a remote rank: what to release.
    int32_t process = -1;
    uint64_t segment = 0;
  };

  struct Exchange {
    Key key;
    std::string what;  // ep_dispatch(layer "moe_3"), for messages
    double deadline;   // of Now(); infinite without a limit
    int32_t missing;
    std::vector<Part> parts;  // by rank
  };
  using ExchangePtr = std::shared_ptr<Exchange>;
  static constexpr int32_t kNoRank = -1;
  struct Batch;

  Exchanges(Options options, std::unique_ptr<Peers> peers);

  // How messages call an op: ep_dispatch(layer "moe_3"), in checked mode with
  // its step, i.e. how often the program was launched before; and, where ranks
  // are compared, with its step and its place.
  struct Names {
    std::string what;
    std::string text;
  };
  Names Describe(const Call& call, const Launch& launch) const;

  // Adds a part. Returns the exchange if it is ready now. Fails, without
  // taking the part, if the run has failed or a peer that is missing is gone.
  Status Add(const Key& key, const std::string& what, Part part, int32_t rank,
             ExchangePtr* ready);
  // Fails an op without an exchange, and its run on all ranks.
  void Refuse(const Call& call, const Status& status);
  // Runs a ready exchange, on the executor's threads too if there are any. The
  // calling thread may complete `own`.
  void Run(ExchangePtr exchange, Executor* executor, int32_t own);
  // Completes the local ranks and releases the peers' segments. Completing
  // resumes a program, which may block: a thread does it for the rank whose
  // handler it runs, or for any if it is a worker.
  void Finish(Exchange& exchange, const Status& status, int32_t own = kNoRank);
  // What a rank reports of a failure that is not its op's own.
  Status Blame(const std::string& what, int32_t domain, int32_t rank,
               const Status& cause) const;
  Status CompareSignatures(const Exchange& exchange) const;
  // Why a rank that this exchange (null: a new one) lacks, other than `rank`,
  // cannot come any more; ok if all can. mutex_ held.
  Status WhyNot(const Exchange* exchange, int32_t domain, int32_t rank) const;

  void Note(int32_t domain, int32_t rank, Posted posted);
  // Stages and announces a local contribution to other processes.
  Status Announce(const Key& key, const Launch& launch, const std::string& text,
                  int32_t rank, const Contribution& c);

  // Takes the pending exchanges for which `match` holds. mutex_ held.
  template <typename Match>
  std::vector<ExchangePtr> Take(Match match);
  // Ends such exchanges, and so their runs, because nobody can come to them any
  // more. A rank that is told will not come to the others of its run.
  template <typename Match>
  void Break(const Status& cause, Match match);

  // Fails a run on all ranks of the group.
  void FailEverywhere(uint64_t program, int64_t run_id, const Status& status);

  // Does `act` with the run id here of a peer's launch: now, or once the
  // program runs here.
  void WithRunId(const Launch& launch, std::function<void(int64_t)> act);
  // Names a launch of this process, and does what waited for it.
  Launch NameLaunch(uint64_t program, int64_t run_id);

  void OnPost(int32_t process, const Message& message, const std::string& text,
              const Mapping* memory, const Status& mapped);
  void OnGone(int32_t process, bool orderly, const std::string& why);
  void OnTick();
  Status Late(const Exchange& exchange) const;  // mutex_ held
  Status Missed() const;                        // mutex_ held

  const Options options_;
  std::vector<std::vector<int32_t>> peers_of_domain_;

  std::mutex mutex_;
  std::map<Key, std::list<ExchangePtr>> pending_;
  std::vector<Posted> last_posts_;  // by member of the topology
  Launches launches_;
  std::map<uint64_t, std::vector<std::function<void()>>> early_;  // by program
  std::deque<std::pair<int64_t, Status>> failed_runs_;            // the latest
  std::atomic<bool> told_{false};   // an op has failed, so the user knows
  Status closed_;                   // not ok once this process closed the group
  Status lost_;                     // how the last run ended that lacked a peer
  Status died_;                     // not ok once a peer died
  std::map<int32_t, Status> gone_;  // by process: died, or closed the group

  Workers workers_;
  std::unique_ptr<Peers> peers_;  // last: its thread uses all of the above
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_EXCHANGE_H_
