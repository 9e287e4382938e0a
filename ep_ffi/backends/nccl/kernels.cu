// SPDX-License-Identifier: Apache-2.0

// The device side of ep_prepare, and what the movers do to NCCL EP's results.
//
// NCCL EP writes out of bounds for an id past the last expert and traps on
// overflow, so it is given no choice that this file has not seen: each rank
// checks and counts its own, all ranks exchange their counts, and from these
// each rank comes to the same verdict and to the slot of each of its choices.
// Choices that are dropped, and all choices of a routing that is at fault, are
// passed on as unused. They are 64 bits wide: NCCL EP 0.2.0 reads back what it
// cached of narrower ones as if they were not.
//
// No kernel uses shared memory or a barrier of its block. What needs an order
// is another kernel, or one warp.

#include "kernels.h"

#ifndef EP_NCCL_HAS_WARPS  // what runs these kernels elsewhere has its own
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

__device__ int32_t RoundUp(int32_t value, int32_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

__device__ const int32_t* WordsOf(const Routing& r, int32_t rank) {
  return r.heard + rank * (r.num_experts + kWords) + r.num_experts;
}

__device__ void Write64(uint64_t value, int32_t* words) {
  words[0] = static_cast<int32_t>(value);
  words[1] = static_cast<int32_t>(value >> 32);
}

__device__ uint64_t Read64(const int32_t* words) {
  return static_cast<uint32_t>(words[0]) |
         static_cast<uint64_t>(static_cast<uint32_t>(words[1])) << 32;
}

__device__ void Send(Report* report, const Verdict& verdict, uint64_t ticket) {
  report->verdict = verdict;
  __threadfence_system();
  *static_cast<volatile uint64_t*>(&report->ticket) = ticket;
}

// Keeps what an earlier mover has sent and the host has not taken.
__device__ void SendFirst(Report* report, const Verdict& verdict) {
  if (*static_cast<volatile uint64_t*>(&report->ticket) == 0) {
    Send(report, verdict, 1);
  }
}

// The verdict on the handle that an op was given.
__device__ Verdict Examine(const Routing& r) {
  const Header& header = *r.header;
  if (header.magic != kMagic || header.sizes != r.sizes ||
      header.rank != r.rank || header.num_slots < 0) {
    return {Fault::kForeignHandle, r.rank, 0, 0, 0};
  }
  return header.verdict;
}

__device__ void Fill(int64_t row, int32_t width, uint32_t value,
                     uint32_t* words) {
  for (int32_t i = threadIdx.x; i < width; i += blockDim.x) {
    words[row * width + i] = value;
  }
}

}  // namespace

// A thread per choice. `told` and `chunk_starts` are zero before.
extern "C" __global__ void EpCountChoices(Routing r) {
  const int32_t choice = ThreadIndex();
  if (choice >= r.num_choices) return;
  const int64_t id = IdAt(r, choice);
  if (CheckId(r, choice) != Fault::kNone) {
    // The first fault has the highest number.
    atomicMax(&r.told[r.num_experts + kWordChoice], r.num_choices - choice);
  } else if (id >= 0) {
    atomicAdd(&r.chunk_starts[choice / kChunk * r.num_experts + id], 1);
  }
}

// A warp per expert.
extern "C" __global__ void EpTell(Routing r) {
  const int32_t expert = WarpIndex();
  if (expert >= r.num_experts) return;
  const auto start = [&](int32_t chunk) -> int32_t& {
    return r.chunk_starts[chunk * r.num_experts + expert];
  };
  const int32_t sum =
      WarpScan(Lane(), (r.num_choices + kChunk - 1) / kChunk, start,
               [&](int32_t chunk, int32_t before) { start(chunk) = before; });
  if (Lane() != 0) return;
  r.told[expert] = sum;
  if (expert != 0) return;
  int32_t* words = r.told + r.num_experts;
  Write64(r.program, words + kWordProgram);
  if (r.place && r.place[0] != r.index) {
    words[kWordFault] = static_cast<int32_t>(Fault::kOtherPlace);
    words[kWordChoice] = 0;
    Write64(r.place[0], words + kWordValue);
    return;
  }
  if (words[kWordChoice] == 0) return;
  const int32_t choice = r.num_choices - words[kWordChoice];
  words[kWordFault] = static_cast<int32_t>(CheckId(r, choice));
  words[kWordChoice] = choice;
  Write64(IdAt(r, choice), words + kWordValue);
}

// A warp per rank. What all ranks told has been gathered in `heard`.
extern "C" __global__ void EpPlaceSlabs(Routing r) {
  const int32_t rank = WarpIndex();
  if (rank >= r.ep_size) return;
  const int32_t first_expert = rank * r.num_local;
  const auto count = [&](int32_t j) {
    const int32_t expert = first_expert + j;
    int32_t sum = 0;
    for (int32_t source = 0; source < r.ep_size; ++source) {
      if (source == r.rank) r.before[expert] = sum;
      sum += r.heard[source * (r.num_experts + kWords) + expert];
    }
    r.totals[expert] = sum;
    return RoundUp(sum, r.alignment);
  };
  const auto place = [&](int32_t j, int32_t offset) {
    const int32_t total = r.totals[first_expert + j];
    r.offsets[first_expert + j] = offset;
    if (rank != r.rank) return;
    const int32_t left = max(r.capacity - offset, 0);
    r.token_counts[j] = min(total, left);
    r.group_sizes[j] = min(RoundUp(total, r.alignment), left);
  };
  const int32_t need = WarpScan(Lane(), r.num_local, count, place);
  if (Lane() != 0) return;
  r.needs[rank] = need;
  if (rank == r.rank) *r.total_recv_tokens = need;
}

// One warp. It sees what every other rank's sees.
extern "C" __global__ void EpJudge(Routing r) {
  if (WarpIndex() > 0) return;
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
  if (Lane() != 0) return;
  Verdict verdict = {Fault::kNone, 0, 0, 0, 0};
  if (other < r.ep_size) {  // what the counts mean is not known then
    verdict = {Fault::kDisagreement, other, 0, 0, 0};
  } else if (wrong < r.ep_size) {
    const int32_t* words = WordsOf(r, wrong);
    verdict = {static_cast<Fault>(words[kWordFault]), wrong, words[kWordChoice],
               0, static_cast<int64_t>(Read64(words + kWordValue))};
  } else if (full < r.ep_size) {
    verdict = {Fault::kOverflow, full, 0, 0, r.needs[full]};
  }
  Header& header = *r.header;
  header.magic = kMagic;
  header.sizes = r.sizes;
  header.rank = r.rank;
  header.num_slots = min(r.needs[r.rank], r.capacity);
  header.verdict = verdict;
  Send(r.report, verdict, r.ticket);
}

// A thread per choice.
extern "C" __global__ void EpChoose(Routing r) {
  const int32_t choice = ThreadIndex();
  if (choice >= r.num_choices) return;
  r.choices[choice] = -1;
  const int64_t id = IdAt(r, choice);
  if (r.header->verdict.fault != Fault::kNone || id == -1) return;
  const int32_t chunk = choice / kChunk;
  int32_t slot =
      r.offsets[id] + r.before[id] + r.chunk_starts[chunk * r.num_experts + id];
  for (int32_t i = chunk * kChunk; i < choice; ++i) slot += IdAt(r, i) == id;
  if (slot < r.capacity) r.choices[choice] = static_cast<int32_t>(id);
}

// Any number of threads, before NCCL EP reads a handle. It trusts what it
// finds, and would trap, or read and write anywhere; so of what is not the
// routing of this op, zeros are left, which are a routing of nothing. A handle
// of another op is lost by that, as its next op will say.
extern "C" __global__ void EpGuard(Routing r) {
  if (Examine(r).fault != Fault::kForeignHandle) return;
  const int32_t stride = gridDim.x * blockDim.x;
  for (int64_t i = ThreadIndex(); i < r.num_theirs; i += stride) {
    r.theirs[i] = 0;
  }
  r.header->magic = 0;
}

// Any number of blocks, which take turns at the rows of a mover's result, slots
// or tokens. A routing at fault makes all NaN. Else NCCL EP has written all but
// the tail.
extern "C" __global__ void EpFinish(Routing r, Moved m) {
  const Verdict verdict = Examine(r);
  int32_t first = 0;
  uint32_t value = kNan;
  if (verdict.fault == Fault::kNone) {
    first = m.fill_tail ? r.header->num_slots : m.num_rows;
    value = m.tail;
  }
  for (int64_t row = first + blockIdx.x; row < m.num_rows; row += gridDim.x) {
    Fill(row, m.row_words, value, m.rows);
    if (m.weights) Fill(row, m.weights_per_row, value, m.weights);
  }
  if (ThreadIndex() == 0 && verdict.fault == Fault::kForeignHandle) {
    SendFirst(m.report, verdict);
  }
}

// A block per row of combine's result. `header->not_finite` is zero before.
extern "C" __global__ void EpFindNotFinite(Routing r, Moved m) {
  if (Examine(r).fault != Fault::kNone) return;
  const int64_t row = blockIdx.x;
  const int32_t per_word = m.row_elements / m.row_words;
  for (int32_t i = threadIdx.x; i < m.row_elements; i += blockDim.x) {
    const uint32_t word = m.rows[row * m.row_words + i / per_word];
    const uint32_t element = word >> (i % per_word * 16);
    if ((element & m.exponent) != m.exponent) continue;
    // The first element has the largest complement.
    const uint64_t found = row * m.row_elements + i;
    atomicMax(&r.header->not_finite, ~found);
    return;
  }
}

// One thread.
extern "C" __global__ void EpReportNotFinite(Routing r, Moved m) {
  if (threadIdx.x != 0 || Examine(r).fault != Fault::kNone) return;
  if (r.header->not_finite == 0) return;
  const int64_t found = ~r.header->not_finite;
  const int32_t token = found / m.row_elements;
  SendFirst(m.report,
            {Fault::kNotFinite, r.rank, token, m.op, found % m.row_elements});
}

}  // namespace ep::nccl
