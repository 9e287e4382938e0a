// SPDX-License-Identifier: Apache-2.0

// The handlers of the ops that move rows. From token rows to slots:
//
//   ep_dispatch: (mem, tokens [T, H], topk_weights [T, K]) ->
//                slots [C, H], slot_weights [C]
//   ep_combine_bwd: (mem, tokens [T, H]) -> slots [C, H]
//
// From slots to token rows:
//
//   ep_combine: (mem, slots [C, H] [, slot_weights [C]]) -> tokens [T, H]
//   ep_dispatch_bwd: (mem, slots [C, H], slot_weights [C]) ->
//                    tokens [T, H], topk_weights [T, K]
//
// ep_dispatch_bwd may also have a single result with one axis, of the dtype of
// the tokens: the bytes of the tokens, then the bytes of topk_weights.

#include <algorithm>
#include <optional>
#include <utility>

#include "ep_ffi/handlers/op_call.h"

namespace ep {
namespace {

using Buffer = ffi::AnyBuffer;

// Decodes the routing in EpHandle.mem.
Status DecodeMem(const Buffer& buffer, const Group& group, const Layer& layer,
                 int64_t num_tokens, Mem* out) {
  if (buffer.element_type() != ffi::DataType::U8) return Mismatch("mem");
  const int64_t bytes = static_cast<int64_t>(buffer.element_count());
  // The group refuses a handle of another size.
  const int64_t routing =
      std::min(bytes, PartsOfMem(group, layer, num_tokens).routing);
  *out = {static_cast<const std::byte*>(buffer.untyped_data()) + routing,
          bytes - routing};
  return Status();
}

// Decodes rows and weights [count, top_k] that are in one buffer.
Status DecodeTogether(const Buffer& buffer, int64_t width, int64_t top_k,
                      Rows* rows, float** weights) {
  const std::optional<DType> dtype = ToDType(buffer.element_type());
  if (!dtype || buffer.dimensions().size() != 1) return Mismatch("tokens");
  const int64_t weight_bytes = top_k * static_cast<int64_t>(sizeof(float));
  *rows = {static_cast<std::byte*>(buffer.untyped_data()), 0, width, *dtype};
  const int64_t bytes = Dim(buffer, 0) * ByteWidth(*dtype);
  const int64_t bytes_each = rows->row_bytes() + weight_bytes;
  rows->count = bytes / bytes_each;
  const int64_t offset = rows->count * rows->row_bytes();
  if (bytes % bytes_each != 0 || offset % sizeof(float) != 0) {
    return Mismatch("tokens");
  }
  *weights = reinterpret_cast<float*>(rows->data + offset);
  return Status();
}

// Decodes rows that an op only copies. A pair of uint8 elements counts as one
// bfloat16, because a copy keeps the bits.
template <typename Byte>
Status DecodeCopiedRows(const char* name, const Buffer& buffer,
                        RowsOf<Byte>* out) {
  if (buffer.element_type() != ffi::DataType::U8) {
    return DecodeRows(name, buffer, out);
  }
  if (buffer.dimensions().size() != 2 || Dim(buffer, 1) % 2 != 0) {
    return Mismatch(name);
  }
  *out = {static_cast<Byte*>(buffer.untyped_data()), Dim(buffer, 0),
          Dim(buffer, 1) / 2, DType::kBFloat16};
  return Status();
}

template <typename Slots, typename Tokens>
Status CheckSlots(const Layer& layer, const Slots& slots,
                  const Tokens& tokens) {
  const bool fits = slots.count == layer.capacity &&
                    slots.width == tokens.width && slots.dtype == tokens.dtype;
  return fits ? Status() : Mismatch("slots");
}

// Scatters token rows to slots. Either both weights are null, or neither is.
ffi::Future Scatter(Op op, const OpCall& context, const Buffer& mem,
                    const Buffer& tokens, const Buffer* topk_weights,
                    const Buffer& slots, const Buffer* slot_weights) {
  return Submit(op, context, [&](Group& group, Call call) {
    const Layer& layer = call.site->layer;
    ScatterArgs args = {};
    EP_RETURN_IF_ERROR(DecodeCopiedRows("tokens", tokens, &args.tokens));
    EP_RETURN_IF_ERROR(
        DecodeMem(mem, group, layer, args.tokens.count, &args.mem));
    EP_RETURN_IF_ERROR(DecodeCopiedRows("slots", slots, &args.slots));
    if (topk_weights) {
      EP_RETURN_IF_ERROR(
          DecodeArray("topk_weights", *topk_weights, ffi::DataType::F32,
                      args.tokens.count * layer.top_k, &args.topk_weights));
      EP_RETURN_IF_ERROR(DecodeArray("slot_weights", *slot_weights,
                                     ffi::DataType::F32, layer.capacity,
                                     &args.slot_weights));
    }
    EP_RETURN_IF_ERROR(CheckSlots(layer, args.slots, args.tokens));
    group.Scatter(std::move(call), args);
    return Status();
  });
}

// Gathers slots into token rows. `slot_weights` and `topk_weights` may be null.
ffi::Future Gather(Op op, const OpCall& context, const Buffer& mem,
                   const Buffer& slots, const Buffer* slot_weights,
                   const Buffer& tokens, const Buffer* topk_weights) {
  return Submit(op, context, [&](Group& group, Call call) {
    const Layer& layer = call.site->layer;
    GatherArgs args = {};
    EP_RETURN_IF_ERROR(DecodeRows("slots", slots, &args.slots));
    if (op == Op::kDispatchBwd && !topk_weights) {
      EP_RETURN_IF_ERROR(DecodeTogether(tokens, args.slots.width, layer.top_k,
                                        &args.tokens, &args.topk_weights));
    } else {
      EP_RETURN_IF_ERROR(DecodeRows("tokens", tokens, &args.tokens));
    }
    EP_RETURN_IF_ERROR(
        DecodeMem(mem, group, layer, args.tokens.count, &args.mem));
    if (slot_weights) {
      EP_RETURN_IF_ERROR(DecodeArray("slot_weights", *slot_weights,
                                     ffi::DataType::F32, layer.capacity,
                                     &args.slot_weights));
    }
    if (topk_weights) {
      EP_RETURN_IF_ERROR(
          DecodeArray("topk_weights", *topk_weights, ffi::DataType::F32,
                      args.tokens.count * layer.top_k, &args.topk_weights));
    }
    EP_RETURN_IF_ERROR(CheckSlots(layer, args.slots, args.tokens));
    group.Gather(std::move(call), args);
    return Status();
  });
}

ffi::Future Dispatch(OpCall context, ffi::Dictionary, Buffer mem, Buffer tokens,
                     Buffer topk_weights, ffi::Result<Buffer> slots,
                     ffi::Result<Buffer> slot_weights) {
  return Scatter(Op::kDispatch, context, mem, tokens, &topk_weights, *slots,
                 &*slot_weights);
}

ffi::Future CombineBwd(OpCall context, ffi::Dictionary, Buffer mem,
                       Buffer tokens, ffi::Result<Buffer> slots) {
  return Scatter(Op::kCombineBwd, context, mem, tokens, nullptr, *slots,
                 nullptr);
}

ffi::Future DispatchBwd(OpCall context, ffi::Dictionary, Buffer mem,
                        Buffer slots, Buffer slot_weights,
                        ffi::Result<Buffer> tokens, ffi::RemainingRets others) {
  std::optional<Buffer> weights;
  if (others.size() != 0) weights = **others.get<Buffer>(0);
  return Gather(Op::kDispatchBwd, context, mem, slots, &slot_weights, *tokens,
                weights ? &*weights : nullptr);
}

ffi::Future Combine(OpCall context, ffi::Dictionary, Buffer mem, Buffer slots,
                    ffi::RemainingArgs optional_weights,
                    ffi::Result<Buffer> tokens) {
  if (optional_weights.size() == 0) {
    return Gather(Op::kCombine, context, mem, slots, nullptr, *tokens, nullptr);
  }
  const Buffer weights = *optional_weights.get<Buffer>(0);
  return Gather(Op::kCombine, context, mem, slots, &weights, *tokens, nullptr);
}

auto BindDispatchBwd() {
  return ffi::Ffi::Bind()
      .Ctx<OpCall>()
      .Attrs()
      .Arg<Buffer>()
      .Arg<Buffer>()
      .Arg<Buffer>()
      .Ret<Buffer>()
      .RemainingRets();
}

auto BindCombine() {
  return ffi::Ffi::Bind()
      .Ctx<OpCall>()
      .Attrs()
      .Arg<Buffer>()
      .Arg<Buffer>()
      .RemainingArgs()
      .Ret<Buffer>();
}

}  // namespace
}  // namespace ep

EP_DEFINE_HANDLER(ep_dispatch, ep::Dispatch);
EP_DEFINE_HANDLER(ep_dispatch_bwd, ep::DispatchBwd, ep::BindDispatchBwd());
EP_DEFINE_HANDLER(ep_combine, ep::Combine, ep::BindCombine());
EP_DEFINE_HANDLER(ep_combine_bwd, ep::CombineBwd);
