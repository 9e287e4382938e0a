// SPDX-License-Identifier: Apache-2.0

// Shared parts of all handlers: the state of an op, decoding of contexts and
// buffers, and conversion of a `Status` to an `ffi::Future`.
//
// An op has one handler for all platforms. cpu.cc and cuda.cc decode the
// platform's part of a call's context.

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
#include "ep_ffi/handlers/borrowed_communicator.h"
#include "ep_ffi/handlers/tsan.h"
#include "xla/ffi/api/ffi.h"

// Defines a C function that ep/_src/native/ffi.py registers as a handler. XLA's
// macro cannot set the visibility, so a declaration comes first. Pass a binding
// if XLA cannot derive it from the types of the parameters.
//
// No handler may be recorded into a command buffer, not even a handler that
// only enqueues kernels. XLA may record an op before its first run, but the
// first launch of an NCCL EP kernel loads the kernel, which fails on a stream
// under capture. Also, ops of a command buffer leave the stream of XLA's
// collectives, so an op and a collective could overlap.
#define EP_DEFINE_HANDLER(symbol, ...)                 \
  EP_EXPORT XLA_FFI_Error* symbol(XLA_FFI_CallFrame*); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, __VA_ARGS__)

namespace ep {

namespace ffi = ::xla::ffi;

// The state of an op, owned by the executable. Keeps the group alive.
struct OpState {
  static ffi::TypeId id;  // XLA writes it when the type is registered
  // Defined in instantiate.cc, where OpState is complete. With the incomplete
  // type, XLA's header would silently make a deleter that runs no destructor.
  static const ffi::TypeInfo info;

  std::shared_ptr<Group> group;
  Site site;
  Domains domains;

  ~OpState() { TsanEdge::UsedStates().Acquire(); }
};

// The decoded context of one call.
struct OpCall {
  const OpState* state;
  int32_t device;
  // DecodePlatform sets the fields below; see `Call`.
  int64_t run_id = 0;
  std::unique_ptr<Executor> executor;
  void* stream = nullptr;
  void* communicator = nullptr;
};

// Decodes the platform's part of the context. Returns false if XLA does not
// provide it, with the reason in `diagnostic`.
bool DecodePlatform(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx,
                    ffi::DiagnosticEngine& diagnostic, OpCall* call);

ffi::Error ToError(const Status& status);

// Calls `start`, which either fails or arranges a call of `call.done`. Adds the
// name of the op to the message if `start` fails.
ffi::Future Submit(Op op, const OpCall& context,
                   const std::function<Status(Group& group, Call call)>& start);

// Returns an error about a buffer of a wrong shape or type. Our lowering sets
// both, so the Python package and this library are of different versions.
Status Mismatch(const std::string& what);

// Returns the size of a dimension, or -1 if there is no such dimension.
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

// The parts of EpHandle.mem, in bytes. The buffer has the results of
// ep_prepare, and then the routing in the form of the backend:
//
//   int32 group_sizes [L], token_counts [L], dropped_counts [L],
//         total_recv_tokens [1], max_recv_tokens [1]
//   bool kept [T, K]
//   the routing, Group::MemBytes, at a multiple of 256 bytes
//
// ep_prepare has one result because XLA:GPU does not overlap a call with
// several results. NativeConnection in Python also reads the buffer.
struct MemParts {
  int64_t num_local;  // L
  int64_t kept;       // offsets
  int64_t routing;
};

MemParts PartsOfMem(const Group& group, const Layer& layer, int64_t num_tokens);

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

}  // namespace ep

// Lets a handler have an OpCall as a parameter.
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
