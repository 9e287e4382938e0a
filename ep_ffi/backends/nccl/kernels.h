// SPDX-License-Identifier: Apache-2.0

// The types that host and device code share. NVRTC compiles the device code
// without the standard library.

#ifndef EP_FFI_BACKENDS_NCCL_KERNELS_H_
#define EP_FFI_BACKENDS_NCCL_KERNELS_H_

#ifdef __CUDACC_RTC__
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint8_t = unsigned char;
using uint64_t = unsigned long long;
#else
#include <cstdint>
#endif

namespace ep::nccl {

// Errors that the device finds in a routing or in the result of combine. The
// host turns each fault into a message.
enum class Fault : int32_t {
  kNone,
  kIdOutOfRange,   // topk_idx[choice] of `rank` is `value`
  kRepeatedId,     // topk_idx[choice] of `rank` repeats `value`
  kOtherPlace,     // `rank` has position `value` in the program's mesh
  kDisagreement,   // `rank` and rank 0 run different programs
  kOverflow,       // `rank` needs `value` rows
  kForeignHandle,  // handle.mem of `rank` is not a routing for this op
  kNotFinite,      // out[choice, value] is not finite; `choice` is a token
};

// The first fault of an op and its position, or Fault::kNone.
struct Outcome {
  Fault fault;
  int32_t rank;
  int32_t choice;
  int32_t op;  // the number of the op, which the host assigns
  int64_t value;
};

// Host memory that the device writes: first an outcome, then `ticket`.
struct Report {
  Outcome outcome;
  uint64_t ticket;
};

// Host memory in which the device counts the ops of a group. Ops have the
// numbers 1, 2, ... in the order in which the host enqueues them.
struct Progress {
  uint64_t begun;  // the last op that has begun
  // The last op in which all ranks have met: a prepare after its all-gather,
  // any other op after NCCL EP's kernel.
  uint64_t ended;
};

// The first bytes of EpHandle.mem.
struct Header {
  uint64_t magic;
  uint64_t sizes;  // hash of the sizes of the exchange
  int32_t rank;
  int32_t num_slots;  // used slots, including padding
  Outcome outcome;
  // ~i, where i is the first element of combine's rows that is not finite; zero
  // if all are finite. The complement lets atomicMax find the first element.
  uint64_t not_finite;
};

constexpr uint64_t kMagic = 0x316e6c63636e7065;  // "epnccln1"
constexpr int32_t kHeaderBytes = 64;
static_assert(sizeof(Header) <= kHeaderBytes, "");

// The words that a rank sends to all ranks after its [V] counts of choices.
enum Word : int32_t {
  kWordFault,
  kWordChoice,
  kWordValue,                     // two words, 64 bits
  kWordProgram = kWordValue + 2,  // two words, 64 bits
  kWords = kWordProgram + 2,
};

constexpr int32_t kWarp = 32;  // threads

// Number of choices per chunk. A choice's position in its expert's queue is the
// number of the expert's choices in earlier chunks plus the number of the
// expert's earlier choices in the same chunk.
constexpr int32_t kChunk = 256;

constexpr uint32_t kNan = 0xffffffff;  // NaN in every float type

// A routing in device memory. The arrays are in EpHandle.mem, except inputs and
// outputs of ep_prepare.
struct Routing {
  int32_t num_experts;       // E
  int32_t num_expert_slots;  // V = P L
  int32_t num_local;         // L
  int32_t nccl_ep_local;     // see Sizes
  int32_t ep_size, rank;
  int32_t num_choices, num_chunks, top_k, capacity, alignment;
  int32_t drop, index_is_int64;
  uint64_t sizes;        // hash of the sizes; equal in an op and its handle
  uint64_t program;      // hash of the op and its sizes; equal on all ranks
  const void* topk_idx;  // [T K]
  const int32_t* place;  // [2], see PrepareArgs::place; or null
  int32_t index;         // place[0] in the mesh of the group

  Header* header;
  int64_t* choices;  // [T K] NCCL EP's expert, -1 if unused, invalid or dropped
  int32_t* chunk_starts;  // [chunks][V + 1], see ChunkStart and FirstWrong
  int32_t* sent;          // [V + kWords]
  int32_t* received;      // [P][V + kWords], `sent` of each rank
  int32_t* totals;        // [V] choices of all ranks
  int32_t* before;        // [V] choices of lower ranks
  int32_t* offsets;       // [V] first row of the expert segment, on its rank
  int32_t* needs;         // [P] slots that a rank needs

  uint32_t* nccl_ep_words;  // [num_nccl_ep_words] NCCL EP's part of the handle
  int64_t num_nccl_ep_words;

  int32_t* group_sizes;        // [L]
  int32_t* token_counts;       // [L]
  int32_t* total_recv_tokens;  // [1]
  int32_t* dropped_counts;     // [L]
  int32_t* max_recv_tokens;    // [1]
  uint8_t* kept;               // [T K]
  Report* report;
  uint64_t ticket;

  Progress* progress;
  uint64_t number;  // number of the op
};

// The rows and weights that dispatch, combine or a backward op returns.
struct Moved {
  int32_t num_rows;
  int32_t row_words;  // 32-bit words per row
  int32_t weights_per_row;
  int32_t fill_tail;  // whether to write `tail` from row header->num_slots on
  uint32_t tail;
  uint32_t* rows;
  uint32_t* weights;  // [rows][weights_per_row], or null
  Report* report;     // receives the first fault

  // The fields below are set only for a combine in checked mode.
  int32_t row_elements;
  uint32_t exponent;  // the bits that are all ones in NaN and infinity
  int32_t op;         // see Outcome::op
};

}  // namespace ep::nccl

#endif  // EP_FFI_BACKENDS_NCCL_KERNELS_H_
