// SPDX-License-Identifier: Apache-2.0

// Computes what NCCL EP's high-throughput algorithm does in its expert-major
// layout.

#ifndef EP_FFI_BACKENDS_NCCL_FAKE_TRANSFERS_H_
#define EP_FFI_BACKENDS_NCCL_FAKE_TRANSFERS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ep_ffi/core/backend.h"

namespace ep::nccl::fake {

// The beginning of a handle's memory. The rank's choices [num_tokens, num_topk]
// follow. It has no pointers, so it may be moved.
struct Routing {
  uint64_t magic;
  uint64_t group;
  uint64_t update;  // equal on ranks that updated their handles together
  int64_t num_topk;
  int64_t alignment;
  int64_t num_tokens;

  // Returns whether it is all zeros. Then this rank moves no rows.
  bool IsEmpty() const { return magic == 0; }
  int64_t num_choices() const { return num_tokens * num_topk; }
  const int64_t* choices() const {
    return reinterpret_cast<const int64_t*>(this + 1);
  }
};

constexpr uint64_t kRoutingMagic = 0x656b6166702d6570;  // "ep-pfake"

// The routings of all ranks.
using Routings = std::vector<const Routing*>;

// The origin of a slot: a choice of a rank, or padding.
struct Source {
  int32_t rank;  // negative: padding
  int64_t choice;
};

// Returns the slots of a rank, up to the end of its last slab.
std::vector<Source> SlotsOf(const Routings& routings, int32_t rank,
                            int64_t num_local);

// The inputs and outputs of one rank. Dispatch reads rows of tokens and writes
// rows of slots, and combine the reverse. Weights may be null.
struct Transfer {
  const Routing* routing;
  const std::byte* rows;
  const float* weights;
  std::byte* out_rows;
  float* out_weights;
};

struct RowShape {
  int64_t width;
  DType dtype;
  int64_t num_local;  // experts of a rank

  int64_t bytes() const { return width * ByteWidth(dtype); }
};

// Writes the outputs of `rank`.
void Dispatch(const std::vector<const Transfer*>& ranks, int32_t rank,
              const RowShape& shape);
void Combine(const std::vector<const Transfer*>& ranks, int32_t rank,
             const RowShape& shape);

}  // namespace ep::nccl::fake

#endif  // EP_FFI_BACKENDS_NCCL_FAKE_TRANSFERS_H_
