// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/handlers/op_call.h"

#include <utility>

#include "ep_ffi/core/plan.h"

std::optional<ep::OpCall> xla::ffi::CtxDecoding<ep::OpCall>::Decode(
    const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx,
    DiagnosticEngine& diagnostic) {
  auto state = CtxDecoding<State<ep::OpState>>::Decode(api, ctx, diagnostic);
  auto device = CtxDecoding<DeviceOrdinal>::Decode(api, ctx, diagnostic);
  if (!state || !device) return std::nullopt;
  ep::OpCall call;
  call.state = *state;
  call.device = *device;
  if (!ep::DecodePlatform(api, ctx, diagnostic, &call)) return std::nullopt;
  return call;
}

namespace ep {
namespace {

// XLA's error codes, indexed by `Code`.
constexpr ffi::ErrorCode kErrorCodes[] = {
    ffi::ErrorCode::kOk,
    ffi::ErrorCode::kInvalidArgument,
    ffi::ErrorCode::kFailedPrecondition,
    ffi::ErrorCode::kResourceExhausted,
    ffi::ErrorCode::kDeadlineExceeded,
    ffi::ErrorCode::kUnavailable,
    ffi::ErrorCode::kInternal,
};

}  // namespace

ffi::Error ToError(const Status& status) {
  return status.ok() ? ffi::Error::Success()
                     : ffi::Error(kErrorCodes[static_cast<int>(status.code())],
                                  status.message());
}

ffi::Future Submit(
    Op op, const OpCall& context,
    const std::function<Status(Group& group, Call call)>& start) {
  TsanEdge& edge = TsanEdge::DeviceOps(context.device);
  TsanEdge::NewStates().Acquire();
  edge.Acquire();
  ffi::Promise promise;
  ffi::Future future(promise);
  auto done = [promise, &edge](Status status) mutable {
    TsanEdge::UsedStates().Release();
    edge.Release();
    if (status.ok()) return promise.SetAvailable();
    promise.SetError(ToError(status));
  };
  Call call = {op,
               &context.state->site,
               context.run_id,
               context.device,
               context.executor.get(),
               context.stream,
               context.communicator,
               done};
  const Status started = CatchIn([&] {
    Group* const group = context.state->group->OnDevice(context.device);
    return group ? start(*group, std::move(call))
                 : Status(Code::kFailedPrecondition,
                          StrCat("device ", context.device,
                                 " of this process has no rank of the "
                                 "group; run the program on the mesh that "
                                 "was given to ep_bootstrap"));
  });
  if (!started.ok()) {
    done(Status(started.code(),
                StrCat(OpName(op, context.state->site.layer.name), ": ",
                       started.message())));
  }
  TsanEdge::UsedStates().Release();
  edge.Release();
  return future;
}

Status Mismatch(const std::string& what) {
  return Status(Code::kInvalidArgument,
                StrCat(what,
                       " does not match this version of libep_ffi; use "
                       "the library that came with the ep package"));
}

MemParts PartsOfMem(const Group& group, const Layer& layer,
                    int64_t num_tokens) {
  constexpr int64_t kAlignment = 256;
  const int64_t num_local = LocalExperts(group.num_experts(), group.ep_size());
  const int64_t kept = (3 * num_local + 2) * sizeof(int32_t);
  const int64_t end = kept + num_tokens * layer.top_k;
  return {num_local, kept, (end + kAlignment - 1) / kAlignment * kAlignment};
}

int64_t Dim(const ffi::AnyBuffer& buffer, size_t i) {
  return i < buffer.dimensions().size() ? buffer.dimensions()[i] : -1;
}

std::optional<DType> ToDType(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32:
      return DType::kFloat32;
    case ffi::DataType::BF16:
      return DType::kBFloat16;
    case ffi::DataType::F16:
      return DType::kFloat16;
    default:
      return std::nullopt;
  }
}

}  // namespace ep
