// How the launches of a program are named across processes.
//
// Within a process, XLA's run id names a launch: the fingerprint of the
// program plus a count of its launches. Between processes the fingerprints
// differ more often than one would think, since the text of a program holds
// the source lines that led to it: one process that reaches a step through
// another line (to profile it, say), or that loads it from the persistent
// compilation cache, has other run ids. The count is the same everywhere.
//
// So a process tells its peers the program's name, the run id and the launch's
// number, counted from the first launch that it has seen. A run id that is
// near to those of the own program is taken as it is, since it is exact even
// if the first launches overtook each other; otherwise the number decides.

#ifndef EP_FFI_BACKENDS_HOST_LAUNCHES_H_
#define EP_FFI_BACKENDS_HOST_LAUNCHES_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>

namespace ep::host {

// A launch as its process names it.
struct Launch {
  uint64_t program;
  int64_t run_id;
  int64_t number;
};

class Launches {
 public:
  // Names a launch of this process.
  Launch Name(uint64_t program, int64_t run_id) {
    auto [entry, is_new] = first_.try_emplace(program, run_id);
    entry->second = std::min(entry->second, run_id);
    return {program, run_id, Difference(run_id, entry->second)};
  }

  // The run id here of a peer's launch; none before the program's first
  // launch in this process.
  std::optional<int64_t> RunId(const Launch& launch) const {
    constexpr int64_t kNear = 1 << 20;
    auto entry = first_.find(launch.program);
    if (entry == first_.end()) return std::nullopt;
    const int64_t distance = Difference(launch.run_id, entry->second);
    if (-kNear < distance && distance < kNear) return launch.run_id;
    return Difference(entry->second, Difference(0, launch.number));
  }

 private:
  // Run ids are fingerprints: they wrap around.
  static int64_t Difference(int64_t a, int64_t b) {
    return static_cast<int64_t>(static_cast<uint64_t>(a) -
                                static_cast<uint64_t>(b));
  }

  std::map<uint64_t, int64_t> first_;  // run id, by program
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_LAUNCHES_H_
