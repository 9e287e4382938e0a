// SPDX-License-Identifier: Apache-2.0

// Calls the ops of a backend on plain host buffers, with a thread per rank.

#ifndef EP_FFI_TESTING_RANKS_H_
#define EP_FFI_TESTING_RANKS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/mutex.h"
#include "ep_ffi/core/plan.h"
#include "ep_ffi/core/status.h"
#include "ep_ffi/testing/oracle.h"

namespace ep::testing {

// The options of a group that a test makes.
struct WorldOptions {
  PlanDims dims;  // of the first layer; a backend may fix some for the group
  int64_t num_domains = 1;
  double timeout_s = 60;
};

// One EP domain of a backend. Several ranks may share a Group object.
struct Domain {
  // Optional. A step calls `enter` with the EpHandle.mem of each op, and keeps
  // the result until the backend returns. `enter` may change the call.
  std::function<std::shared_ptr<void>(int64_t rank, const void* mem,
                                      int64_t bytes, Call* call)>
      enter;
  std::vector<std::shared_ptr<Group>> groups;  // by rank
  std::vector<int32_t> devices;                // by rank
  // For backends that enqueue ops on a stream: the streams by rank, and a
  // function that waits until the device has run all ops of a rank and returns
  // the first error. Empty for other backends.
  std::vector<void*> streams;
  std::function<Status(int64_t rank)> synchronize;

  void* stream(int64_t rank) const {
    return streams.empty() ? nullptr : streams[rank];
  }
};

// Calls `body` for each rank on a separate thread, and waits for all threads.
void ForEachRank(int64_t num_ranks,
                 const std::function<void(int64_t rank)>& body);

// The identity of a call: its run and the site of its op.
struct Place {
  int64_t run_id;
  int64_t position = 0;
  int64_t clone = 0;
  uint64_t program = 0;
};

inline constexpr char kLayerName[] = "moe_3";

struct RankInput {
  std::string layer = kLayerName;
  PlanDims dims;
  Tail tail = Tail::kZero;
  bool checked = false;
  // The fields below are inputs of ep_prepare.
  std::vector<int64_t> topk_idx;
  bool index_is_int64 = true;
  std::vector<int32_t> place;  // empty: unknown
  // The fields below are inputs of all other ops.
  std::vector<std::byte> mem;
  RowType type = {0, DType::kFloat32};
  RankData data;
};

struct RankOutput {
  std::vector<std::byte> mem;
  std::vector<int32_t> group_sizes;
  std::vector<int32_t> token_counts;
  int32_t total_recv_tokens = 0;
  std::vector<int32_t> dropped_counts;
  int32_t max_recv_tokens = 0;
  std::vector<uint8_t> kept;
  RankData data;
};

// The byte that fills outputs before an op runs.
inline constexpr std::byte kCanary{0xc5};

// One execution of one op on all ranks of a domain. Fails the test if the
// backend writes past the end of an output, or completes a call twice.
//
// Thread-safe, if only one thread at a time uses each rank.
class Step : public std::enable_shared_from_this<Step> {
 public:
  static std::shared_ptr<Step> Make(const Domain& domain, Op op, Place place,
                                    std::vector<RankInput> inputs);

  // Calls the backend for one rank.
  void Post(int64_t rank);
  bool IsDone(int64_t rank);
  // Waits for the call. Fails the test if the call takes longer than a minute.
  Status Wait(int64_t rank);
  // Posts and waits on all ranks in parallel. Returns the statuses by rank.
  std::vector<Status> Run();
  Op op() const { return op_; }
  const std::vector<RankInput>& inputs() const { return inputs_; }
  const RankOutput& output(int64_t rank) const { return outputs_[rank]; }

 private:
  Step(const Domain& domain, Op op, Place place, std::vector<RankInput> inputs);

  void Complete(int64_t rank, Status status);
  Status WaitForCall(int64_t rank);
  PrepareArgs ToPrepareArgs(int64_t rank);
  ScatterArgs ToScatterArgs(int64_t rank);
  GatherArgs ToGatherArgs(int64_t rank);

  const Domain domain_;
  const Op op_;
  const Place place_;
  const std::vector<RankInput> inputs_;
  std::vector<std::vector<int32_t>> narrow_idx_;  // topk_idx as int32
  std::vector<Site> sites_;
  std::vector<RankOutput> outputs_;

  Mutex mutex_;
  CondVar changed_;                                     // a call has completed
  std::vector<int> completions_ EP_GUARDED_BY(mutex_);  // count by rank
  std::vector<Status> statuses_ EP_GUARDED_BY(mutex_);  // by rank
};

using StepPtr = std::shared_ptr<Step>;

}  // namespace ep::testing

#endif  // EP_FFI_TESTING_RANKS_H_
