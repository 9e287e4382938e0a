// SPDX-License-Identifier: Apache-2.0

// ep_prepare: (topk_idx [T, K], place [2]) -> mem [M], whose parts are MemParts

#include <utility>

#include "ep_ffi/handlers/op_call.h"

namespace ep {
namespace {

Status DecodeChoices(const ffi::AnyBuffer& topk_idx, const Layer& layer,
                     PrepareArgs* out) {
  const bool is_int64 = topk_idx.element_type() == ffi::DataType::S64;
  if ((!is_int64 && topk_idx.element_type() != ffi::DataType::S32) ||
      topk_idx.dimensions().size() != 2 || Dim(topk_idx, 1) != layer.top_k) {
    return Mismatch("topk_idx");
  }
  out->topk_idx = topk_idx.untyped_data();
  out->index_is_int64 = is_int64;
  out->num_tokens = Dim(topk_idx, 0);
  return Status();
}

ffi::Future Prepare(OpCall context, ffi::Dictionary, ffi::AnyBuffer topk_idx,
                    ffi::AnyBuffer place, ffi::Result<ffi::AnyBuffer> mem) {
  return Submit(Op::kPrepare, context, [&](Group& group, Call call) {
    const Layer& layer = call.site->layer;
    PrepareArgs args;
    EP_RETURN_IF_ERROR(DecodeChoices(topk_idx, layer, &args));
    EP_RETURN_IF_ERROR(
        DecodeArray("place", place, ffi::DataType::S32, 2, &args.place));
    EP_RETURN_IF_ERROR(group.MemBytes(layer, args.num_tokens, &args.mem_bytes));
    const MemParts parts = PartsOfMem(group, layer, args.num_tokens);
    std::byte* bytes = nullptr;
    EP_RETURN_IF_ERROR(DecodeArray("mem", *mem, ffi::DataType::U8,
                                   parts.routing + args.mem_bytes, &bytes));
    args.group_sizes = reinterpret_cast<int32_t*>(bytes);
    args.token_counts = args.group_sizes + parts.num_local;
    args.dropped_counts = args.token_counts + parts.num_local;
    args.total_recv_tokens = args.dropped_counts + parts.num_local;
    args.max_recv_tokens = args.total_recv_tokens + 1;
    args.kept = reinterpret_cast<uint8_t*>(bytes + parts.kept);
    args.mem = bytes + parts.routing;
    group.Prepare(std::move(call), args);
    return Status();
  });
}

}  // namespace
}  // namespace ep

EP_DEFINE_HANDLER(ep_prepare, ep::Prepare);
