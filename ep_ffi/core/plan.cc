// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/core/plan.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "ep_ffi/core/faults.h"
#include "ep_ffi/core/hash.h"

namespace ep {
namespace {

constexpr uint64_t kMagic = 0x316e616c705f7065;  // "ep_plan1"

struct PlanHeader {
  uint64_t magic;
  uint64_t dims_hash;    // hash of the PlanDims without `drop`
  uint64_t fingerprint;  // a hash of the choices of all ranks
  int64_t rank;
  int64_t num_slots;
  uint64_t checksum;  // over the fields above and the routes that ops read
};

constexpr int64_t kHeaderBytes = 64;
static_assert(sizeof(PlanHeader) <= kHeaderBytes);

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Hashes the sizes that a reader of a plan relies on. Leaves out the overflow
// policy: a layer that fails may use a plan of a layer that drops choices.
uint64_t HashDims(const PlanDims& d) {
  return Hash({d.num_experts, d.ep_size, d.num_tokens, d.top_k, d.capacity,
               d.alignment});
}

// Returns a weighted sum of the routes. Odd weights have an inverse modulo
// 2^64, so every change of a single word changes the sum.
uint64_t SumOf(const Route* routes, int64_t count) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint64_t word;
    std::memcpy(&word, routes + i, sizeof(word));
    sum += word * static_cast<uint64_t>(2 * i + 1);
  }
  return sum;
}

const Route* SendRoutes(const std::byte* mem) {
  return reinterpret_cast<const Route*>(mem + kHeaderBytes);
}

const Route* RecvRoutes(const PlanDims& dims, const std::byte* mem) {
  return SendRoutes(mem) + dims.num_choices();
}

uint64_t Checksum(const PlanDims& dims, const PlanHeader& header,
                  const std::byte* mem) {
  const auto word = [](uint64_t x) { return static_cast<int64_t>(x); };
  return Hash({word(header.fingerprint), header.rank, header.num_slots,
               word(SumOf(SendRoutes(mem), dims.num_choices())),
               word(SumOf(RecvRoutes(dims, mem), header.num_slots))});
}

int64_t Count(const ChoicesView& choices, int64_t expert) {
  return choices.starts[expert + 1] - choices.starts[expert];
}

// Checks the choices of a rank, which may be a peer, and adds the choices to
// the hash `fingerprint`.
Status ReadChoices(const PlanDims& dims, int64_t rank,
                   const ChoicesView& choices, uint64_t* fingerprint) {
  const int64_t num_slots = dims.num_expert_slots();
  bool valid =
      choices.starts[0] == 0 && choices.starts[num_slots] <= dims.num_choices();
  for (int64_t e = 0; valid && e < num_slots; ++e) {
    valid = choices.starts[e] <= choices.starts[e + 1];
  }
  // Computes the largest choice, and a sum that depends on the choices' order.
  const int64_t num_used = valid ? choices.starts[num_slots] : 0;
  uint32_t largest = 0, sum = 0;
  for (int64_t i = 0; i < num_used; ++i) {
    const auto choice = static_cast<uint32_t>(choices.order[i]);
    largest = std::max(largest, choice);
    sum += choice * static_cast<uint32_t>(2 * i + 1);
  }
  valid &= num_used == 0 || largest < dims.num_choices();
  if (!valid) {
    return Status(Code::kInternal,
                  StrCat("the routing that rank ", rank,
                         " sent is corrupt; please report this as a bug"));
  }
  for (int64_t e = 1; e <= num_slots; ++e) {
    *fingerprint = Hash(*fingerprint, choices.starts[e]);
  }
  *fingerprint = Hash(*fingerprint, sum);
  return Status();
}

// Returns the first slot of each local expert's slab on `rank`, and, as last
// element, the number of slots that `rank` needs. Slabs ascend by expert and
// are padded to the alignment.
std::vector<int64_t> SlabOffsets(const PlanDims& dims, int64_t rank,
                                 const std::vector<ChoicesView>& choices) {
  const int64_t num_local = dims.num_local_experts();
  std::vector<int64_t> offsets(num_local + 1, 0);
  for (int64_t j = 0; j < num_local; ++j) {
    int64_t count = 0;
    for (const ChoicesView& source : choices) {
      count += Count(source, rank * num_local + j);
    }
    offsets[j + 1] = offsets[j] + RoundUp(count, dims.alignment);
  }
  return offsets;
}

}  // namespace

Status ValidateDims(const PlanDims& d) {
  const bool positive = d.num_experts > 0 && d.ep_size > 0 &&
                        d.num_tokens >= 0 && d.top_k > 0 && d.capacity > 0 &&
                        d.alignment > 0;
  if (!positive) {
    return Status(Code::kInvalidArgument,
                  StrCat("the sizes num_experts = ", d.num_experts,
                         ", ep_size = ", d.ep_size, ", tokens = ", d.num_tokens,
                         ", top_k = ", d.top_k, ", capacity = ", d.capacity,
                         ", alignment = ", d.alignment, " must be positive"));
  }
  // No rank can need more than P * T * K + L * alignment slots.
  constexpr double kMax = std::numeric_limits<int32_t>::max();
  if (static_cast<double>(d.ep_size) * d.num_tokens * d.top_k +
              static_cast<double>(d.num_local_experts()) * d.alignment >
          kMax ||
      d.capacity > kMax) {
    return Status(Code::kInvalidArgument,
                  "an exchange of 2^31 rows or more is not supported; split "
                  "the tokens into several dispatches");
  }
  return Status();
}

int64_t PlanBytes(const PlanDims& dims) {
  const int64_t routes = dims.num_choices() + dims.capacity;
  return RoundUp(kHeaderBytes + routes * int64_t{sizeof(Route)}, 64);
}

template <typename Index>
Status SortChoices(const PlanDims& dims, const Index* topk_idx,
                   SortedChoices* out) {
  const int64_t num_experts = dims.num_experts;
  const int64_t num_slots = dims.num_expert_slots();
  std::vector<int32_t>& starts = out->starts;
  starts.assign(num_slots + 1, 0);
  std::vector<int64_t> last_token(num_experts, -1);
  for (int64_t t = 0; t < dims.num_tokens; ++t) {
    for (int64_t k = 0; k < dims.top_k; ++k) {
      const int64_t expert = topk_idx[t * dims.top_k + k];
      if (expert == -1) continue;
      if (expert < -1 || expert >= num_experts) {
        return IdOutOfRange(t, k, expert, num_experts);
      }
      if (last_token[expert] == t) {
        return RepeatedId(t, k, expert);
      }
      last_token[expert] = t;
      ++starts[expert + 1];
    }
  }
  for (int64_t e = 0; e < num_slots; ++e) starts[e + 1] += starts[e];

  out->order.resize(dims.num_choices());
  std::vector<int32_t> next(starts.begin(), starts.end() - 1);
  for (int64_t i = 0; i < dims.num_choices(); ++i) {
    if (topk_idx[i] >= 0) out->order[next[topk_idx[i]]++] = i;
  }
  return Status();
}

template Status SortChoices(const PlanDims&, const int32_t*, SortedChoices*);
template Status SortChoices(const PlanDims&, const int64_t*, SortedChoices*);

Status BuildPlan(const PlanDims& dims, int64_t domain, int64_t rank,
                 const std::vector<ChoicesView>& choices,
                 const PlanOutputs& out) {
  const int64_t num_local = dims.num_local_experts();
  const int64_t capacity = dims.capacity;
  PlanHeader header = {kMagic, HashDims(dims), Hash({domain}), rank, 0, 0};
  for (int64_t r = 0; r < dims.ep_size; ++r) {
    EP_RETURN_IF_ERROR(ReadChoices(dims, r, choices[r], &header.fingerprint));
  }

  Route* send = reinterpret_cast<Route*>(out.mem + kHeaderBytes);
  Route* recv = send + dims.num_choices();
  std::fill(send, send + dims.num_choices(), kNoRoute);
  std::fill(recv, recv + capacity, kNoRoute);

  // Routes this rank's tokens, destination by destination.
  const ChoicesView& mine = choices[rank];
  int64_t max_wanted = 0;
  for (int64_t dest = 0; dest < dims.ep_size; ++dest) {
    const std::vector<int64_t> offsets = SlabOffsets(dims, dest, choices);
    if (offsets.back() > capacity && !dims.drop) {
      return Overflow(dest, offsets.back(), capacity);
    }
    max_wanted = std::max(max_wanted, offsets.back());
    for (int64_t j = 0; j < num_local; ++j) {
      const int64_t expert = dest * num_local + j;
      int64_t slot = offsets[j];
      for (int64_t r = 0; r < rank; ++r) slot += Count(choices[r], expert);
      for (int64_t i = mine.starts[expert]; i < mine.starts[expert + 1]; ++i) {
        if (slot < capacity) {
          send[mine.order[i]] = {static_cast<int32_t>(dest),
                                 static_cast<int32_t>(slot)};
        }
        ++slot;
      }
    }
  }

  for (int64_t i = 0; i < dims.num_choices(); ++i) {
    out.kept[i] = send[i].rank >= 0;
  }

  // Routes the tokens that arrive in this rank's slots.
  const std::vector<int64_t> offsets = SlabOffsets(dims, rank, choices);
  for (int64_t j = 0; j < num_local; ++j) {
    int64_t slot = std::min(offsets[j], capacity);
    const int64_t begin = slot;
    int64_t wanted = 0;
    for (int64_t r = 0; r < dims.ep_size; ++r) {
      const int32_t* starts = choices[r].starts + rank * num_local + j;
      wanted += starts[1] - starts[0];
      for (int64_t i = starts[0]; i < starts[1] && slot < capacity; ++i) {
        recv[slot++] = {static_cast<int32_t>(r), choices[r].order[i]};
      }
    }
    out.token_counts[j] = slot - begin;
    out.dropped_counts[j] = wanted - out.token_counts[j];
    out.group_sizes[j] = std::min(offsets[j + 1], capacity) - begin;
  }
  out.total_recv_tokens[0] = offsets.back();
  out.max_recv_tokens[0] = max_wanted;
  header.num_slots = std::min(offsets.back(), capacity);

  std::memset(out.mem, 0, kHeaderBytes);
  std::memcpy(out.mem, &header, sizeof(header));
  std::byte* end = reinterpret_cast<std::byte*>(recv + capacity);
  std::memset(end, 0, out.mem + PlanBytes(dims) - end);
  SealPlan(dims, out.mem);
  return Status();
}

void SealPlan(const PlanDims& dims, std::byte* mem) {
  PlanHeader header;
  std::memcpy(&header, mem, sizeof(header));
  if (header.num_slots < 0 || header.num_slots > dims.capacity) return;
  header.checksum = Checksum(dims, header, mem);
  std::memcpy(mem, &header, sizeof(header));
}

Status Plan::Open(const PlanDims& dims, int64_t rank, const std::byte* mem,
                  int64_t bytes, Plan* out) {
  if (bytes != PlanBytes(dims) ||
      reinterpret_cast<uintptr_t>(mem) % alignof(Route) != 0) {
    return Status(Code::kInvalidArgument,
                  StrCat("handle.mem has ", bytes,
                         " bytes, but this layer's "
                         "routing state has ",
                         PlanBytes(dims), " bytes (aligned to ", alignof(Route),
                         "); pass the handle that ep_prepare returned for "
                         "this layer and these tokens"));
  }
  PlanHeader header;
  std::memcpy(&header, mem, sizeof(header));
  if (header.magic != kMagic || header.dims_hash != HashDims(dims) ||
      header.rank != rank || header.num_slots < 0 ||
      header.num_slots > dims.capacity ||
      header.checksum != Checksum(dims, header, mem)) {
    return Status(Code::kInvalidArgument,
                  "handle.mem is not the routing state that ep_prepare "
                  "returned on this rank for this layer; pass that handle "
                  "unchanged");
  }
  out->send_ = SendRoutes(mem);
  out->recv_ = RecvRoutes(dims, mem);
  out->num_slots_ = header.num_slots;
  out->fingerprint_ = header.fingerprint;
  return Status();
}

}  // namespace ep
