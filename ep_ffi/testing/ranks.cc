// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/testing/ranks.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

namespace ep::testing {
namespace {

// An executor that starts a thread for each task. Thread-safe.
class Threads : public Executor {
 public:
  void Schedule(std::function<void()> task) override {
    std::thread(std::move(task)).detach();
  }
  int64_t num_threads() const override { return 2; }
};

constexpr size_t kCanaryElements = 16;

// Resizes an output, and fills it and some elements past its end with canaries.
template <typename T>
void Arm(size_t size, std::vector<T>* output) {
  output->resize(size + kCanaryElements);
  std::memset(output->data(), static_cast<int>(kCanary),
              output->size() * sizeof(T));
}

// Fails the test if an element past the end has changed. Then removes all
// elements past the end.
template <typename T>
void Disarm(std::vector<T>* output) {
  if (output->empty()) return;  // not armed
  const size_t size = output->size() - kCanaryElements;
  const std::byte* end = reinterpret_cast<const std::byte*>(&(*output)[size]);
  for (size_t i = 0; i < kCanaryElements * sizeof(T); ++i) {
    EXPECT_EQ(kCanary, end[i]) << "an output was overrun by " << i << " bytes";
  }
  output->resize(size);
}

Site SiteOf(const RankInput& input, const Place& place) {
  const Layer layer = {input.dims.top_k,    input.dims.alignment,
                       input.dims.capacity, input.dims.drop,
                       input.tail,
                       /*fingerprint=*/0,   input.checked,
                       /*wire=*/0,          input.layer};
  return MakeSite(layer, StrCat("jit_step#", place.program), place.position,
                  place.clone);
}

}  // namespace

void ForEachRank(int64_t num_ranks,
                 const std::function<void(int64_t rank)>& body) {
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back(body, rank);
  }
  for (std::thread& thread : threads) thread.join();
}

std::shared_ptr<Step> Step::Make(const Domain& domain, Op op, Place place,
                                 std::vector<RankInput> inputs) {
  return std::shared_ptr<Step>(new Step(domain, op, place, std::move(inputs)));
}

Step::Step(const Domain& domain, Op op, Place place,
           std::vector<RankInput> inputs)
    : domain_(domain),
      op_(op),
      place_(place),
      inputs_(std::move(inputs)),
      outputs_(inputs_.size()),
      completions_(inputs_.size(), 0),
      statuses_(inputs_.size()) {
  for (const RankInput& input : inputs_) {
    narrow_idx_.emplace_back(input.topk_idx.begin(), input.topk_idx.end());
    sites_.push_back(SiteOf(input, place_));
  }
}

void Step::Post(int64_t rank) {
  static Threads threads;
  Call call = {op_,
               &sites_[rank],
               place_.run_id,
               domain_.devices[rank],
               &threads,
               domain_.stream(rank),
               /*communicator=*/nullptr,
               [self = shared_from_this(), rank](Status status) {
                 self->Complete(rank, std::move(status));
               }};
  Group& group = *domain_.groups[rank];
  const auto enter = [&](const void* mem, int64_t bytes) {
    return domain_.enter ? domain_.enter(rank, mem, bytes, &call) : nullptr;
  };
  if (op_ == Op::kPrepare) {
    const PrepareArgs args = ToPrepareArgs(rank);
    const auto entered = enter(args.mem, args.mem_bytes);
    return group.Prepare(std::move(call), args);
  }
  const RankInput& in = inputs_[rank];
  if (IsScatter(op_)) {
    const ScatterArgs args = ToScatterArgs(rank);
    const auto entered = enter(in.mem.data(), in.mem.size());
    return group.Scatter(std::move(call), args);
  }
  const GatherArgs args = ToGatherArgs(rank);
  const auto entered = enter(in.mem.data(), in.mem.size());
  group.Gather(std::move(call), args);
}

PrepareArgs Step::ToPrepareArgs(int64_t rank) {
  const RankInput& in = inputs_[rank];
  RankOutput& out = outputs_[rank];
  int64_t mem_bytes = 0;  // stays 0 if the group refuses the layer
  (void)domain_.groups[rank]->MemBytes(sites_[rank].layer, in.dims.num_tokens,
                                       &mem_bytes);
  Arm(mem_bytes, &out.mem);
  Arm(in.dims.num_local_experts(), &out.group_sizes);
  Arm(in.dims.num_local_experts(), &out.token_counts);
  Arm(in.dims.num_local_experts(), &out.dropped_counts);
  Arm(in.dims.num_choices(), &out.kept);
  const void* topk_idx = narrow_idx_[rank].data();
  if (in.index_is_int64) topk_idx = in.topk_idx.data();
  return {topk_idx,
          in.place.empty() ? nullptr : in.place.data(),
          in.index_is_int64,
          in.dims.num_tokens,
          out.mem.data(),
          mem_bytes,
          out.group_sizes.data(),
          out.token_counts.data(),
          &out.total_recv_tokens,
          out.dropped_counts.data(),
          &out.max_recv_tokens,
          out.kept.data()};
}

ScatterArgs Step::ToScatterArgs(int64_t rank) {
  const RankInput& in = inputs_[rank];
  RankOutput& out = outputs_[rank];
  const bool weighted = op_ == Op::kDispatch;
  Arm(in.dims.capacity * in.type.bytes(), &out.data.rows);
  if (weighted) Arm(in.dims.capacity, &out.data.weights);
  static constexpr float kNoWeights = 0;  // empty buffers of XLA have addresses
  return {
      {in.mem.data(), static_cast<int64_t>(in.mem.size())},
      {in.data.rows.data(), in.dims.num_tokens, in.type.width, in.type.dtype},
      !weighted                 ? nullptr
      : in.data.weights.empty() ? &kNoWeights
                                : in.data.weights.data(),
      {out.data.rows.data(), in.dims.capacity, in.type.width, in.type.dtype},
      weighted ? out.data.weights.data() : nullptr};
}

GatherArgs Step::ToGatherArgs(int64_t rank) {
  const RankInput& in = inputs_[rank];
  RankOutput& out = outputs_[rank];
  const bool backward = op_ == Op::kDispatchBwd;
  Arm(in.dims.num_tokens * in.type.bytes(), &out.data.rows);
  if (backward) Arm(in.dims.num_choices(), &out.data.weights);
  return {
      {in.mem.data(), static_cast<int64_t>(in.mem.size())},
      {in.data.rows.data(), in.dims.capacity, in.type.width, in.type.dtype},
      in.data.weights.empty() ? nullptr : in.data.weights.data(),
      {out.data.rows.data(), in.dims.num_tokens, in.type.width, in.type.dtype},
      backward ? out.data.weights.data() : nullptr};
}

void Step::Complete(int64_t rank, Status status) {
  MutexLock lock(mutex_);
  if (++completions_[rank] > 1) {
    ADD_FAILURE() << OpName(op_) << " completed twice on rank " << rank;
    return;
  }
  statuses_[rank] = std::move(status);
  changed_.NotifyAll();
}

bool Step::IsDone(int64_t rank) {
  MutexLock lock(mutex_);
  return completions_[rank] > 0;
}

Status Step::WaitForCall(int64_t rank) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  MutexLock lock(mutex_);
  while (completions_[rank] == 0) {
    if (changed_.WaitUntil(mutex_, end)) continue;
    ADD_FAILURE() << OpName(op_) << " did not complete on rank " << rank;
    return Status(Code::kInternal, "not complete");
  }
  return statuses_[rank];
}

Status Step::Wait(int64_t rank) {
  Status status = WaitForCall(rank);
  if (status.ok() && domain_.synchronize) status = domain_.synchronize(rank);
  RankOutput& out = outputs_[rank];
  Disarm(&out.mem);
  Disarm(&out.group_sizes);
  Disarm(&out.token_counts);
  Disarm(&out.dropped_counts);
  Disarm(&out.kept);
  Disarm(&out.data.rows);
  Disarm(&out.data.weights);
  return status;
}

std::vector<Status> Step::Run() {
  std::vector<Status> statuses(inputs_.size());
  ForEachRank(statuses.size(), [&](int64_t rank) {
    Post(rank);
    statuses[rank] = Wait(rank);
  });
  return statuses;
}

}  // namespace ep::testing
