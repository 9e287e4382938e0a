// SPDX-License-Identifier: Apache-2.0

// Decodes the context of a call on XLA:CPU.

#include <memory>

#include "ep_ffi/handlers/op_call.h"
#include "ep_ffi/handlers/thread_pool.h"

namespace ep {

bool DecodePlatform(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx,
                    ffi::DiagnosticEngine& diagnostic, OpCall* call) {
  auto run_id = ffi::CtxDecoding<ffi::RunId>::Decode(api, ctx, diagnostic);
  auto pool = ffi::CtxDecoding<ffi::ThreadPool>::Decode(api, ctx, diagnostic);
  if (!run_id || !pool) return false;
  call->run_id = run_id->run_id;
  call->executor = std::make_unique<ThreadPoolExecutor>(*pool);
  return true;
}

}  // namespace ep
