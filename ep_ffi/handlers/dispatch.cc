// SPDX-License-Identifier: Apache-2.0

// ep_dispatch: (mem, tokens [T, H], topk_weights [T, K]) ->
//              slots [C, H], slot_weights [C]
// ep_dispatch_bwd: (mem, slots [C, H], slot_weights [C]) ->
//                  tokens [T, H], topk_weights [T, K]

#include <utility>

#include "ep_ffi/handlers/op_call.h"

namespace ep {
namespace {

ffi::Future Dispatch(OpCall context, ffi::Dictionary, ffi::AnyBuffer mem,
                     ffi::AnyBuffer tokens, ffi::AnyBuffer topk_weights,
                     ffi::Result<ffi::AnyBuffer> slots,
                     ffi::Result<ffi::AnyBuffer> slot_weights) {
  return Submit(Op::kDispatch, context, [&](Group& group, Call call) {
    const Layer& layer = call.site->layer;
    ScatterArgs args;
    EP_RETURN_IF_ERROR(DecodeMem(mem, &args.mem));
    EP_RETURN_IF_ERROR(DecodeMovedRows("tokens", tokens, &args.tokens));
    EP_RETURN_IF_ERROR(DecodeMovedRows("recv_tokens", *slots, &args.slots));
    EP_RETURN_IF_ERROR(
        DecodeArray("topk_weights", topk_weights, ffi::DataType::F32,
                    args.tokens.count * layer.top_k, &args.topk_weights));
    EP_RETURN_IF_ERROR(DecodeArray("recv_topk_weights", *slot_weights,
                                   ffi::DataType::F32, layer.capacity,
                                   &args.slot_weights));
    if (args.slots.count != layer.capacity ||
        !SameWidth(args.slots, args.tokens)) {
      return Mismatch("recv_tokens");
    }
    group.Scatter(std::move(call), args);
    return Status();
  });
}

ffi::Future DispatchBwd(OpCall context, ffi::Dictionary, ffi::AnyBuffer mem,
                        ffi::AnyBuffer slots, ffi::AnyBuffer slot_weights,
                        ffi::Result<ffi::AnyBuffer> tokens,
                        ffi::Result<ffi::AnyBuffer> topk_weights) {
  return Submit(Op::kDispatchBwd, context, [&](Group& group, Call call) {
    const Layer& layer = call.site->layer;
    GatherArgs args;
    EP_RETURN_IF_ERROR(DecodeMem(mem, &args.mem));
    EP_RETURN_IF_ERROR(DecodeRows("grad_recv_tokens", slots, &args.slots));
    EP_RETURN_IF_ERROR(DecodeRows("grad_tokens", *tokens, &args.tokens));
    EP_RETURN_IF_ERROR(DecodeArray("grad_recv_topk_weights", slot_weights,
                                   ffi::DataType::F32, layer.capacity,
                                   &args.slot_weights));
    EP_RETURN_IF_ERROR(
        DecodeArray("grad_topk_weights", *topk_weights, ffi::DataType::F32,
                    args.tokens.count * layer.top_k, &args.topk_weights));
    if (args.slots.count != layer.capacity ||
        !SameWidth(args.slots, args.tokens)) {
      return Mismatch("grad_recv_tokens");
    }
    group.Gather(std::move(call), args);
    return Status();
  });
}

}  // namespace
}  // namespace ep

EP_DEFINE_HANDLER(ep_dispatch, ep::Dispatch);
EP_DEFINE_HANDLER(ep_dispatch_bwd, ep::DispatchBwd);
