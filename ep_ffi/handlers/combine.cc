// SPDX-License-Identifier: Apache-2.0

// ep_combine: (mem, slots [C, H] [, slot_weights [C]]) -> tokens [T, H]
// ep_combine_bwd: (mem, tokens [T, H]) -> slots [C, H]

#include <utility>

#include "ep_ffi/handlers/op_call.h"

namespace ep {
namespace {

ffi::Future Combine(OpCall context, ffi::Dictionary, ffi::AnyBuffer mem,
                    ffi::AnyBuffer slots, ffi::RemainingArgs optional_weights,
                    ffi::Result<ffi::AnyBuffer> tokens) {
  return Submit(Op::kCombine, context, [&](Group& group, Call call) {
    const Layer& layer = call.site->layer;
    GatherArgs args;
    args.slot_weights = nullptr;
    args.topk_weights = nullptr;
    EP_RETURN_IF_ERROR(DecodeMem(mem, &args.mem));
    EP_RETURN_IF_ERROR(DecodeRows("expert_out", slots, &args.slots));
    EP_RETURN_IF_ERROR(DecodeRows("out", *tokens, &args.tokens));
    if (optional_weights.size() > 0) {
      auto weights = optional_weights.get<ffi::AnyBuffer>(0);
      if (!weights.has_value()) return Mismatch("weights");
      EP_RETURN_IF_ERROR(DecodeArray("weights", *weights, ffi::DataType::F32,
                                     layer.capacity, &args.slot_weights));
    }
    if (args.slots.count != layer.capacity ||
        !SameWidth(args.slots, args.tokens)) {
      return Mismatch("expert_out");
    }
    group.Gather(std::move(call), args);
    return Status();
  });
}

auto BindCombine() {
  return ffi::Ffi::Bind()
      .Ctx<OpCall>()
      .Attrs()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .RemainingArgs()
      .Ret<ffi::AnyBuffer>();
}

ffi::Future CombineBwd(OpCall context, ffi::Dictionary, ffi::AnyBuffer mem,
                       ffi::AnyBuffer tokens,
                       ffi::Result<ffi::AnyBuffer> slots) {
  return Submit(Op::kCombineBwd, context, [&](Group& group, Call call) {
    ScatterArgs args;
    args.topk_weights = nullptr;
    args.slot_weights = nullptr;
    EP_RETURN_IF_ERROR(DecodeMem(mem, &args.mem));
    EP_RETURN_IF_ERROR(DecodeMovedRows("grad_out", tokens, &args.tokens));
    EP_RETURN_IF_ERROR(DecodeMovedRows("grad_expert_out", *slots, &args.slots));
    if (args.slots.count != call.site->layer.capacity ||
        !SameWidth(args.slots, args.tokens)) {
      return Mismatch("grad_expert_out");
    }
    group.Scatter(std::move(call), args);
    return Status();
  });
}

}  // namespace
}  // namespace ep

EP_DEFINE_HANDLER(ep_combine, ep::Combine, ep::BindCombine());
EP_DEFINE_HANDLER(ep_combine_bwd, ep::CombineBwd);
