// SPDX-License-Identifier: Apache-2.0

// The parts that all handlers share: the state of an op, the decoding of a
// call's context and buffers, and the way from a `Status` to an `ffi::Future`.
//
// The handlers have one body for all platforms (symbols.cc). A platform adds
// the decoding of what is particular in the context of a call: cpu.cc or
// cuda.cc.

#ifndef EP_FFI_HANDLERS_OP_CALL_H_
#define EP_FFI_HANDLERS_OP_CALL_H_

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/export.h"
#include "ep_ffi/core/status.h"
#include "ep_ffi/handlers/handover.h"
#include "xla/ffi/api/ffi.h"

// The macro that defines a handler has no place for its visibility, so a
// declaration comes first.
#define EP_DEFINE_HANDLER(symbol, ...)                 \
  EP_EXPORT XLA_FFI_Error* symbol(XLA_FFI_CallFrame*); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, __VA_ARGS__)

namespace ep {

namespace ffi = ::xla::ffi;

// Lives in the executable, and keeps the group alive. `Instantiate` makes it.
struct OpState {
  static ffi::TypeId id;  // XLA writes it when the type is registered
  // Defined in symbols.cc. The type is incomplete here, and XLA's header would
  // make a deleter for it that runs no destructor, without a visible warning.
  static const ffi::TypeInfo info;

  std::shared_ptr<Group> group;
  Site site;

  ~OpState() { Handover::OfUsedStates().FromXla(); }
};

// The context of one call, as the platform decodes it.
struct OpCall {
  const OpState* state;
  int32_t device;
  // Decoded by the platform; see `Call`.
  int64_t run_id = 0;
  std::unique_ptr<Executor> executor;
  void* stream = nullptr;
};

// Decodes what the library's platform needs of the context. Returns false, with
// the reason in `diagnostic`, if XLA does not provide it.
bool DecodePlatform(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx,
                    ffi::DiagnosticEngine& diagnostic, OpCall* call);

inline ffi::Error ToError(const Status& status) {
  switch (status.code()) {
    case Code::kOk:
      return ffi::Error::Success();
    case Code::kInvalidArgument:
      return ffi::Error(ffi::ErrorCode::kInvalidArgument, status.message());
    case Code::kFailedPrecondition:
      return ffi::Error(ffi::ErrorCode::kFailedPrecondition, status.message());
    case Code::kResourceExhausted:
      return ffi::Error(ffi::ErrorCode::kResourceExhausted, status.message());
    case Code::kDeadlineExceeded:
      return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, status.message());
    case Code::kUnavailable:
      return ffi::Error(ffi::ErrorCode::kUnavailable, status.message());
    case Code::kInternal:
      return ffi::Error(ffi::ErrorCode::kInternal, status.message());
  }
  return ffi::Error(ffi::ErrorCode::kUnknown, status.message());
}

// Runs `start(group, call)`, which either fails or arranges for `call.done`.
template <typename Start>
ffi::Future Submit(Op op, const OpCall& context, Start start) {
  Handover& handover = Handover::OfDevice(context.device);
  Handover::OfNewStates().FromXla();
  handover.FromXla();
  ffi::Promise promise;
  ffi::Future future(promise);
  auto done = [promise, &handover](Status status) mutable {
    Handover::OfUsedStates().ToXla();
    handover.ToXla();
    if (status.ok()) return promise.SetAvailable();
    promise.SetError(ToError(status));
  };
  Call call = {op,
               &context.state->site,
               context.run_id,
               context.device,
               context.executor.get(),
               context.stream,
               done};
  Status started;
  try {
    started = start(*context.state->group, std::move(call));
  } catch (const std::exception& e) {
    started = Status(Code::kInternal, StrCat(OpName(op), ": ", e.what()));
  }
  if (!started.ok()) done(started);
  Handover::OfUsedStates().ToXla();
  handover.ToXla();
  return future;
}

// ---- Decoding of buffers.

// The lowering makes the shapes of buffers, so a mismatch means that the Python
// package and this library are of different versions.
inline Status Mismatch(const std::string& what) {
  return Status(Code::kInvalidArgument,
                StrCat(what,
                       " does not match this version of libep_ffi; use "
                       "the library that came with the ep package"));
}

inline int64_t Dim(const ffi::AnyBuffer& buffer, size_t i) {
  return i < buffer.dimensions().size() ? buffer.dimensions()[i] : -1;
}

inline std::optional<DType> ToDType(ffi::DataType type) {
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

// Decodes a [count, width] matrix of token rows.
template <typename Byte>
Status DecodeRows(const char* name, const ffi::AnyBuffer& buffer,
                  RowsOf<Byte>* out) {
  const std::optional<DType> dtype = ToDType(buffer.element_type());
  if (!dtype || buffer.dimensions().size() != 2) return Mismatch(name);
  *out = {static_cast<Byte*>(buffer.untyped_data()), Dim(buffer, 0),
          Dim(buffer, 1), *dtype};
  return Status();
}

template <typename A, typename B>
bool SameWidth(const RowsOf<A>& a, const RowsOf<B>& b) {
  return a.width == b.width && a.dtype == b.dtype;
}

// Decodes an array of exactly `count` elements.
template <typename T>
Status DecodeArray(const char* name, const ffi::AnyBuffer& buffer,
                   ffi::DataType type, int64_t count, T** out) {
  if (buffer.element_type() != type ||
      static_cast<int64_t>(buffer.element_count()) != count) {
    return Mismatch(name);
  }
  *out = static_cast<T*>(buffer.untyped_data());
  return Status();
}

inline Status DecodeMem(const ffi::AnyBuffer& buffer, Mem* out) {
  if (buffer.element_type() != ffi::DataType::U8) return Mismatch("mem");
  *out = {static_cast<const std::byte*>(buffer.untyped_data()),
          static_cast<int64_t>(buffer.element_count())};
  return Status();
}

}  // namespace ep

template <>
struct xla::ffi::CtxDecoding<ep::OpCall> {
  using Type = ep::OpCall;

  static std::optional<Type> Decode(const XLA_FFI_Api* api,
                                    XLA_FFI_ExecutionContext* ctx,
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
};

#endif  // EP_FFI_HANDLERS_OP_CALL_H_
