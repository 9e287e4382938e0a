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
//   send[t * K + k]  destination rank and slot of token t's k-th choice
//   recv[c]          source rank, and its choice t * K + k, of local slot c
//
// The route {-1, -1} marks an unused or dropped choice, a padding row of a
// slab, and a slot past the last slab.
//
// The rows of each local expert form a slab. Slabs ascend by expert and are
// padded to `alignment` rows. In a slab, tokens ascend by source rank, then by
// index. See docs/semantics.md.

#ifndef EP_FFI_CORE_PLAN_H_
#define EP_FFI_CORE_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ep_ffi/core/status.h"

namespace ep {

// Returns L, the expert slots of a rank: E / P, rounded up. Rank e / L has
// expert e. The slots from E to P L - 1, on the last ranks, are empty.
inline int64_t LocalExperts(int64_t num_experts, int64_t ep_size) {
  return (num_experts + ep_size - 1) / ep_size;
}

// The static sizes of an exchange; names as in docs/semantics.md.
struct PlanDims {
  int64_t num_experts;  // E
  int64_t ep_size;      // P
  int64_t num_tokens;   // T, tokens per rank
  int64_t top_k;        // K
  int64_t capacity;     // C, slots per rank
  int64_t alignment;    // rows; slab sizes are multiples
  bool drop;            // overflow policy: drop choices past C, or fail

  int64_t num_local_experts() const {  // L
    return LocalExperts(num_experts, ep_size);
  }
  int64_t num_expert_slots() const { return ep_size * num_local_experts(); }
  int64_t num_choices() const { return num_tokens * top_k; }  // T K
};

// Fails unless all sizes are positive (T may be 0), and row indices fit into
// int32.
Status ValidateDims(const PlanDims& dims);

// Returns the size of `EpHandle.mem` in bytes.
int64_t PlanBytes(const PlanDims& dims);

struct Route {
  int32_t rank;
  int32_t index;
};

inline constexpr Route kNoRoute = {-1, -1};

// A rank's choices, sorted by expert. Each rank sends this struct to its peers.
struct SortedChoices {
  std::vector<int32_t> starts;  // [P L + 1], prefix sums of choices per expert
  std::vector<int32_t> order;   // [T K], choices t K + k, ascending per expert
};

// Sorts `topk_idx` [T, K] in O(T K + P L). Fails if an expert id is outside
// [-1, E), or if a token has an expert twice.
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
  int32_t* token_counts;       // [L] tokens in each slab, without padding
  int32_t* total_recv_tokens;  // [1] slots needed, before any drop
  int32_t* dropped_counts;     // [L] tokens of each expert that got no slot
  int32_t* max_recv_tokens;    // [1] maximum total_recv_tokens of the domain
  uint8_t* kept;               // [T, K] 1 if the choice has a slot, else 0
};

// Writes the plan of `rank` from the choices of all ranks. Fails if a rank
// needs more than its capacity and `dims.drop` is false. Every rank sees all
// counts, so all ranks fail with the same message. The fingerprint hashes
// `domain`, so that two domains with equal choices have different fingerprints.
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
  // ops read are unchanged.
  static Status Open(const PlanDims& dims, int64_t rank, const std::byte* mem,
                     int64_t bytes, Plan* out);

  const Route* send() const { return send_; }       // [T K]
  const Route* recv() const { return recv_; }       // [C]
  int64_t num_slots() const { return num_slots_; }  // used, with padding
  // A hash of all choices, equal on all ranks of a domain.
  uint64_t fingerprint() const { return fingerprint_; }

 private:
  const Route* send_ = nullptr;
  const Route* recv_ = nullptr;
  int64_t num_slots_ = 0;
  uint64_t fingerprint_ = 0;
};

}  // namespace ep

#endif  // EP_FFI_CORE_PLAN_H_
