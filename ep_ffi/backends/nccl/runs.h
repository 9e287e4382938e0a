// SPDX-License-Identifier: Apache-2.0

#ifndef EP_FFI_BACKENDS_NCCL_RUNS_H_
#define EP_FFI_BACKENDS_NCCL_RUNS_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>

#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/status.h"

namespace ep::nccl {

// Detects runs that interleave on this rank. A run is one launch of a program.
//
// If two threads launch programs of one group, the ops of two runs may
// interleave, in different orders on different ranks. Their kernels would then
// wait for one another indefinitely, or exchange the rows of different ops.
//
// This class detects a run that continues after an op of another run. If ranks
// launch two whole runs in different orders, the next ep_prepare detects it.
//
// Not thread-safe.
class Runs {
 public:
  // Records that the call's op is enqueued next. Sets `step`, the number of
  // earlier runs of the program. Fails if another run interrupted this run.
  Status Enter(const Call& call, int64_t* step);

 private:
  // The number of runs to remember.
  static constexpr size_t kWindow = 64;

  struct Run {
    int64_t id;
    std::string program;
    int64_t position, clone;  // of the first op of `program` in this run
    int64_t step;
  };

  // Returns whether an op with the id and program of `run` belongs to another
  // run. JAX numbers the runs of an executable from a hash of its text. If JAX
  // compiles a program twice, runs of both executables have the same ids, but
  // begin with different copies of one op.
  static bool IsOther(const Run& run, const Site& site) {
    return run.position == site.position && run.clone != site.clone;
  }

  // Latest first. A run has an entry for each exported program that it calls.
  std::deque<Run> runs_;
  std::map<std::string, int64_t> num_runs_;  // runs by program
};

}  // namespace ep::nccl

#endif  // EP_FFI_BACKENDS_NCCL_RUNS_H_
