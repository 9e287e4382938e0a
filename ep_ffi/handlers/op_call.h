// SPDX-License-Identifier: Apache-2.0

// The parts that all handlers share: the state of an op, the decoding of a
// call's context and buffers, and the way from a `Status` to an `ffi::Future`.
//
// The handler of an op is in the file of its name and has one body for all
// platforms. A platform adds the decoding of what is particular in the context
// of a call: cpu.cc or cuda.cc.

#ifndef EP_FFI_HANDLERS_OP_CALL_H_
#define EP_FFI_HANDLERS_OP_CALL_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/export.h"
#include "ep_ffi/core/status.h"
#include "ep_ffi/handlers/handover.h"
#include "ep_ffi/handlers/lent.h"
#include "xla/ffi/api/ffi.h"

// Defines a C function that ep/_src/native/ffi.py registers as a handler. XLA's
// macro has no place for its visibility, so a declaration comes first. A
// binding is needed only where XLA cannot tell it from the types of the
// parameters.
//
// No handler has XLA's trait that allows to record it into a command buffer,
// not even the movers, which only enqueue on a GPU. XLA may record an op that
// has never run. But the first launch of an NCCL EP kernel loads it, which a
// stream refuses while it is captured. And in a command buffer ops leave the
// stream of XLA's collectives, so that a mover could run beside a collective.
#define EP_DEFINE_HANDLER(symbol, ...)                 \
  EP_EXPORT XLA_FFI_Error* symbol(XLA_FFI_CallFrame*); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, __VA_ARGS__)

namespace ep {

namespace ffi = ::xla::ffi;

// Lives in the executable, and keeps the group alive. instantiate.cc makes it.
struct OpState {
  static ffi::TypeId id;  // XLA writes it when the type is registered
  // Defined in instantiate.cc. The type is incomplete here, and XLA's header
  // would make a deleter for it that runs no destructor, without a visible
  // warning.
  static const ffi::TypeInfo info;

  std::shared_ptr<Group> group;
  Site site;
  Domains domains;

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
  void* communicator = nullptr;
};

// Decodes what the library's platform needs of the context. Returns false, with
// the reason in `diagnostic`, if XLA does not provide it.
bool DecodePlatform(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx,
                    ffi::DiagnosticEngine& diagnostic, OpCall* call);

ffi::Error ToError(const Status& status);

// Runs `start`, which either fails or arranges for `call.done`. The message of
// a failure of `start` gets the name of the op.
ffi::Future Submit(Op op, const OpCall& context,
                   const std::function<Status(Group& group, Call call)>& start);

// ---- Decoding of buffers.

// The lowering makes the shapes of buffers, so a mismatch means that the Python
// package and this library are of different versions.
Status Mismatch(const std::string& what);

// Returns the size of a dimension, or -1 if the buffer has no such dimension.
int64_t Dim(const ffi::AnyBuffer& buffer, size_t i);

std::optional<DType> ToDType(ffi::DataType type);

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

// Decodes rows that an op only moves. Those of bytes move in pairs: a mover
// copies the bits of a bfloat16, whatever they mean.
template <typename Byte>
Status DecodeMovedRows(const char* name, const ffi::AnyBuffer& buffer,
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

Status DecodeMem(const ffi::AnyBuffer& buffer, Mem* out);

}  // namespace ep

// These let XLA bind a handler by the types of its parameters.
template <>
struct xla::ffi::CtxBinding<ep::OpCall> {
  using Ctx = ep::OpCall;
};

template <>
struct xla::ffi::CtxDecoding<ep::OpCall> {
  using Type = ep::OpCall;

  static std::optional<Type> Decode(const XLA_FFI_Api* api,
                                    XLA_FFI_ExecutionContext* ctx,
                                    DiagnosticEngine& diagnostic);
};

#endif  // EP_FFI_HANDLERS_OP_CALL_H_
