// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/movers/job.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <initializer_list>
#include <new>

#include "ep_ffi/backends/host/movers/row_math.h"
#include "ep_ffi/core/faults.h"
#include "ep_ffi/core/pages.h"

namespace ep::host {
namespace {

constexpr size_t kAlign = 64;

constexpr const char* kNames[Signature::kNumFields] = {
    "the op",
    "num_experts",
    "tokens per rank",
    "top_k",
    "hidden size",
    "dtype",
    "capacity",
    "alignment",
    "overflow",
    "tail",
    "wire",
    "the configuration of the layer (a hash of it)",
    "weights",
    "the routing (a hash of it)",
    "bytes of rows",
    "bytes of weights"};

// Returns the name of a value, or the number if the value has no name.
std::string OneOf(std::initializer_list<const char*> names, int64_t value) {
  return 0 <= value && value < static_cast<int64_t>(names.size())
             ? names.begin()[value]
             : std::to_string(value);
}

// Large enough to hide the cost of scheduling a chunk. Small enough to divide a
// small exchange among a few threads.
constexpr int64_t kChunkBytes = 256 << 10;

int64_t RowsPerChunk(int64_t bytes_per_row) {
  return std::max<int64_t>(1,
                           kChunkBytes / std::max<int64_t>(1, bytes_per_row));
}

int64_t NumChunks(int64_t rows, int64_t bytes_per_row) {
  const int64_t per_chunk = RowsPerChunk(bytes_per_row);
  return (rows + per_chunk - 1) / per_chunk;
}

Status CorruptRoute(const Route& route) {
  return Status(
      Code::kInvalidArgument,
      StrCat("handle.mem points to row ", route.index, " of rank ", route.rank,
             ", which does not exist; pass the handle that "
             "ep_prepare returned, unchanged"));
}

bool IsValid(const Route& route, int64_t ranks, int64_t rows) {
  return route.rank >= 0 && route.rank < ranks && route.index >= 0 &&
         route.index < rows;
}

// Copies the choices of a rank, and returns a view of the copy.
ChoicesView Copy(const PlanDims& dims, const ChoicesView& choices,
                 SortedChoices* copy) {
  copy->starts.assign(choices.starts,
                      choices.starts + dims.num_expert_slots() + 1);
  copy->order.assign(choices.order, choices.order + dims.num_choices());
  return {copy->starts.data(), copy->order.data()};
}

}  // namespace

// ---- What the ranks compare

size_t Signature::second_offset() const {
  return (values[kFirstBytes] + kAlign - 1) / kAlign * kAlign;
}

size_t Signature::staged_bytes() const {
  return second_offset() + values[kSecondBytes];
}

bool Signature::FitsIn(size_t bytes) const {
  for (const Field size : {kFirstBytes, kSecondBytes}) {
    if (values[size] < 0 || values[size] > static_cast<int64_t>(bytes)) {
      return false;
    }
  }
  return staged_bytes() <= bytes;
}

std::optional<Signature::Field> Signature::FirstDifference(
    const Signature& other) const {
  for (int f = 0; f < kNumFields; ++f) {
    if (values[f] != other.values[f]) return static_cast<Field>(f);
  }
  return std::nullopt;
}

const char* Signature::Name(Field field) { return kNames[field]; }

std::string Signature::ValueOf(Field field) const {
  const int64_t value = values[field];
  switch (field) {
    case kOp:
      return OpName(static_cast<Op>(value));
    case kDType:
      return OneOf({"float32", "bfloat16", "float16"}, value);
    case kDrop:
      return OneOf({"error", "drop"}, value);
    case kTail:
      return OneOf({"unspecified", "zero", "NaN"}, value);
    case kWire:
      return OneOf({"None", "fp8_block128", "mxfp8"}, value);
    case kWeighted:
      return OneOf({"none", "given"}, value);
    default:
      return std::to_string(value);
  }
}

Signature Job::signature() const {
  const Layer& layer = call.site->layer;
  Signature s;
  s[Signature::kOp] = static_cast<int64_t>(call.op);
  s[Signature::kExperts] = dims.num_experts;
  s[Signature::kTokens] = dims.num_tokens;
  s[Signature::kTopK] = dims.top_k;
  s[Signature::kWidth] = in.width;
  s[Signature::kDType] = static_cast<int64_t>(in.dtype);
  s[Signature::kCapacity] = dims.capacity;
  s[Signature::kAlignment] = dims.alignment;
  s[Signature::kDrop] = dims.drop;
  s[Signature::kTail] = static_cast<int64_t>(layer.tail);
  s[Signature::kWire] = layer.wire;
  s[Signature::kFingerprint] = kind == kPrepare ? layer.fingerprint : 0;
  s[Signature::kWeighted] = in_weights != nullptr;
  s[Signature::kRouting] = static_cast<int64_t>(plan.fingerprint());
  if (kind == kPrepare) {
    s[Signature::kFirstBytes] = choices.starts.size() * sizeof(int32_t);
    s[Signature::kSecondBytes] = choices.order.size() * sizeof(int32_t);
    return s;
  }
  const int64_t num_weights =
      kind == kScatter ? dims.num_choices() : dims.capacity;
  s[Signature::kFirstBytes] = in.count * in.row_bytes();
  s[Signature::kSecondBytes] =
      in_weights ? num_weights * int64_t{sizeof(float)} : 0;
  return s;
}

// ---- Before the other ranks have posted

Status Job::Open() {
  if (kind == kPrepare) return SortTopk();
  EP_RETURN_IF_ERROR(Plan::Open(dims, rank, mem.data, mem.bytes, &plan));
  const int64_t num_rows = kind == kScatter ? plan.num_slots() : out.count;
  PreferHugePages(out.data, num_rows * out.row_bytes());
  return Status();
}

Status Job::SortTopk() {
  const int64_t place = domain * dims.ep_size + rank;
  if (prepare.place && prepare.place[0] != place) {
    return OtherPlace(prepare.place[0], place, dims.ep_size);
  }
  EP_RETURN_IF_ERROR(ValidateDims(dims));
  const void* topk_idx = prepare.topk_idx;
  try {
    return prepare.index_is_int64
               ? SortChoices(dims, static_cast<const int64_t*>(topk_idx),
                             &choices)
               : SortChoices(dims, static_cast<const int32_t*>(topk_idx),
                             &choices);
  } catch (const std::bad_alloc& e) {  // the arrays may be large
    return NoMemory(e);
  }
}

Arrays Job::arrays() const {
  if (kind != kPrepare) return {in.data, in_weights};
  return {choices.starts.data(), choices.order.data()};
}

void Job::Stage(const std::vector<bool>& is_local, std::byte* segment) const {
  const Signature s = signature();
  std::byte* second = segment + s.second_offset();
  if (kind == kGather) return StageSlots(is_local, segment, second);
  const auto copy = [](std::byte* to, const void* from, int64_t bytes) {
    if (bytes > 0) std::memcpy(to, from, bytes);
  };
  copy(segment, arrays().first, s[Signature::kFirstBytes]);
  copy(second, arrays().second, s[Signature::kSecondBytes]);
}

// Copies only the slots that another process reads. Pages without such slots
// stay untouched.
void Job::StageSlots(const std::vector<bool>& is_local, std::byte* rows,
                     std::byte* weights) const {
  const int64_t num_ranks = is_local.size();
  const int64_t row_bytes = in.row_bytes();
  for (int64_t slot = 0; slot < plan.num_slots(); ++slot) {
    const int32_t source = plan.recv()[slot].rank;
    if (source < 0 || source >= num_ranks || is_local[source]) continue;
    std::memcpy(rows + slot * row_bytes, in.data + slot * row_bytes, row_bytes);
    if (!in_weights) continue;
    std::memcpy(weights + slot * sizeof(float), in_weights + slot,
                sizeof(float));
  }
}

// ---- After all ranks have posted

int64_t Job::num_chunks() const {
  if (kind == kPrepare) return 1;
  if (kind == kGather) {
    return NumChunks(dims.num_tokens, out.row_bytes() * dims.top_k);
  }
  // The last chunk writes the tail, unless the tail is unspecified.
  return NumChunks(plan.num_slots(), out.row_bytes()) +
         (call.site->layer.tail != Tail::kUnspecified);
}

Status Job::RunChunk(const std::vector<Arrays>& ranks, int64_t chunk) const {
  if (kind == kPrepare) return Build(ranks);
  return kind == kScatter ? Scatter(ranks, chunk) : Gather(ranks, chunk);
}

Status Job::Build(const std::vector<Arrays>& ranks) const {
  std::vector<ChoicesView> views;
  std::deque<SortedChoices> copies;
  for (const Arrays& source : ranks) {
    views.push_back({static_cast<const int32_t*>(source.first),
                     static_cast<const int32_t*>(source.second)});
    if (!source.is_shared) continue;
    // The other process can write at any time. So BuildPlan must check and use
    // a private copy of the choices.
    views.back() = Copy(dims, views.back(), &copies.emplace_back());
  }
  return BuildPlan(dims, prepare.place ? prepare.place[1] : 0, rank, views,
                   {prepare.mem, prepare.group_sizes, prepare.token_counts,
                    prepare.total_recv_tokens, prepare.dropped_counts,
                    prepare.max_recv_tokens, prepare.kept});
}

Status Job::Scatter(const std::vector<Arrays>& ranks, int64_t chunk) const {
  const int64_t row_bytes = out.row_bytes();
  const int64_t per_chunk = RowsPerChunk(row_bytes);
  const int64_t begin = chunk * per_chunk;
  if (begin >= plan.num_slots()) {
    FillTail();
    return Status();
  }
  const int64_t end = std::min(begin + per_chunk, plan.num_slots());
  for (int64_t slot = begin; slot < end; ++slot) {
    const Route route = plan.recv()[slot];
    std::byte* row = out.data + slot * row_bytes;
    if (route.rank == kNoRoute.rank) {  // a row that pads a slab
      std::memset(row, 0, row_bytes);
      if (out_weights) out_weights[slot] = 0;
      continue;
    }
    if (!IsValid(route, ranks.size(), dims.num_choices())) {
      return CorruptRoute(route);
    }
    const Arrays& source = ranks[route.rank];
    std::memcpy(row, source.rows() + route.index / dims.top_k * row_bytes,
                row_bytes);
    if (out_weights) out_weights[slot] = source.weights()[route.index];
  }
  return Status();
}

void Job::FillTail() const {
  const Tail tail = call.site->layer.tail;
  const auto fill = [&](void* array, int64_t row_bytes) {
    std::byte* begin =
        static_cast<std::byte*>(array) + plan.num_slots() * row_bytes;
    const int64_t bytes = (dims.capacity - plan.num_slots()) * row_bytes;
    if (tail == Tail::kZero) return WriteZeros(begin, bytes);
    std::memset(begin, 0xff, bytes);  // NaN in every float type
  };
  fill(out.data, out.row_bytes());
  if (out_weights) fill(out_weights, sizeof(float));
}

Status Job::Gather(const std::vector<Arrays>& ranks, int64_t chunk) const {
  const bool must_be_finite =
      call.site->layer.checked && call.op == Op::kCombine;
  const int64_t row_bytes = out.row_bytes();
  const int64_t per_chunk = RowsPerChunk(row_bytes * dims.top_k);
  const int64_t begin = chunk * per_chunk;
  const int64_t end = std::min(begin + per_chunk, dims.num_tokens);
  std::vector<Term> terms;
  terms.reserve(dims.top_k);
  for (int64_t token = begin; token < end; ++token) {
    terms.clear();
    for (int64_t k = 0; k < dims.top_k; ++k) {
      const int64_t choice = token * dims.top_k + k;
      const Route route = plan.send()[choice];
      const bool kept = route.rank != kNoRoute.rank;
      if (kept && !IsValid(route, ranks.size(), dims.capacity)) {
        return CorruptRoute(route);
      }
      const Arrays& source = ranks[kept ? route.rank : 0];
      if (out_weights) {
        out_weights[choice] = kept ? source.weights()[route.index] : 0;
      }
      if (!kept) continue;
      const bool scale = source.weights() && !out_weights;
      terms.push_back({source.rows() + route.index * row_bytes,
                       scale ? source.weights()[route.index] : 1.0f});
    }
    SumRows(out.dtype, terms, out.width, out.data + token * row_bytes);
    if (must_be_finite) EP_RETURN_IF_ERROR(CheckFinite(ranks, token));
  }
  return Status();
}

Status Job::CheckFinite(const std::vector<Arrays>& ranks, int64_t token) const {
  const int64_t row_bytes = out.row_bytes();
  const int64_t column =
      FindNotFinite(out.dtype, out.data + token * row_bytes, out.width);
  if (column < 0) return Status();
  std::string why = "though all that it sums is";
  for (int64_t k = 0; k < dims.top_k; ++k) {
    const Route route = plan.send()[token * dims.top_k + k];
    if (route.rank == kNoRoute.rank) continue;
    const std::byte* row = ranks[route.rank].rows() + route.index * row_bytes;
    if (FindNotFinite(out.dtype, row, out.width) >= 0) {
      why = StrCat("nor is expert_out[", route.index, "] of rank ", route.rank,
                   ", of topk_idx[", token, ", ", k, "]");
      break;
    }
  }
  return Status(Code::kInvalidArgument,
                StrCat("out[", token, ", ", column, "] of rank ", rank,
                       " is not finite, ", why));
}

}  // namespace ep::host
