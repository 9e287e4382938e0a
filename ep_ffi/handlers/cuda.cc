// SPDX-License-Identifier: Apache-2.0

// Decodes the context of a call on XLA:GPU: the run id, the stream and the
// borrowed communicator.

#include "ep_ffi/handlers/op_call.h"

namespace ep {

bool DecodePlatform(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx,
                    ffi::DiagnosticEngine& diagnostic, OpCall* call) {
  auto run_id = ffi::CtxDecoding<ffi::RunId>::Decode(api, ctx, diagnostic);
  auto stream = ffi::CtxDecoding<ffi::PlatformStream<void*>>::Decode(
      api, ctx, diagnostic);
  if (!run_id || !stream) return false;
  call->run_id = run_id->run_id;
  call->stream = *stream;
  const Status found =
      FindCommunicator({api, ctx}, call->state->domains, &call->communicator);
  if (!found.ok()) diagnostic.Emit(found.message());
  return found.ok();
}

}  // namespace ep
