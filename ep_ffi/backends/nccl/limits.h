// What NCCL EP's high-throughput algorithm takes. It asserts, so that whatever
// is not checked here first ends the process. Figures: NCCL EP 0.2.0.

#ifndef EP_FFI_BACKENDS_NCCL_LIMITS_H_
#define EP_FFI_BACKENDS_NCCL_LIMITS_H_

#include <cstdint>

#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/status.h"

namespace ep::nccl {

// What is fixed when a group is made.
struct Sizes {
  int64_t num_experts;
  int64_t ep_size;
  int64_t max_tokens;     // of a rank in one op
  int64_t capacity;       // of every layer, in rows
  int64_t max_row_bytes;  // of a token
  int64_t max_num_sms;    // 0: automatic

  int64_t num_local() const { return num_experts / ep_size; }
  // A multiple of four, whatever NVLink's domain is.
  int64_t max_dispatch_tokens() const { return (max_tokens + 3) / 4 * 4; }
};

Status CheckSizes(const Sizes& sizes);
Status CheckLayer(const Sizes& sizes, const Layer& layer, int64_t num_tokens);
Status CheckRows(const Sizes& sizes, int64_t width, DType dtype);

}  // namespace ep::nccl

#endif  // EP_FFI_BACKENDS_NCCL_LIMITS_H_
