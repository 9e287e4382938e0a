// SPDX-License-Identifier: Apache-2.0

// The runs whose ops a rank enqueues: a run is one launch of a program.
//
// If two threads launch programs of one group, the ops of two runs may
// interleave, and in another order on other ranks. Their kernels would then
// wait for one another without end, or exchange the rows of different ops.
//
// A run that goes on after another one is interleaved for certain. Two runs
// that follow one another are not, even if other ranks have them in the other
// order; the next ep_prepare compares the orders (see group.cc).

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

// Not thread-safe: the lock of the group guards it.
class Runs {
 public:
  // Notes that the op of a call is enqueued next. Sets `step`, the number of
  // earlier runs of its program. Fails if its run goes on after another one.
  Status Enter(const Call& call, int64_t* step);

 private:
  // The runs that are remembered. One that goes on after more others than this
  // is not seen.
  static constexpr size_t kWindow = 64;

  struct Run {
    int64_t id;
    std::string program;
    int64_t position, clone;  // of its first op of this program
    int64_t step;
  };

  // Returns whether an op with the id and the program of `run` is of another
  // run. JAX counts the launches of each executable from a hash of its text. So
  // if a program is compiled twice, runs of both have the same ids, and begin
  // with two copies of one op.
  static bool IsOther(const Run& run, const Site& site) {
    return run.position == site.position && run.clone != site.clone;
  }

  // The latest first. An exported program has a name of its own in the run of
  // the program that calls it.
  std::deque<Run> runs_;
  std::map<std::string, int64_t> num_runs_;  // by program
};

}  // namespace ep::nccl

#endif  // EP_FFI_BACKENDS_NCCL_RUNS_H_
