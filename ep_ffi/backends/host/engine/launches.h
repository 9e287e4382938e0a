// SPDX-License-Identifier: Apache-2.0

// Names a program's launches in the same way in all processes.
//
// In one process, XLA's run id names a launch: a 32-bit fingerprint of the
// program, plus the number of the launch. The number is equal in all processes.
// The fingerprint often differs, since it covers source lines: for example, if
// one process calls the step from another line, or loads the program from the
// persistent compilation cache.
//
// So a message contains the site id of the op, the sender's run id, and the
// number of the launch, counted from the first launch that the sender has seen.
// The receiver uses the run id if it is near the latest run id of a local
// executable; this is exact even if the first launches ran out of order.
// Otherwise the receiver uses the number. The number counts by site, not by
// module, because several executables of one module (from jax.export, or from
// two compilations) have separate run ids.

#ifndef EP_FFI_BACKENDS_HOST_ENGINE_LAUNCHES_H_
#define EP_FFI_BACKENDS_HOST_ENGINE_LAUNCHES_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "ep_ffi/backends/host/transport/messages.h"

namespace ep::host {

// Not thread-safe: the owner's lock guards this object.
class Launches {
 public:
  using Actions = std::vector<std::function<void()>>;

  // Names a launch of this process. Sets `due` to the actions that waited for
  // this site, which the caller runs after it has released the lock.
  Launch Name(uint64_t site_id, int64_t run_id, Actions* due) {
    auto node = deferred_.extract(site_id);
    if (!node.empty()) *due = std::move(node.mapped());
    Note(run_id);
    auto [entry, is_new] = first_.try_emplace(site_id, run_id);
    entry->second = std::min(entry->second, run_id);
    return {site_id, run_id, Difference(run_id, entry->second)};
  }

  // Records that this process has begun a launch.
  void Reach(const Launch& launch) {
    int64_t& reached = reached_.try_emplace(launch.site_id, -1).first->second;
    reached = std::max(reached, launch.number);
  }
  // Returns whether this process has begun this launch, or a later one.
  bool HasReached(const Launch& launch) const {
    auto entry = reached_.find(launch.site_id);
    return entry != reached_.end() && entry->second >= launch.number;
  }

  // Returns this process's run id of a peer's launch, or none if unknown.
  std::optional<int64_t> RunId(const Launch& launch) const {
    if (IsNear(launch.run_id)) return launch.run_id;
    auto entry = first_.find(launch.site_id);
    if (entry == first_.end()) return std::nullopt;
    return Difference(entry->second, Difference(0, launch.number));
  }

  // Keeps an action until the next launch of a site.
  void Defer(uint64_t site_id, std::function<void()> action) {
    deferred_[site_id].push_back(std::move(action));
  }

 private:
  // Returns a - b modulo 2^64, since run ids wrap around.
  static int64_t Difference(int64_t a, int64_t b) {
    return static_cast<int64_t>(static_cast<uint64_t>(a) -
                                static_cast<uint64_t>(b));
  }

  // Processes are never this many launches apart: JAX itself hangs with about
  // 50 launches in flight. Only one pair of programs in two million has
  // fingerprints nearer than this bound. If such a pair has other fingerprints
  // on a peer, the op fails on every rank after timeout_s.
  static constexpr int64_t kNear = 1 << 10;
  static bool AreNear(int64_t a, int64_t b) {
    const int64_t distance = Difference(a, b);
    return -kNear < distance && distance < kNear;
  }

  // Returns whether the run id is near the latest run id of an executable here.
  bool IsNear(int64_t run_id) const {
    return std::any_of(latest_.begin(), latest_.end(),
                       [&](int64_t id) { return AreNear(run_id, id); });
  }
  void Note(int64_t run_id) {
    for (int64_t& latest : latest_) {
      if (!AreNear(run_id, latest)) continue;
      if (Difference(run_id, latest) > 0) latest = run_id;
      return;
    }
    latest_.push_back(run_id);
  }

  std::map<uint64_t, int64_t> first_;    // first run id, by site
  std::map<uint64_t, int64_t> reached_;  // number of the latest launch, by site
  std::vector<int64_t> latest_;          // latest run id of each executable
  std::map<uint64_t, Actions> deferred_;  // by site
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_ENGINE_LAUNCHES_H_
