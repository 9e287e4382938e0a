#include "ep_ffi/backends/nccl/limits.h"

#include <algorithm>
#include <limits>
#include <string>

namespace ep::nccl {
namespace {

constexpr int64_t kMaxLocalExperts = 256;
constexpr int64_t kMaxTopK = 32;
constexpr int64_t kMaxSms = 16;         // it has as many barriers
constexpr int64_t kExpertMultiple = 4;  // experts of the ranks of an NVLink
constexpr int64_t kWidthMultiple = 8;   // combine's unit, of any dtype
constexpr int64_t kRowMultiple = 16;    // bytes that its copies move at once

template <typename... Parts>
Status Refuse(const Parts&... parts) {
  return Status(Code::kInvalidArgument, StrCat(parts..., " (NCCL EP's limit)"));
}

}  // namespace

Status CheckSizes(const Sizes& s) {
  if (s.ep_size < 2) {
    return Refuse("ep_size = ", s.ep_size,
                  ", but backend=\"nccl\" needs at least two ranks");
  }
  if (s.num_experts % s.ep_size != 0 || s.num_experts % kExpertMultiple != 0 ||
      s.num_local() > kMaxLocalExperts) {
    return Refuse("num_experts = ", s.num_experts, " on ", s.ep_size,
                  " ranks, but it must be a multiple of both ep_size and ",
                  kExpertMultiple, ", and at most ", kMaxLocalExperts,
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
  if (s.capacity > std::numeric_limits<int32_t>::max() / kMaxTopK) {
    return Refuse("recv_capacity_per_rank = ", s.capacity,
                  " rows; split the tokens into several dispatches");
  }
  return Status();
}

Status CheckLayer(const Sizes& s, const Layer& layer, int64_t num_tokens) {
  if (layer.capacity != s.capacity) {
    return Refuse("recv_capacity_per_rank = ", layer.capacity,
                  ", but all layers of this group have ", s.capacity,
                  "; bootstrap another group for another capacity");
  }
  if (layer.top_k < 1 || layer.top_k > kMaxTopK) {
    return Refuse("top_k = ", layer.top_k, ", but it must be in 1..", kMaxTopK);
  }
  if (layer.alignment < 1 || (layer.alignment & (layer.alignment - 1)) != 0 ||
      s.capacity % layer.alignment != 0) {
    return Refuse("alignment = ", layer.alignment,
                  ", but it must be a power of two that divides "
                  "recv_capacity_per_rank = ",
                  s.capacity);
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
