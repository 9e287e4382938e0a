// SPDX-License-Identifier: Apache-2.0

// The context of a call on XLA:GPU is the id of the run, a stream and, if XLA
// lends them, a communicator.

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
  const Status lent =
      FindCommunicator({api, ctx}, call->state->domains, &call->communicator);
  if (!lent.ok()) diagnostic.Emit(lent.message());
  return lent.ok();
}

}  // namespace ep
