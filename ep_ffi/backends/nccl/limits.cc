// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/nccl/limits.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>

namespace ep::nccl {
namespace {

constexpr int64_t kMaxLocalExperts = 256;
constexpr int64_t kMaxTopK = 32;
constexpr int64_t kMaxSms = 16;         // barriers of NCCL EP
constexpr int64_t kExpertMultiple = 4;  // divides the experts per NVLink domain
constexpr int64_t kWidthMultiple = 8;   // elements that combine adds at a time
constexpr int64_t kRowMultiple = 16;    // bytes per copy instruction

// NCCL EP asserts that 22 bits can count the slots, although the layout that we
// use counts in 32 bits.
constexpr int64_t kMaxCapacity = int64_t{1} << 22;

// A thread block of NCCL EP's kernels processes kTokensPerSm tokens together
// (kTokensAcrossNvlinks with several NVLink domains), keeps kMapStages maps of
// the tokens' slots, and has at least kRowStages rows in flight.
constexpr int64_t kDefaultSms = 16;
constexpr int64_t kTokensPerSm = 4;
constexpr int64_t kTokensAcrossNvlinks = 64;
constexpr int64_t kMapStages = 2;
constexpr int64_t kRowStages = 3;
constexpr int64_t kBarriers = 16;        // bytes per row in flight
constexpr int64_t kMapBarriers = 24;     // bytes
constexpr int64_t kDispatchRegion = 72;  // bytes of a region's descriptor
constexpr int64_t kCombineRegion = 40;   // bytes of a region's descriptor
constexpr int64_t kSharedMultiple = 128;

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Returns the shared memory, in bytes, that dispatch and combine need at least.
// Assumes that both have weights, because weights need memory.
int64_t SharedBytes(const Sizes& s, int64_t nvlink_ranks) {
  const int64_t links = s.ep_size / nvlink_ranks;  // NVLink domains
  const bool far = links > 1;
  const int64_t sms = s.max_num_sms > 0 ? s.max_num_sms : kDefaultSms;
  const int64_t chunk =
      far ? kTokensAcrossNvlinks : RoundUp(kTokensPerSm * sms, 32);
  const int64_t chunks = (s.max_dispatch_tokens() + chunk - 1) / chunk;
  const int64_t row = RoundUp(s.max_row_bytes, kSharedMultiple);
  const int64_t weights = s.nccl_ep_local() * nvlink_ranks * sizeof(float);

  const int64_t map =
      RoundUp(chunk * nvlink_ranks * sizeof(int32_t), kSharedMultiple);
  int64_t dispatch = kMapStages * map + kMapBarriers +
                     kRowStages * (row + RoundUp(weights, 16) + kBarriers);
  int64_t combine = row + RoundUp(weights, 16) + kBarriers + sizeof(bool) +
                    row + RoundUp(weights * links, 16);
  if (far) {
    dispatch += (links - 1) * (chunk + kDispatchRegion);
    combine += row + RoundUp(weights, 16) + kBarriers + sizeof(bool) + row +
               RoundUp(weights, 16) +
               (links - 1) * (chunks * sizeof(uint64_t) + kCombineRegion) +
               sizeof(uint32_t);
  }
  return RoundUp(std::max(dispatch, combine), kSharedMultiple);
}

// Returns the bytes that NCCL EP allocates for a group on each GPU.
int64_t GroupBytes(const Sizes& s, int64_t nvlink_ranks) {
  constexpr int64_t kWorkspace = int64_t{32} << 20;
  const int64_t links = s.ep_size / nvlink_ranks;
  const int64_t tokens = s.max_dispatch_tokens();
  const int64_t row = s.max_row_bytes;
  const int64_t experts = s.nccl_ep_local() * nvlink_ranks;
  const int64_t weights = experts * sizeof(float);
  // Buffers for the tokens of all ranks in both directions, for slots' weights
  // in both directions, for unused scales of slots, and for a bitmap of
  // choices.
  int64_t bytes = kWorkspace + 2 * s.ep_size * tokens * row +
                  2 * s.capacity * weights + s.capacity * row +
                  s.ep_size * tokens * ((experts + 7) / 8) * links;
  if (links > 1) {  // buffers for the network
    const int64_t chunks = RoundUp(tokens, kTokensAcrossNvlinks);
    bytes += 2 * (links - 1) * (chunks + tokens) * (row + weights) +
             tokens * (row + weights * links);
  }
  return bytes;
}

template <typename... Parts>
Status Refuse(const Parts&... parts) {
  return Status(Code::kInvalidArgument, StrCat(parts..., " (NCCL EP's limit)"));
}

std::string VersionText(int code) {
  return StrCat(code / 10000, ".", code / 100 % 100, ".", code % 100);
}

}  // namespace

int64_t Sizes::nccl_ep_local() const {
  return RoundUp(num_local(),
                 kExpertMultiple / std::gcd(ep_size, kExpertMultiple));
}

Status CheckNccl(int version) {
  if (version >= kOldestNccl && version <= kNewestNccl) return Status();
  return Status(
      Code::kFailedPrecondition,
      StrCat("NCCL is ", VersionText(version), ", but NCCL EP works with ",
             VersionText(kOldestNccl), " to ", VersionText(kNewestNccl),
             "; install one of these versions of nvidia-nccl where JAX finds "
             "it, see docs/gpu.md"));
}

Status CheckSizes(const Sizes& s) {
  if (s.ep_size < 2) {
    return Refuse("ep_size = ", s.ep_size,
                  ", but backend=\"nccl\" needs at least two ranks");
  }
  if (s.nccl_ep_local() > kMaxLocalExperts) {
    return Refuse("num_experts = ", s.num_experts, " on ", s.ep_size,
                  " ranks, but it must be at most ", kMaxLocalExperts,
                  " for each rank");
  }
  if (s.max_tokens < 1 || s.capacity < s.max_dispatch_tokens()) {
    return Refuse(
        "recv_capacity_per_rank = ", s.capacity,
        ", but it must be at least max_tokens_per_rank, rounded up to ",
        s.max_dispatch_tokens());
  }
  if (s.max_row_bytes < 1 || s.max_row_bytes % kRowMultiple != 0) {
    return Refuse("the widest row has ", s.max_row_bytes,
                  " bytes, but it must be a multiple of ", kRowMultiple,
                  "; pad hidden_dim");
  }
  if (s.max_num_sms > kMaxSms) {
    return Refuse("max_num_sms = ", s.max_num_sms, ", but at most ", kMaxSms,
                  " work");
  }
  if (s.capacity > kMaxCapacity) {
    return Refuse("recv_capacity_per_rank = ", s.capacity,
                  " rows, but at most ", kMaxCapacity,
                  " work; split the tokens into several dispatches");
  }
  return Status();
}

Status CheckMachine(const Sizes& s, const Machine& m) {
  if (!m.device_api) {
    return Refuse(
        "NCCL's device API does not work on this machine; it needs GPUs that "
        "map each other's memory, which NCCL_CUMEM_ENABLE=0 forbids");
  }
  if (m.nvlink_ranks < s.ep_size && m.nccl_version != kOldestNccl) {
    return Refuse(
        "NVLink connects only ", m.nvlink_ranks, " of the ", s.ep_size,
        " ranks of an EP domain, and the others need NCCL ",
        VersionText(kOldestNccl), ", but NCCL is ", VersionText(m.nccl_version),
        "; install nvidia-nccl of this version where JAX finds it");
  }
  const int64_t experts = s.nccl_ep_local() * m.nvlink_ranks;
  if (experts % kExpertMultiple != 0) {
    return Refuse("the ", m.nvlink_ranks, " ranks of an NVLink domain have ",
                  experts, " experts, but these must be a multiple of ",
                  kExpertMultiple, "; take a multiple of ", kExpertMultiple,
                  " experts for each rank");
  }
  // NCCL EP's kernels compute these products of sizes in 32 bits.
  if (s.capacity * experts > std::numeric_limits<int32_t>::max() ||
      s.max_tokens * s.ep_size * s.nccl_ep_local() >
          std::numeric_limits<int32_t>::max()) {
    return Refuse(
        "recv_capacity_per_rank = ", s.capacity, " times the ", experts,
        " experts of an NVLink domain, or max_tokens_per_rank = ", s.max_tokens,
        " times num_experts = ", s.num_experts,
        " is more than 32 bits can count; split the tokens into "
        "several dispatches");
  }
  const int64_t needed = SharedBytes(s, m.nvlink_ranks);
  if (needed > m.shared_bytes) {
    return Refuse(
        "rows of ", s.max_row_bytes, " bytes need ", needed,
        " bytes of shared memory in a thread block, but this GPU has ",
        m.shared_bytes,
        "; take a smaller hidden_dim or a narrower max_token_dtype");
  }
  const int64_t group = GroupBytes(s, m.nvlink_ranks);
  if (group > m.free_bytes) {
    return Refuse("a group of these sizes needs ", group,
                  " bytes of GPU memory beside JAX's, but ", m.free_bytes,
                  " are free; lower XLA_PYTHON_CLIENT_MEM_FRACTION or "
                  "recv_capacity_per_rank");
  }
  return Status();
}

Status CheckLayer(const Sizes& s, const Layer& layer, int64_t num_tokens) {
  if (layer.capacity > s.capacity) {
    return Refuse("recv_capacity_per_rank = ", layer.capacity,
                  ", but the group has buffers for ", s.capacity,
                  "; give the group the largest of its layers");
  }
  if (layer.top_k < 1 || layer.top_k > kMaxTopK) {
    return Refuse("top_k = ", layer.top_k, ", but it must be in 1..", kMaxTopK);
  }
  if (layer.alignment < 1 || (layer.alignment & (layer.alignment - 1)) != 0 ||
      layer.capacity % layer.alignment != 0) {
    return Refuse("alignment = ", layer.alignment,
                  ", but it must be a power of two that divides "
                  "recv_capacity_per_rank = ",
                  layer.capacity);
  }
  const int64_t demand =
      s.ep_size * s.max_tokens * std::min(layer.top_k, s.num_local()) +
      s.num_local() * (layer.alignment - 1);
  if (demand > std::numeric_limits<int32_t>::max()) {
    return Status(Code::kInvalidArgument,
                  StrCat("a rank may be asked for ", demand,
                         " rows, which are counted in 32 bits; split the "
                         "tokens into several dispatches"));
  }
  if (num_tokens < 0 || num_tokens > s.max_tokens) {
    return Refuse(num_tokens,
                  " tokens, but max_tokens_per_rank = ", s.max_tokens);
  }
  return Status();
}

Status CheckRows(const Sizes& s, int64_t width, DType dtype) {
  const int64_t bytes = width * ByteWidth(dtype);
  if (width < 1 || width % kWidthMultiple != 0 || bytes % kRowMultiple != 0 ||
      bytes > s.max_row_bytes) {
    return Refuse("rows of ", width, " elements, ", bytes,
                  " bytes, but the elements must be a multiple of ",
                  kWidthMultiple, " and the bytes of ", kRowMultiple,
                  ", no more than ", s.max_row_bytes, "; pad the hidden size");
  }
  return Status();
}

}  // namespace ep::nccl
