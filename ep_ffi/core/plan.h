// SPDX-License-Identifier: Apache-2.0

// The routing plan: which rank sends which token to which slot.
//
// `ep_prepare` turns the top-k choices of all ranks of an EP domain into one
// plan per rank. A plan is an array of bytes (`EpHandle.mem`), which survives
// jit boundaries, donation and serialization. A user may change the bytes, so
// every reader of a plan checks each index.
//
//   mem = PlanHeader | send: Route[T * K] | recv: Route[C] | zero padding
//
//   send[t * K + k]  rank and slot of token t for its k-th choice
//   recv[c]          source rank and its choice t * K + k for my slot c
//
// {-1, -1} marks an unused or dropped choice, a row that pads a slab, and the
// tail past the last slab.
//
// docs/semantics.md defines the layout of the slots: expert-major slabs, each
// padded to `alignment`; in a slab, tokens ascend by source rank, then by
// index.

#ifndef EP_FFI_CORE_PLAN_H_
#define EP_FFI_CORE_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ep_ffi/core/status.h"

namespace ep {

// The static sizes of an exchange; names as in docs/semantics.md.
struct PlanDims {
  int64_t num_experts;  // E
  int64_t ep_size;      // P
  int64_t num_tokens;   // T, tokens of a rank
  int64_t top_k;        // K
  int64_t capacity;     // C, slots of a rank
  int64_t alignment;    // of a slab, in rows
  bool drop;            // overflow policy: drop choices past C, or fail

  int64_t num_local_experts() const { return num_experts / ep_size; }  // L
  int64_t num_choices() const { return num_tokens * top_k; }           // T K
};

// Fails unless the sizes are positive, divide, and fit into 32-bit indices.
Status ValidateDims(const PlanDims& dims);

// Returns the bytes of `EpHandle.mem`.
int64_t PlanBytes(const PlanDims& dims);

struct Route {
  int32_t rank;
  int32_t index;
};

inline constexpr Route kNoRoute = {-1, -1};

// The choices of a rank, sorted by expert. The rank sends them to its peers.
struct SortedChoices {
  std::vector<int32_t> starts;  // [E + 1], prefix sums of choices per expert
  std::vector<int32_t> order;   // [T K], choices t K + k, ascending per expert
};

// Sorts `topk_idx` [T, K] in O(T K + E). Fails on an expert id outside [-1, E)
// and on an expert that occurs twice in a token.
template <typename Index>
Status SortChoices(const PlanDims& dims, const Index* topk_idx,
                   SortedChoices* out);

// A view of a peer's SortedChoices.
struct ChoicesView {
  const int32_t* starts;
  const int32_t* order;
};

struct PlanOutputs {
  std::byte* mem;              // [PlanBytes]
  int32_t* group_sizes;        // [L] rows of each slab inside the capacity
  int32_t* token_counts;       // [L] tokens kept in each slab
  int32_t* total_recv_tokens;  // [1] slots needed, before any drop
  int32_t* dropped_counts;     // [L] tokens of each expert without a slot
  int32_t* max_recv_tokens;    // [1] the largest total of the domain's ranks
  uint8_t* kept;               // [T, K] 1 if the choice has a slot, else 0
};

// Writes the plan of `rank` from the choices of all ranks. Fails if a rank of
// the domain overflows and the policy is not to drop; all ranks see all counts
// and fail with the same message. `domain` is hashed into the fingerprint, so
// that plans of two domains differ even if their choices are equal.
Status BuildPlan(const PlanDims& dims, int64_t domain, int64_t rank,
                 const std::vector<ChoicesView>& choices,
                 const PlanOutputs& out);

// Writes the checksum of a plan, for `BuildPlan` and for tests that alter
// routes.
void SealPlan(const PlanDims& dims, std::byte* mem);

// A checked view of a plan's bytes.
class Plan {
 public:
  // Fails unless `rank` made `mem` for exactly these sizes, and the bytes that
  // movers read are unchanged.
  static Status Open(const PlanDims& dims, int64_t rank, const std::byte* mem,
                     int64_t bytes, Plan* out);

  int64_t rank() const { return rank_; }
  const Route* send() const { return send_; }       // [T K]
  const Route* recv() const { return recv_; }       // [C]
  int64_t num_slots() const { return num_slots_; }  // used, padding included
  // A hash of all choices, equal on all ranks of a domain.
  uint64_t fingerprint() const { return fingerprint_; }

 private:
  int64_t rank_ = 0;
  const Route* send_ = nullptr;
  const Route* recv_ = nullptr;
  int64_t num_slots_ = 0;
  uint64_t fingerprint_ = 0;
};

}  // namespace ep

#endif  // EP_FFI_CORE_PLAN_H_
