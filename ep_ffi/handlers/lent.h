// SPDX-License-Identifier: Apache-2.0

// The communicators that XLA lends to handlers, from jaxlib 0.11.2 on.
//
// XLA hands them out in an extension of a call's context. Our FFI headers are
// older, so lent.cc declares the extension, as far as it is used: a handler
// asks for the communicators of all groups of ranks during the stage Prepare,
// and gets the communicator of its own rank when it is executed.

#ifndef EP_FFI_HANDLERS_LENT_H_
#define EP_FFI_HANDLERS_LENT_H_

#include <cstdint>
#include <vector>

#include "ep_ffi/core/status.h"
#include "xla/ffi/api/ffi.h"

namespace ep {

// The ranks of the EP domains of a program, as XLA numbers them: by their
// places in the mesh of the program. Domain after domain, `size` of each.
struct Domains {
  std::vector<int64_t> places;
  int64_t size = 0;
};

// Finds the domains along an axis of a mesh of this shape, which are attributes
// of each op. There are none without axes: then nothing is to be lent.
Status DecodeDomains(xla::ffi::Span<const int64_t> mesh_shape, int64_t axis,
                     Domains* out);

// This is what XLA passes to a handler.
struct XlaContext {
  const XLA_FFI_Api* api;
  XLA_FFI_ExecutionContext* context;
};

// Asks for the communicators of the domains, during the stage Prepare. No
// effect if XLA lends none.
Status RequestCommunicators(const XlaContext& xla, const Domains& domains);

// Finds the communicator of the calling rank, which was asked for. It stays
// XLA's. Null if XLA lends none, or if there are no domains.
Status FindCommunicator(const XlaContext& xla, const Domains& domains,
                        void** out);

}  // namespace ep

// This lets XLA bind a handler by the types of its parameters.
template <>
struct xla::ffi::CtxDecoding<ep::XlaContext> {
  using Type = ep::XlaContext;

  static std::optional<Type> Decode(const XLA_FFI_Api* api,
                                    XLA_FFI_ExecutionContext* context,
                                    DiagnosticEngine&) {
    return Type{api, context};
  }
};

#endif  // EP_FFI_HANDLERS_LENT_H_
