// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/nccl/fake/transfers.h"

#include <algorithm>
#include <cstring>

#include "ep_ffi/testing/formats.h"

namespace ep::nccl::fake {
namespace {

Routings RoutingsOf(const std::vector<const Transfer*>& ranks) {
  Routings routings;
  for (const Transfer* rank : ranks) routings.push_back(rank->routing);
  return routings;
}

}  // namespace

std::vector<Source> SlotsOf(const Routings& routings, int32_t rank,
                            int64_t num_local) {
  const int64_t alignment = routings[rank]->alignment;
  std::vector<Source> slots;
  if (routings[rank]->IsEmpty()) return slots;
  for (int64_t j = 0; j < num_local; ++j) {
    const size_t begin = slots.size();
    for (size_t source = 0; source < routings.size(); ++source) {
      const Routing& routing = *routings[source];
      for (int64_t i = 0; i < routing.num_choices(); ++i) {
        if (routing.choices()[i] == rank * num_local + j) {
          slots.push_back({static_cast<int32_t>(source), i});
        }
      }
    }
    while ((slots.size() - begin) % alignment != 0) {
      slots.push_back({-1, 0});
    }
  }
  return slots;
}

void Dispatch(const std::vector<const Transfer*>& ranks, int32_t rank,
              const RowShape& shape) {
  const Transfer& mine = *ranks[rank];
  const std::vector<Source> slots =
      SlotsOf(RoutingsOf(ranks), rank, shape.num_local);
  for (size_t slot = 0; slot < slots.size(); ++slot) {
    const Source& source = slots[slot];
    std::byte* row = mine.out_rows + slot * shape.bytes();
    if (source.rank < 0) {
      std::memset(row, 0, shape.bytes());
      if (mine.out_weights) mine.out_weights[slot] = 0;
      continue;
    }
    const Transfer& theirs = *ranks[source.rank];
    const int64_t token = source.choice / theirs.routing->num_topk;
    std::memcpy(row, theirs.rows + token * shape.bytes(), shape.bytes());
    if (mine.out_weights) {
      mine.out_weights[slot] = theirs.weights[source.choice];
    }
  }
}

// Rounds as NCCL EP does: each expert rank sums over its experts and rounds,
// then this rank sums over the expert ranks and rounds.
void Combine(const std::vector<const Transfer*>& ranks, int32_t rank,
             const RowShape& shape) {
  const Transfer& mine = *ranks[rank];
  const Routing& routing = *mine.routing;
  const Routings routings = RoutingsOf(ranks);
  const int64_t width = shape.width;
  std::vector<float> sums(routing.num_tokens * width, 0.0f);
  if (mine.out_weights) {
    std::fill_n(mine.out_weights, routing.num_choices(), 0.0f);
  }
  for (size_t r = 0; r < ranks.size(); ++r) {
    const Transfer& theirs = *ranks[r];
    const std::vector<Source> slots = SlotsOf(routings, r, shape.num_local);
    std::vector<float> partial(sums.size(), 0.0f);
    for (size_t slot = 0; slot < slots.size(); ++slot) {
      const Source& source = slots[slot];
      if (source.rank != rank) continue;
      const int64_t token = source.choice / routing.num_topk;
      for (int64_t h = 0; h < width; ++h) {
        partial[token * width + h] += static_cast<float>(
            testing::Load(shape.dtype, theirs.rows, slot * width + h));
      }
      if (mine.out_weights) {
        mine.out_weights[source.choice] = theirs.weights[slot];
      }
    }
    for (size_t i = 0; i < sums.size(); ++i) {
      std::byte rounded[sizeof(float)];
      testing::Store(shape.dtype, partial[i], rounded, 0);
      sums[i] += static_cast<float>(testing::Load(shape.dtype, rounded, 0));
    }
  }
  for (size_t i = 0; i < sums.size(); ++i) {
    testing::Store(shape.dtype, sums[i], mine.out_rows, i);
  }
}

}  // namespace ep::nccl::fake
