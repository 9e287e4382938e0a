// SPDX-License-Identifier: Apache-2.0

// Drives the ops of a backend with plain host buffers, ranks as threads.

#ifndef EP_FFI_TESTING_RANKS_H_
#define EP_FFI_TESTING_RANKS_H_

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/plan.h"
#include "ep_ffi/core/status.h"
#include "ep_ffi/testing/oracle.h"

namespace ep::testing {

// The sizes of a group.
struct WorldOptions {
  PlanDims dims;  // of the first layer; a backend may fix what it needs to
  int64_t num_domains = 1;
  double timeout_s = 60;
};

// One EP domain as a backend made it. Ranks may share a group.
struct Domain {
  std::vector<std::shared_ptr<Group>> groups;  // by rank
  std::vector<int32_t> devices;                // by rank
  // Of a backend whose ops are done when they are enqueued: where each rank
  // enqueues them, and what waits until the device is through with all of them
  // and tells what it found wrong.
  std::vector<void*> streams;
  std::function<Status(int64_t rank)> synchronize;

  void* stream(int64_t rank) const {
    return streams.empty() ? nullptr : streams[rank];
  }
  int64_t size() const { return groups.size(); }
};

// Calls `body` for each rank, each on a thread of its own; waits for all.
void ForEachRank(int64_t num_ranks,
                 const std::function<void(int64_t rank)>& body);

// Where a call stands: the run it belongs to, and what names its op.
struct Place {
  int64_t run_id;
  int64_t position = 0;
  int64_t clone = 0;
  uint64_t program = 0;
};

// The layer that ops belong to if nothing else is said, as error messages call
// it.
inline constexpr char kLayerName[] = "moe_3";

// What one rank gives to an op.
struct RankInput {
  std::string layer = kLayerName;
  PlanDims dims;
  Tail tail = Tail::kZero;
  bool checked = false;
  // Of ep_prepare.
  std::vector<int64_t> topk_idx;
  bool index_is_int64 = true;
  std::vector<int32_t> place;  // empty: not known
  // Of the others.
  std::vector<std::byte> mem;
  RowType type = {0, DType::kFloat32};
  RankData data;
};

// What one rank gets from an op.
struct RankOutput {
  std::vector<std::byte> mem;
  std::vector<int32_t> group_sizes;
  std::vector<int32_t> token_counts;
  int32_t total_recv_tokens = 0;
  RankData data;
};

// Outputs are full of it before.
inline constexpr std::byte kCanary{0xc5};

// One execution of one op on all ranks of a domain. An output that is written
// past its end, and a call that completes twice, fail the test.
class Step : public std::enable_shared_from_this<Step> {
 public:
  static std::shared_ptr<Step> Make(const Domain& domain, Op op, Place place,
                                    std::vector<RankInput> inputs);

  // Calls the backend for one rank.
  void Post(int64_t rank);
  bool IsDone(int64_t rank);
  // Waits for the call; the test fails if it does not complete in a minute.
  Status Wait(int64_t rank);
  // Posts and waits on all ranks at once; the statuses by rank.
  std::vector<Status> Run();
  const RankInput& input(int64_t rank) const { return inputs_[rank]; }
  const RankOutput& output(int64_t rank) const { return outputs_[rank]; }

 private:
  Step(const Domain& domain, Op op, Place place, std::vector<RankInput> inputs);

  void Complete(int64_t rank, Status status);
  void PostPrepare(int64_t rank, Call call);
  ScatterArgs ToScatterArgs(int64_t rank);
  GatherArgs ToGatherArgs(int64_t rank);

  const Domain domain_;
  const Op op_;
  const Place place_;
  const std::vector<RankInput> inputs_;
  std::vector<std::vector<int32_t>> narrow_idx_;  // topk_idx once more
  std::vector<Site> sites_;
  std::vector<RankOutput> outputs_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<int> completions_;
  std::vector<Status> statuses_;
};

using StepPtr = std::shared_ptr<Step>;

}  // namespace ep::testing

#endif  // EP_FFI_TESTING_RANKS_H_
