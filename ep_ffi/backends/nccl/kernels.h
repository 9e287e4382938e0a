// SPDX-License-Identifier: Apache-2.0

// What host and device code of the nccl backend share. NVRTC compiles the
// device side without the standard library, so there is nothing here but
// fixed-width integers.

#ifndef EP_FFI_BACKENDS_NCCL_KERNELS_H_
#define EP_FFI_BACKENDS_NCCL_KERNELS_H_

#ifdef __CUDACC_RTC__
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
#else
#include <cstdint>
#endif

namespace ep::nccl {

// What is wrong with a routing, or with what combine made of it. The device
// finds it, the host words it.
enum class Fault : int32_t {
  kNone,
  kIdOutOfRange,   // rank's topk_idx[choice] is `value`
  kRepeatedId,     // rank's topk_idx[choice] repeats `value`
  kOtherPlace,     // rank's program has it at `value`, see PrepareArgs::place
  kDisagreement,   // rank's program differs from rank 0's
  kOverflow,       // rank needs `value` rows
  kForeignHandle,  // rank's mem is not the routing of this op
  kNotFinite,      // rank's out[choice, value] of `op`, where choice is a token
};

struct Verdict {
  Fault fault;
  int32_t rank;
  int32_t choice;
  int32_t op;  // as the host numbers them
  int64_t value;
};

// Where the device reports to: memory of the host. `ticket` is written last.
struct Report {
  Verdict verdict;
  uint64_t ticket;
};

// The first bytes of EpHandle.mem.
struct Header {
  uint64_t magic;
  uint64_t sizes;  // hash of the sizes of the exchange
  int32_t rank;
  int32_t num_slots;  // used, padding included
  Verdict verdict;
  uint64_t not_finite;  // ~ the first such element of combine's rows, or 0
};

constexpr uint64_t kMagic = 0x316e6c63636e7065;  // "epnccln1"
constexpr int32_t kHeaderBytes = 64;
static_assert(sizeof(Header) <= kHeaderBytes, "");

// What a rank tells the others: its choices per expert [E], then these words.
enum Word : int32_t {
  kWordFault,
  kWordChoice,
  kWordValue,                     // 64 bits in two words
  kWordProgram = kWordValue + 2,  // likewise
  kWords = kWordProgram + 2,
};

constexpr int32_t kWarp = 32;  // threads

// Choices that one thread block counts; the slots of a choice are counted
// within its chunk and from chunk to chunk.
constexpr int32_t kChunk = 256;

constexpr uint32_t kNan = 0xffffffff;  // in every float type

// A routing in device memory. All arrays are parts of EpHandle.mem, but the
// input and the four that ep_prepare returns.
struct Routing {
  int32_t num_experts, num_local, ep_size, rank;
  int32_t num_choices, top_k, capacity, alignment;
  int32_t drop, index_is_int64;
  uint64_t sizes;        // hash of the sizes, which an op and its handle share
  uint64_t program;      // hash of all that the ranks of a prepare share
  const void* topk_idx;  // [T K]
  const int32_t* place;  // [2] as in PrepareArgs, or null
  int32_t index;         // the first of these, as the group knows it

  Header* header;
  int64_t* choices;       // [T K] expert, -1 if unused, invalid or dropped
  int32_t* chunk_starts;  // [chunks][E] choices of an expert in earlier chunks
  int32_t* told;          // [E + kWords]
  int32_t* heard;         // [P][E + kWords], what each rank told
  int32_t* totals;        // [E] choices of all ranks
  int32_t* before;        // [E] choices of lower ranks
  int32_t* offsets;       // [E] first slot of the slab, on its rank
  int32_t* needs;         // [P] slots that a rank would need
  uint32_t* theirs;       // [num_theirs] what NCCL EP keeps
  int64_t num_theirs;

  int32_t* group_sizes;        // [L]
  int32_t* token_counts;       // [L]
  int32_t* total_recv_tokens;  // [1]
  Report* report;
  uint64_t ticket;
};

// A mover's rows and weights, as NCCL EP left them.
struct Moved {
  int32_t num_rows;
  int32_t row_words;  // of 32 bits
  int32_t weights_per_row;
  int32_t fill_tail;  // rows from header->num_slots on become `tail`
  uint32_t tail;
  uint32_t* rows;
  uint32_t* weights;  // [rows][weights_per_row], or null
  Report* report;     // of what is found wrong

  // Of a combine in checked mode.
  int32_t row_elements;
  uint32_t exponent;  // the bits that are all ones in what is not finite
  int32_t op;         // for the report
};

}  // namespace ep::nccl

#endif  // EP_FFI_BACKENDS_NCCL_KERNELS_H_
