// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/nccl/routing.h"

#include <algorithm>

#include "ep_ffi/core/hash.h"

namespace ep::nccl {
namespace {

constexpr int64_t kAlignment = 256;

// Divides a buffer into arrays. With a null buffer, only counts the bytes.
class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}

  template <typename T>
  void Take(int64_t count, T** out) {
    *out = base_ ? reinterpret_cast<T*>(base_ + size_) : nullptr;
    size_ += (count * sizeof(T) + 7) / 8 * 8;
  }
  int64_t size() const {
    return (size_ + kAlignment - 1) / kAlignment * kAlignment;
  }

 private:
  std::byte* const base_;
  int64_t size_ = 0;
};

// Returns the number of words that a rank sends in the all-gather.
int64_t NumSent(const Routing& r) { return r.num_expert_slots + kWords; }

Carver Carve(std::byte* mem, Routing* r) {
  Carver carver(mem);
  std::byte* header;
  carver.Take(kHeaderBytes, &header);
  r->header = reinterpret_cast<Header*>(header);
  carver.Take(r->num_choices, &r->choices);
  carver.Take(r->num_chunks * (int64_t{r->num_expert_slots} + 1),
              &r->chunk_starts);
  carver.Take(NumSent(*r), &r->sent);
  carver.Take(r->ep_size * NumSent(*r), &r->received);
  carver.Take(r->num_expert_slots, &r->totals);
  carver.Take(r->num_expert_slots, &r->before);
  carver.Take(r->num_expert_slots, &r->offsets);
  carver.Take(r->ep_size, &r->needs);
  return carver;
}

// Hashes the sizes that must be equal in an op and its handle. Leaves out
// `drop`: a layer that fails on overflow may drop in the first of two prepares.
uint64_t HashSizes(const Routing& r) {
  return Hash({r.num_experts, r.ep_size, r.num_choices, r.top_k, r.capacity,
               r.alignment});
}

Routing Shape(const Sizes& sizes, const Layer& layer, int64_t num_tokens) {
  Routing r = {};
  r.num_experts = sizes.num_experts;
  r.num_expert_slots = sizes.num_expert_slots();
  r.num_local = sizes.num_local();
  r.nccl_ep_local = sizes.nccl_ep_local();
  r.ep_size = sizes.ep_size;
  r.num_choices = num_tokens * layer.top_k;
  r.num_chunks = (r.num_choices + kChunk - 1) / kChunk;
  r.top_k = layer.top_k;
  r.capacity = layer.capacity;
  r.alignment = layer.alignment;
  r.drop = layer.drop;
  r.sizes = HashSizes(r);
  return r;
}

}  // namespace

int64_t RoutingBytes(const Sizes& sizes, const Layer& layer,
                     int64_t num_tokens) {
  Routing r = Shape(sizes, layer, num_tokens);
  return Carve(nullptr, &r).size();
}

Routing RoutingIn(const Sizes& sizes, const Layer& layer, int64_t num_tokens,
                  int32_t rank, std::byte* mem) {
  Routing r = Shape(sizes, layer, num_tokens);
  r.rank = rank;
  Carve(mem, &r);
  return r;
}

Status EnqueueRouting(const Device& device, const Communicator& communicator,
                      CUstream stream, Routing r) {
  EP_RETURN_IF_ERROR(
      device.LaunchBlocks(Device::kCountChoices, r.num_chunks, stream, &r));
  EP_RETURN_IF_ERROR(device.LaunchThreads(
      Device::kSumChoices, int64_t{kWarp} * r.num_expert_slots, stream, &r));
  EP_RETURN_IF_ERROR(
      communicator.AllGather(r.sent, r.received, NumSent(r), stream));
  EP_RETURN_IF_ERROR(device.LaunchThreads(
      Device::kPlaceSlabs, int64_t{kWarp} * r.ep_size, stream, &r));
  return device.LaunchThreads(Device::kWriteRouting,
                              std::max(r.num_choices, r.num_local), stream, &r);
}

}  // namespace ep::nccl
