// SPDX-License-Identifier: Apache-2.0

// A backend of another module passes the conformance tests of all backends
// (ep_ffi/testing/conformance.h). It serves the ranks of one process, and
// implements the ops that copy tokens to slots.

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/plan.h"
#include "ep_ffi/core/status.h"
#include "ep_ffi/core/str_cat.h"
#include "ep_ffi/testing/conformance.h"

namespace {

// Runs an op when the last rank has posted its call. Thread-safe.
template <typename Args>
class Meetings {
 public:
  using Calls = std::vector<std::pair<ep::Call, Args>>;  // by rank

  explicit Meetings(int64_t num_ranks) : num_ranks_(num_ranks) {}

  // Rank r is on device r. `run` returns the status of all calls.
  void Post(ep::Call call, const Args& args,
            const std::function<ep::Status(const Calls&)>& run) {
    const auto key = std::make_pair(call.run_id, call.site->id);
    Calls calls;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      auto& posted = posted_[key];
      posted.emplace(call.device, std::make_pair(std::move(call), args));
      if (static_cast<int64_t>(posted.size()) < num_ranks_) return;
      for (auto& [rank, post] : posted) calls.push_back(std::move(post));
      posted_.erase(key);
    }
    const ep::Status status = run(calls);
    for (auto& [posted, unused] : calls) posted.done(status);
  }

 private:
  const int64_t num_ranks_;
  std::mutex mutex_;
  // The posted calls, by run id and site, then by rank.
  std::map<std::pair<int64_t, uint64_t>,
           std::map<int32_t, std::pair<ep::Call, Args>>>
      posted_;
};

class LoopbackGroup : public ep::Group {
 public:
  LoopbackGroup(int64_t num_experts, int64_t ep_size)
      : num_experts_(num_experts),
        ep_size_(ep_size),
        prepares_(ep_size),
        scatters_(ep_size) {}

  int64_t num_experts() const override { return num_experts_; }
  int64_t ep_size() const override { return ep_size_; }

  ep::Status MemBytes(const ep::Layer& layer, int64_t num_tokens,
                      int64_t* out) const override {
    *out = ep::PlanBytes(Dims(layer, num_tokens));
    return ep::Status();
  }

  void Prepare(ep::Call call, const ep::PrepareArgs& args) override {
    const ep::PlanDims dims = Dims(call.site->layer, args.num_tokens);
    prepares_.Post(std::move(call), args, [dims](const auto& calls) {
      std::vector<ep::SortedChoices> sorted(calls.size());
      std::vector<ep::ChoicesView> choices;
      for (size_t rank = 0; rank < calls.size(); ++rank) {
        EP_RETURN_IF_ERROR(Sort(dims, calls[rank].second, &sorted[rank]));
        choices.push_back(
            {sorted[rank].starts.data(), sorted[rank].order.data()});
      }
      for (size_t rank = 0; rank < calls.size(); ++rank) {
        const ep::PrepareArgs& mine = calls[rank].second;
        EP_RETURN_IF_ERROR(
            ep::BuildPlan(dims, /*domain=*/0, rank, choices,
                          {mine.mem, mine.group_sizes, mine.token_counts,
                           mine.total_recv_tokens, mine.dropped_counts,
                           mine.max_recv_tokens, mine.kept}));
      }
      return ep::Status();
    });
  }

  void Scatter(ep::Call call, const ep::ScatterArgs& args) override {
    const ep::PlanDims dims = Dims(call.site->layer, args.tokens.count);
    scatters_.Post(std::move(call), args, [dims](const auto& calls) {
      for (size_t rank = 0; rank < calls.size(); ++rank) {
        const ep::ScatterArgs& mine = calls[rank].second;
        ep::Plan plan;
        EP_RETURN_IF_ERROR(
            ep::Plan::Open(dims, rank, mine.mem.data, mine.mem.bytes, &plan));
        const int64_t bytes = mine.slots.row_bytes();
        for (int64_t slot = 0; slot < dims.capacity; ++slot) {
          const ep::Route from = plan.recv()[slot];
          std::byte* row = mine.slots.data + slot * bytes;
          std::memset(row, 0, bytes);
          if (mine.slot_weights) mine.slot_weights[slot] = 0;
          if (from.rank < 0) continue;
          const ep::ScatterArgs& peer = calls[from.rank].second;
          std::memcpy(row, peer.tokens.data + from.index / dims.top_k * bytes,
                      bytes);
          if (mine.slot_weights) {
            mine.slot_weights[slot] = peer.topk_weights[from.index];
          }
        }
      }
      return ep::Status();
    });
  }

  void Gather(ep::Call call, const ep::GatherArgs&) override {
    call.done(ep::Status(
        ep::Code::kInternal,
        ep::StrCat(ep::OpName(call.op), " is not part of this example")));
  }

  void FailRun(int64_t, const ep::Status&) override {}
  ep::Status Close() override { return ep::Status(); }

 private:
  static ep::Status Sort(const ep::PlanDims& dims, const ep::PrepareArgs& args,
                         ep::SortedChoices* out) {
    return args.index_is_int64
               ? ep::SortChoices(
                     dims, static_cast<const int64_t*>(args.topk_idx), out)
               : ep::SortChoices(
                     dims, static_cast<const int32_t*>(args.topk_idx), out);
  }

  ep::PlanDims Dims(const ep::Layer& layer, int64_t num_tokens) const {
    return {num_experts_,   ep_size_,        num_tokens, layer.top_k,
            layer.capacity, layer.alignment, layer.drop};
  }

  const int64_t num_experts_;
  const int64_t ep_size_;
  Meetings<ep::PrepareArgs> prepares_;
  Meetings<ep::ScatterArgs> scatters_;
};

using ep::testing::Backend;
using ep::testing::Domain;
using ep::testing::WorldOptions;

std::vector<Domain> MakeLoopbackWorld(const WorldOptions& options) {
  std::vector<Domain> domains(options.num_domains);
  for (Domain& domain : domains) {
    const auto group = std::make_shared<LoopbackGroup>(options.dims.num_experts,
                                                       options.dims.ep_size);
    for (int32_t rank = 0; rank < options.dims.ep_size; ++rank) {
      domain.groups.push_back(group);
      domain.devices.push_back(rank);
    }
  }
  return domains;
}

Backend Loopback() {
  Backend backend;
  backend.name = "loopback";
  backend.make = MakeLoopbackWorld;
  backend.gathers = false;
  backend.shares_failures = false;
  return backend;
}

EP_INSTANTIATE_CONFORMANCE(Loopback, Loopback());

}  // namespace
