// SPDX-License-Identifier: Apache-2.0

// How the launches of a program are named across processes.
//
// Within a process, XLA's run id names a launch: a fingerprint of the program,
// of 32 bits, plus a count of its launches. Between processes the fingerprints
// differ more often than one would think, since the text of a program holds
// the source lines that led to it: one process that reaches a step through
// another line (to profile it, say), or that loads it from the persistent
// compilation cache, has other run ids. The count is the same everywhere.
//
// So a process sends its peers the id of the op's site, the run id and the
// launch's number, counted from the first launch of the op that it has seen. A
// run id that is near to the latest of an executable here is taken as it is,
// since it is exact even if the first launches overtook each other; otherwise
// the number decides. Launches are counted by site and not by module, because
// several executables may be made of one module (by jax.export, or by compiling
// it twice), and each has run ids of its own.

#ifndef EP_FFI_BACKENDS_HOST_ENGINE_LAUNCHES_H_
#define EP_FFI_BACKENDS_HOST_ENGINE_LAUNCHES_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "ep_ffi/backends/host/transport/wire.h"

namespace ep::host {

// Not thread-safe: the owner's lock guards it.
class Launches {
 public:
  // Names a launch of this process.
  Launch Name(uint64_t site_id, int64_t run_id) {
    Note(run_id);
    auto [entry, is_new] = first_.try_emplace(site_id, run_id);
    entry->second = std::min(entry->second, run_id);
    return {site_id, run_id, Difference(run_id, entry->second)};
  }

  // Notes that this process has come to a launch.
  void Reach(const Launch& launch) {
    int64_t& reached = reached_.try_emplace(launch.site_id, -1).first->second;
    reached = std::max(reached, launch.number);
  }
  // Returns whether it has come to this launch, or a later one.
  bool HasReached(const Launch& launch) const {
    auto entry = reached_.find(launch.site_id);
    return entry != reached_.end() && entry->second >= launch.number;
  }

  // Returns the run id that a peer's launch has here, or none if it is not
  // known yet.
  std::optional<int64_t> RunId(const Launch& launch) const {
    if (IsNear(launch.run_id)) return launch.run_id;
    auto entry = first_.find(launch.site_id);
    if (entry == first_.end()) return std::nullopt;
    return Difference(entry->second, Difference(0, launch.number));
  }

 private:
  // Run ids are fingerprints: they wrap around.
  static int64_t Difference(int64_t a, int64_t b) {
    return static_cast<int64_t>(static_cast<uint64_t>(a) -
                                static_cast<uint64_t>(b));
  }

  // Processes are fewer launches apart than this: JAX itself hangs with about
  // 50 in flight. Fingerprints of two programs are nearer to each other than
  // this once in two million pairs.
  static constexpr int64_t kNear = 1 << 10;
  static bool AreNear(int64_t a, int64_t b) {
    const int64_t distance = Difference(a, b);
    return -kNear < distance && distance < kNear;
  }

  // Returns whether the executable with this run id has run in this process.
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

  std::map<uint64_t, int64_t> first_;    // run id, by site
  std::map<uint64_t, int64_t> reached_;  // number of the latest launch, by site
  std::vector<int64_t> latest_;          // the run id, of each executable
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_ENGINE_LAUNCHES_H_
