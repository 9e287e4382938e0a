// SPDX-License-Identifier: Apache-2.0

// ep_prepare: (topk_idx [T, K], place [2]) -> mem [M], group_sizes [L],
// token_counts [L], total_recv_tokens [1], dropped_counts [L],
// max_recv_tokens [1], kept [T, K]

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
  out->top_k = layer.top_k;
  return Status();
}

Status DecodeCounts(const char* name, const ffi::AnyBuffer& buffer,
                    int64_t count, int32_t** out) {
  return DecodeArray(name, buffer, ffi::DataType::S32, count, out);
}

ffi::Future Prepare(OpCall context, ffi::Dictionary, ffi::AnyBuffer topk_idx,
                    ffi::AnyBuffer place, ffi::Result<ffi::AnyBuffer> mem,
                    ffi::Result<ffi::AnyBuffer> group_sizes,
                    ffi::Result<ffi::AnyBuffer> token_counts,
                    ffi::Result<ffi::AnyBuffer> total,
                    ffi::Result<ffi::AnyBuffer> dropped_counts,
                    ffi::Result<ffi::AnyBuffer> max,
                    ffi::Result<ffi::AnyBuffer> kept) {
  return Submit(Op::kPrepare, context, [&](Group& group, Call call) {
    const Layer& layer = call.site->layer;
    const int64_t num_local = group.num_experts() / group.ep_size();
    PrepareArgs args;
    EP_RETURN_IF_ERROR(DecodeChoices(topk_idx, layer, &args));
    EP_RETURN_IF_ERROR(
        DecodeArray("place", place, ffi::DataType::S32, 2, &args.place));
    EP_RETURN_IF_ERROR(group.MemBytes(layer, args.num_tokens, &args.mem_bytes));
    EP_RETURN_IF_ERROR(
        DecodeArray("mem", *mem, ffi::DataType::U8, args.mem_bytes, &args.mem));
    EP_RETURN_IF_ERROR(DecodeCounts("group_sizes", *group_sizes, num_local,
                                    &args.group_sizes));
    EP_RETURN_IF_ERROR(DecodeCounts("token_counts", *token_counts, num_local,
                                    &args.token_counts));
    EP_RETURN_IF_ERROR(
        DecodeCounts("total_recv_tokens", *total, 1, &args.total_recv_tokens));
    EP_RETURN_IF_ERROR(DecodeCounts("dropped_counts", *dropped_counts,
                                    num_local, &args.dropped_counts));
    EP_RETURN_IF_ERROR(
        DecodeCounts("max_recv_tokens", *max, 1, &args.max_recv_tokens));
    EP_RETURN_IF_ERROR(DecodeArray("kept", *kept, ffi::DataType::PRED,
                                   args.num_tokens * args.top_k, &args.kept));
    group.Prepare(std::move(call), args);
    return Status();
  });
}

}  // namespace
}  // namespace ep

EP_DEFINE_HANDLER(ep_prepare, ep::Prepare);
