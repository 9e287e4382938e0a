// SPDX-License-Identifier: Apache-2.0

// Code for XLA:CPU: decodes a call's context, and implements operations that
// XLA:CPU lacks, for ep/_src/ops/row_map.py.

#include <cstring>
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

namespace {

// Leaves the result unwritten. The operating system then allocates no pages for
// rows that no op writes.
ffi::Error Unwritten(ffi::Result<ffi::AnyBuffer>) {
  return ffi::Error::Success();
}

// Copies the first `count` rows into a buffer of a dtype of the same size.
ffi::Error Retyped(ffi::AnyBuffer rows, ffi::BufferR0<ffi::DataType::S32> count,
                   ffi::Result<ffi::AnyBuffer> out) {
  const auto shape = rows.dimensions();
  const int64_t num_rows = shape.size() == 0 ? 0 : shape[0];
  const int64_t n = count.typed_data()[0];
  if (rows.size_bytes() != out->size_bytes() || n < 0 || n > num_rows) {
    return ffi::Error::InvalidArgument(
        "grouped_matmul: the number of used rows is negative or exceeds the"
        " capacity; it is the sum of group_sizes.");
  }
  if (n > 0) {
    std::memcpy(out->untyped_data(), rows.untyped_data(),
                rows.size_bytes() / num_rows * n);
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace ep

EP_DEFINE_HANDLER(ep_unwritten, ep::Unwritten);
EP_DEFINE_HANDLER(ep_retyped, ep::Retyped);
