// SPDX-License-Identifier: Apache-2.0

// NCCL communicators that handlers borrow from XLA (jaxlib 0.11.2 or newer).
//
// XLA provides them in an extension of a call's context. In the Prepare stage,
// a handler requests the communicators of all EP domains. In the Execute stage,
// a handler finds the communicator of its rank. Our FFI headers are older than
// the extension, so collectives.h declares it.
//
// XLA caches communicators by their devices and by an id of the kind of
// communication. All groups of `ep` use one id, which XLA itself does not use.
// So a group shares no communicator with XLA's collectives, and XLA makes no
// new communicator when a group replaces another.

#ifndef EP_FFI_HANDLERS_BORROWED_COMMUNICATOR_H_
#define EP_FFI_HANDLERS_BORROWED_COMMUNICATOR_H_

#include <cstdint>
#include <vector>

#include "ep_ffi/core/status.h"
#include "xla/ffi/api/ffi.h"

namespace ep {

// The ranks of a program's EP domains, domain by domain, `size` ranks each. As
// in XLA, a rank's number is its position in the program's mesh.
struct Domains {
  std::vector<int64_t> places;
  int64_t size = 0;
};

// Finds the domains along an axis of a mesh, from the attributes of an op. A
// mesh without axes means no domains: the group then owns its communicators.
Status DecodeDomains(xla::ffi::Span<const int64_t> mesh_shape, int64_t axis,
                     Domains* out);

// The arguments that XLA passes to every handler.
struct XlaContext {
  const XLA_FFI_Api* api;
  XLA_FFI_ExecutionContext* context;
};

// Requests the communicators of the domains, in the Prepare stage. Does nothing
// if XLA provides no communicators.
Status RequestCommunicators(const XlaContext& xla, const Domains& domains);

// Finds the communicator, owned by XLA, that the calling rank requested. Sets
// `out` to null if XLA provides none, or if there are no domains.
Status FindCommunicator(const XlaContext& xla, const Domains& domains,
                        void** out);

}  // namespace ep

// Lets a handler have an XlaContext as a parameter.
template <>
struct xla::ffi::CtxDecoding<ep::XlaContext> {
  using Type = ep::XlaContext;

  static std::optional<Type> Decode(const XLA_FFI_Api* api,
                                    XLA_FFI_ExecutionContext* context,
                                    DiagnosticEngine&) {
    return Type{api, context};
  }
};

#endif  // EP_FFI_HANDLERS_BORROWED_COMMUNICATOR_H_
