// SPDX-License-Identifier: Apache-2.0

// Ranks of the host backend in separate processes, which may die. The parent
// forks all processes while it has a single thread.

#ifndef EP_FFI_BACKENDS_HOST_TESTING_PROCESSES_H_
#define EP_FFI_BACKENDS_HOST_TESTING_PROCESSES_H_

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ep_ffi/backends/host/transport/fd.h"
#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/status.h"
#include "ep_ffi/testing/ranks.h"

namespace ep::host {

inline constexpr int32_t kNumRanks = 4;
inline constexpr int64_t kNumOps = 5;

// Ways in which a process terminates without a message to its peers.
enum class Way { kKill, kCrash, kExit };
inline constexpr Way kWays[] = {Way::kKill, Way::kCrash, Way::kExit};

// A divisor for the number of repetitions, since sanitizers are slow.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr int kFewer = 10;
#else
inline constexpr int kFewer = 1;
#endif

// Waits until `holds` returns true. Returns false after `seconds`.
bool WaitFor(double seconds, const std::function<bool()>& holds);

size_t CountEntries(const char* folder);

// Returns the lines of a file that contain a word.
std::string Lines(const std::string& path, const std::string& word);

// The progress of a rank, in memory that all ranks and the test share.
struct Record {
  std::atomic<pid_t> pid;
  std::atomic<int64_t> joined;     // number of groups
  std::atomic<int64_t> posted;     // number of ops, in all groups
  std::atomic<int64_t> completed;  // number of completed ops
  std::atomic<double> died;        // time of death, or 0
  std::atomic<double> failed;      // time of the first failure, or 0
};
using Records = std::array<Record, kNumRanks>;

// A rank in a separate process. The rank runs training steps (all ops in order)
// on inputs that every rank knows, and compares the results bit for bit.
class Rank {
 public:
  // Takes sockets to the other ranks, for a group of all ranks and for a group
  // of some.
  Rank(int32_t rank, Records* records, std::vector<Fd> for_all,
       std::vector<Fd> for_some);

  int32_t rank() const { return rank_; }
  Records& records() { return *records_; }
  Record& record() { return (*records_)[rank_]; }
  // Returns the first error since Bootstrap.
  const Status& status() const { return status_; }

  // Bootstraps a group of `members`, by default of all ranks. A rank can do
  // both once.
  void Bootstrap(double timeout_s, std::vector<int32_t> members = {});
  // Posts the next op and waits for it. Does nothing after a failure.
  void Next();
  void Post();
  void Wait();
  // Forgets a failure, and skips the rest of the step (one run) that failed.
  void NextStep();
  // Returns the number of ops that this rank has posted to the group.
  int64_t num_posts() const { return num_posts_; }
  // Posts an op after ep_prepare, in any run and position.
  testing::StepPtr Post(Op op, testing::Place place);
  // Closes and destroys the group. Returns the message of status().
  std::string Abandon();
  // Does the same as Abandon, and expects that no segment stays mapped.
  std::string Close();

  // Waits until `holds` is true for all ranks except `but` (-1: for all). Fails
  // the test at the deadline.
  void WaitForOthers(int32_t but,
                     const std::function<bool(const Record&)>& holds);
  [[noreturn]] void Die(Way way);

 private:
  const int32_t rank_;
  Records* const records_;
  std::vector<Fd> for_all_, for_some_;

  int32_t index_ = 0;       // in the group
  testing::Domain domain_;  // has only this rank's group
  int64_t num_posts_ = 0;
  testing::StepPtr step_;  // posted last
  std::vector<std::byte> mem_;
  Status status_;
};

// The outcome of a rank: the result of `body`, and the status from waitpid.
struct Ending {
  std::string said;
  int status;
};

// Expects that all ranks exited with 0 and reported no error.
void ExpectNothingSaid(const std::vector<Ending>& endings);

// The ranks of one test.
struct Job {
  Job();
  ~Job();
  // Runs `body` for every rank in a separate process. Returns the outcome of
  // each rank. Kills a rank that takes too long.
  std::vector<Ending> Run(const std::function<std::string(Rank&)>& body);

  Records* const records;  // shared by all processes
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_TESTING_PROCESSES_H_
