// SPDX-License-Identifier: Apache-2.0

// The kernels that run before and after NCCL EP's kernels.
//
// NCCL EP writes out of bounds for an id past the last expert, and traps on
// overflow. So our kernels check all choices first. Each rank checks and counts
// its own choices, and all ranks exchange their counts. From the counts, each
// rank computes the same outcome, and the slots of its choices. Dropped
// choices, and all choices of a routing with a fault, are marked as unused. A
// routing with a fault also has counts of 0 and totals of -1. Choices have 64
// bits, because NCCL EP 0.2.0 caches narrower choices and reads the cache as 64
// bits.
//
// No kernel uses shared memory or a barrier of its block. Steps that need an
// order are separate kernels, or run in one warp.

#include "kernels.h"

#ifndef EP_NCCL_IS_FAKE  // the fake defines these functions itself
#include "warp.h"
#endif

namespace ep::nccl {
namespace {

__device__ int32_t ThreadIndex() {
  return blockIdx.x * blockDim.x + threadIdx.x;
}

__device__ int32_t WarpIndex() { return ThreadIndex() / kWarp; }

__device__ int32_t Lane() { return threadIdx.x % kWarp; }

__device__ int64_t IdAt(const Routing& r, int32_t choice) {
  return r.index_is_int64 ? static_cast<const int64_t*>(r.topk_idx)[choice]
                          : static_cast<const int32_t*>(r.topk_idx)[choice];
}

__device__ Fault CheckId(const Routing& r, int32_t choice) {
  const int64_t id = IdAt(r, choice);
  if (id == -1) return Fault::kNone;
  if (id < -1 || id >= r.num_experts) return Fault::kIdOutOfRange;
  for (int32_t i = choice - choice % r.top_k; i < choice; ++i) {
    if (IdAt(r, i) == id) return Fault::kRepeatedId;
  }
  return Fault::kNone;
}

// Returns the number of an expert's choices in earlier chunks. Before
// EpSumChoices runs, returns the number of the expert's choices in this chunk.
__device__ int32_t& ChunkStart(const Routing& r, int32_t chunk,
                               int32_t expert) {
  return r.chunk_starts[chunk * (r.num_expert_slots + 1) + expert];
}

// Returns the first invalid choice of a chunk, or num_choices.
__device__ int32_t& FirstWrong(const Routing& r, int32_t chunk) {
  return ChunkStart(r, chunk, r.num_expert_slots);
}

__device__ int32_t RoundUp(int32_t value, int32_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

__device__ const int32_t* WordsOf(const Routing& r, int32_t rank) {
  return r.received + rank * (r.num_expert_slots + kWords) + r.num_expert_slots;
}

__device__ void Write64(uint64_t value, int32_t* words) {
  words[0] = static_cast<int32_t>(value);
  words[1] = static_cast<int32_t>(value >> 32);
}

__device__ uint64_t Read64(const int32_t* words) {
  return static_cast<uint32_t>(words[0]) |
         static_cast<uint64_t>(static_cast<uint32_t>(words[1])) << 32;
}

__device__ void WriteReport(Report* report, const Outcome& outcome,
                            uint64_t ticket) {
  report->outcome = outcome;
  __threadfence_system();
  *static_cast<volatile uint64_t*>(&report->ticket) = ticket;
}

// Writes the sequence number of an op to a counter in host memory.
__device__ void CountOp(uint64_t number, uint64_t* count) {
  *static_cast<volatile uint64_t*>(count) = number;
}

// Writes a report if the host has taken the previous report.
__device__ void WriteFirstReport(Report* report, const Outcome& outcome) {
  if (*static_cast<volatile uint64_t*>(&report->ticket) == 0) {
    WriteReport(report, outcome, 1);
  }
}

// Returns the outcome of the op's routing, or kForeignHandle if the handle is
// not a routing for this op.
__device__ Outcome CheckHandle(const Routing& r) {
  const Header& header = *r.header;
  if (header.magic != kMagic || header.sizes != r.sizes ||
      header.rank != r.rank || header.num_slots < 0) {
    return {Fault::kForeignHandle, r.rank, 0, 0, 0};
  }
  return header.outcome;
}

// Returns the first fault of all ranks. All threads of a warp must call it. All
// warps of all ranks get the same result, because `received` is the same.
__device__ Outcome FindFault(const Routing& r) {
  const uint64_t program = Read64(WordsOf(r, 0) + kWordProgram);
  const auto differs = [&](int32_t rank) {
    return Read64(WordsOf(r, rank) + kWordProgram) != program;
  };
  const auto is_wrong = [&](int32_t rank) {
    return WordsOf(r, rank)[kWordFault] != 0;
  };
  const auto is_full = [&](int32_t rank) {
    return !r.drop && r.needs[rank] > r.capacity;
  };
  const int32_t other = WarpFind(Lane(), r.ep_size, differs);
  const int32_t wrong = WarpFind(Lane(), r.ep_size, is_wrong);
  const int32_t full = WarpFind(Lane(), r.ep_size, is_full);
  // Compares programs first: counts of another program have another meaning.
  if (other < r.ep_size) return {Fault::kDisagreement, other, 0, 0, 0};
  if (wrong < r.ep_size) {
    const int32_t* words = WordsOf(r, wrong);
    return {static_cast<Fault>(words[kWordFault]), wrong, words[kWordChoice], 0,
            static_cast<int64_t>(Read64(words + kWordValue))};
  }
  if (full < r.ep_size) return {Fault::kOverflow, full, 0, 0, r.needs[full]};
  return {Fault::kNone, 0, 0, 0, 0};
}

// Writes the header, totals and report. All threads of a warp must call it.
__device__ void WriteOutcome(const Routing& r, const Outcome& outcome) {
  const int32_t largest =
      WarpMax(Lane(), r.ep_size, [&](int32_t rank) { return r.needs[rank]; });
  if (Lane() != 0) return;
  Header& header = *r.header;
  header.magic = kMagic;
  header.sizes = r.sizes;
  header.rank = r.rank;
  header.num_slots = min(r.needs[r.rank], r.capacity);
  header.outcome = outcome;
  const bool failed = outcome.fault != Fault::kNone;
  *r.total_recv_tokens = failed ? -1 : r.needs[r.rank];
  *r.max_recv_tokens = failed ? -1 : largest;
  CountOp(r.number, &r.progress->ended);
  WriteReport(r.report, outcome, r.ticket);
}

// Writes the sizes of an expert segment of this rank.
__device__ void WriteSlab(const Routing& r, int32_t j, bool failed) {
  const int32_t expert = r.rank * r.num_local + j;
  const int32_t total = failed ? 0 : r.totals[expert];
  const int32_t left = failed ? 0 : max(r.capacity - r.offsets[expert], 0);
  r.group_sizes[j] = min(RoundUp(total, r.alignment), left);
  r.token_counts[j] = min(total, left);
  r.dropped_counts[j] = total - r.token_counts[j];
}

// Returns whether a choice has a slot. The routing must have no fault.
__device__ bool HasSlot(const Routing& r, int32_t choice) {
  const int64_t id = IdAt(r, choice);
  if (id == -1) return false;
  const int32_t chunk = choice / kChunk;
  int32_t slot = r.offsets[id] + r.before[id] + ChunkStart(r, chunk, id);
  for (int32_t i = chunk * kChunk; i < choice; ++i) slot += IdAt(r, i) == id;
  return slot < r.capacity;
}

__device__ void Fill(int64_t row, int32_t width, uint32_t value,
                     uint32_t* words) {
  for (int32_t i = threadIdx.x; i < width; i += blockDim.x) {
    words[row * width + i] = value;
  }
}

}  // namespace

// Counts the choices of each expert in a chunk, and finds the first invalid
// choice. Runs a block per chunk.
extern "C" __global__ void EpCountChoices(Routing r) {
  const int32_t chunk = blockIdx.x;
  const int32_t first = chunk * kChunk;
  const int32_t size = min(r.num_choices - first, kChunk);
  for (int32_t e = threadIdx.x; e < r.num_expert_slots; e += blockDim.x) {
    int32_t count = 0;
    for (int32_t i = 0; i < size; ++i) count += IdAt(r, first + i) == e;
    ChunkStart(r, chunk, e) = count;
  }
  if (threadIdx.x >= kWarp) return;
  const int32_t i = WarpFind(Lane(), size, [&](int32_t i) {
    return CheckId(r, first + i) != Fault::kNone;
  });
  FirstWrong(r, chunk) = i < size ? first + i : r.num_choices;
}

// Sums the counts of the chunks, and completes `sent`. Runs a warp per expert
// slot.
extern "C" __global__ void EpSumChoices(Routing r) {
  const int32_t expert = WarpIndex();
  if (expert >= r.num_expert_slots) return;
  const int32_t sum = WarpScan(
      Lane(), r.num_chunks,
      [&](int32_t chunk) { return ChunkStart(r, chunk, expert); },
      [&](int32_t chunk, int32_t before) {
        ChunkStart(r, chunk, expert) = before;
      });
  if (Lane() == 0) r.sent[expert] = sum;
  if (expert != 0) return;
  const int32_t wrong = WarpFind(Lane(), r.num_chunks, [&](int32_t chunk) {
    return FirstWrong(r, chunk) < r.num_choices;
  });
  if (Lane() != 0) return;
  CountOp(r.number, &r.progress->begun);
  Outcome found = {};
  if (r.place && r.place[0] != r.index) {
    found = {Fault::kOtherPlace, 0, 0, 0, r.place[0]};
  } else if (wrong < r.num_chunks) {
    const int32_t choice = FirstWrong(r, wrong);
    found = {CheckId(r, choice), 0, choice, 0, IdAt(r, choice)};
  }
  int32_t* words = r.sent + r.num_expert_slots;
  words[kWordFault] = static_cast<int32_t>(found.fault);
  words[kWordChoice] = found.choice;
  Write64(found.value, words + kWordValue);
  Write64(r.program, words + kWordProgram);
}

// Computes the offsets of the expert segments and the number of slots that each
// rank needs. Runs a warp per rank, after the all-gather to `received`.
extern "C" __global__ void EpPlaceSlabs(Routing r) {
  const int32_t rank = WarpIndex();
  if (rank >= r.ep_size) return;
  const int32_t first_expert = rank * r.num_local;
  const auto count = [&](int32_t j) {
    const int32_t expert = first_expert + j;
    int32_t sum = 0;
    for (int32_t source = 0; source < r.ep_size; ++source) {
      if (source == r.rank) r.before[expert] = sum;
      sum += r.received[source * (r.num_expert_slots + kWords) + expert];
    }
    r.totals[expert] = sum;
    return RoundUp(sum, r.alignment);
  };
  const auto place = [&](int32_t j, int32_t offset) {
    r.offsets[first_expert + j] = offset;
  };
  const int32_t need = WarpScan(Lane(), r.num_local, count, place);
  if (Lane() == 0) r.needs[rank] = need;
}

// Writes the outcome of the routing, the sizes of this rank's expert segments,
// the kept choices, and the choices for NCCL EP. Runs a thread per choice, at
// least one per local expert, in whole warps.
extern "C" __global__ void EpWriteRouting(Routing r) {
  const Outcome outcome = FindFault(r);
  const bool failed = outcome.fault != Fault::kNone;
  if (WarpIndex() == 0) WriteOutcome(r, outcome);
  const int32_t i = ThreadIndex();
  if (i < r.num_local) WriteSlab(r, i, failed);
  if (i >= r.num_choices) return;
  const bool kept = !failed && HasSlot(r, i);
  const int64_t id = IdAt(r, i);
  const int64_t local = id % r.num_local;
  r.choices[i] = kept ? id / r.num_local * r.nccl_ep_local + local : -1;
  r.kept[i] = kept;
}

// Fills a handle with zeros, a routing without choices, if it is not a routing
// for this op. NCCL EP does not check handles, and would trap or access memory
// out of bounds. If the handle was a routing for another op, that op will
// report a foreign handle. Runs any number of threads.
extern "C" __global__ void EpClearForeign(Routing r) {
  if (ThreadIndex() == 0) CountOp(r.number, &r.progress->begun);
  if (CheckHandle(r).fault != Fault::kForeignHandle) return;
  const int32_t stride = gridDim.x * blockDim.x;
  for (int64_t i = ThreadIndex(); i < r.num_nccl_ep_words; i += stride) {
    r.nccl_ep_words[i] = 0;
  }
  r.header->magic = 0;
}

// Writes the tail (the rows past the used slots), because NCCL EP does not. If
// the routing has a fault, writes NaN to all rows. Runs any number of blocks.
extern "C" __global__ void EpFinish(Routing r, Moved m) {
  if (ThreadIndex() == 0) {
    CountOp(r.number, &r.progress->ended);
    if (m.exponent) r.header->not_finite = 0;
  }
  const Outcome outcome = CheckHandle(r);
  int32_t first = 0;
  uint32_t value = kNan;
  if (outcome.fault == Fault::kNone) {
    first = m.fill_tail ? r.header->num_slots : m.num_rows;
    value = m.tail;
  }
  for (int64_t row = first + blockIdx.x; row < m.num_rows; row += gridDim.x) {
    Fill(row, m.row_words, value, m.rows);
    if (m.weights) Fill(row, m.weights_per_row, value, m.weights);
  }
  if (ThreadIndex() == 0 && outcome.fault == Fault::kForeignHandle) {
    WriteFirstReport(m.report, outcome);
  }
}

// Finds the first element of combine's result that is not finite. Runs a block
// per row, after EpFinish has set `header->not_finite` to zero.
extern "C" __global__ void EpFindNotFinite(Routing r, Moved m) {
  if (CheckHandle(r).fault != Fault::kNone) return;
  const int64_t row = blockIdx.x;
  const int32_t per_word = m.row_elements / m.row_words;
  for (int32_t i = threadIdx.x; i < m.row_elements; i += blockDim.x) {
    const uint32_t word = m.rows[row * m.row_words + i / per_word];
    const uint32_t element = word >> (i % per_word * 16);
    if ((element & m.exponent) != m.exponent) continue;
    const uint64_t found = row * m.row_elements + i;
    atomicMax(&r.header->not_finite, ~found);
    return;
  }
}

// Reports the element that EpFindNotFinite found. Runs one thread.
extern "C" __global__ void EpReportNotFinite(Routing r, Moved m) {
  if (threadIdx.x != 0 || CheckHandle(r).fault != Fault::kNone) return;
  if (r.header->not_finite == 0) return;
  const int64_t found = ~r.header->not_finite;
  const int32_t token = found / m.row_elements;
  WriteFirstReport(m.report, {Fault::kNotFinite, r.rank, token, m.op,
                              found % m.row_elements});
}

}  // namespace ep::nccl
