// SPDX-License-Identifier: Apache-2.0

// ep_prepare: (topk_idx [T, K], place [2]) -> mem [M], group_sizes [L],
// token_counts [L], total_recv_tokens [1]

#ifndef EP_FFI_HANDLERS_PREPARE_H_
#define EP_FFI_HANDLERS_PREPARE_H_

#include <cstdint>
#include <utility>

#include "ep_ffi/handlers/op_call.h"

namespace ep {

inline Status DecodePrepare(const Group& group, const Layer& layer,
                            const ffi::AnyBuffer& topk_idx,
                            const ffi::AnyBuffer& place,
                            const ffi::AnyBuffer& mem,
                            const ffi::AnyBuffer& group_sizes,
                            const ffi::AnyBuffer& token_counts,
                            const ffi::AnyBuffer& total, PrepareArgs* out) {
  const bool is_int64 = topk_idx.element_type() == ffi::DataType::S64;
  if ((!is_int64 && topk_idx.element_type() != ffi::DataType::S32) ||
      topk_idx.dimensions().size() != 2 || Dim(topk_idx, 1) != layer.top_k) {
    return Mismatch("topk_idx");
  }
  out->topk_idx = topk_idx.untyped_data();
  out->index_is_int64 = is_int64;
  out->num_tokens = Dim(topk_idx, 0);
  out->top_k = layer.top_k;
  EP_RETURN_IF_ERROR(
      DecodeArray("place", place, ffi::DataType::S32, 2, &out->place));
  EP_RETURN_IF_ERROR(group.MemBytes(layer, out->num_tokens, &out->mem_bytes));
  EP_RETURN_IF_ERROR(
      DecodeArray("mem", mem, ffi::DataType::U8, out->mem_bytes, &out->mem));
  const int64_t num_local = group.num_experts() / group.ep_size();
  EP_RETURN_IF_ERROR(DecodeArray("group_sizes", group_sizes, ffi::DataType::S32,
                                 num_local, &out->group_sizes));
  EP_RETURN_IF_ERROR(DecodeArray("token_counts", token_counts,
                                 ffi::DataType::S32, num_local,
                                 &out->token_counts));
  return DecodeArray("total_recv_tokens", total, ffi::DataType::S32, 1,
                     &out->total_recv_tokens);
}

inline ffi::Future Prepare(OpCall context, ffi::Dictionary,
                           ffi::AnyBuffer topk_idx, ffi::AnyBuffer place,
                           ffi::Result<ffi::AnyBuffer> mem,
                           ffi::Result<ffi::AnyBuffer> group_sizes,
                           ffi::Result<ffi::AnyBuffer> token_counts,
                           ffi::Result<ffi::AnyBuffer> total) {
  return Submit(Op::kPrepare, context, [&](Group& group, Call call) {
    PrepareArgs args;
    EP_RETURN_IF_ERROR(DecodePrepare(group, call.site->layer, topk_idx, place,
                                     *mem, *group_sizes, *token_counts, *total,
                                     &args));
    group.Prepare(std::move(call), args);
    return Status();
  });
}

inline auto BindPrepare() {
  return ffi::Ffi::Bind()
      .Ctx<OpCall>()
      .Attrs()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>();
}

}  // namespace ep

#endif  // EP_FFI_HANDLERS_PREPARE_H_
