// SPDX-License-Identifier: Apache-2.0

// The context of a call on XLA:GPU: a stream.

#include "ep_ffi/handlers/op_call.h"

namespace ep {

bool DecodePlatform(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx,
                    ffi::DiagnosticEngine& diagnostic, OpCall* call) {
  auto stream = ffi::CtxDecoding<ffi::PlatformStream<void*>>::Decode(
      api, ctx, diagnostic);
  if (!stream) return false;
  call->stream = *stream;
  return true;
}

}  // namespace ep
