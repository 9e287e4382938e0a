// SPDX-License-Identifier: Apache-2.0

#ifndef EP_FFI_BACKENDS_NCCL_STAMPS_H_
#define EP_FFI_BACKENDS_NCCL_STAMPS_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>

#include "ep_ffi/backends/nccl/device.h"
#include "ep_ffi/backends/nccl/kernels.h"
#include "ep_ffi/backends/nccl/limits.h"
#include "ep_ffi/core/status.h"
#include "ep_ffi/core/trace.h"

namespace ep::nccl {

// The trace of one rank. The device writes the times of each op to a ring in
// host memory, and this class reads them after the op has ended.
//
// A stamp has the arrival time of this rank and the time when the op ended. The
// merge of all ranks' traces adds the arrival time of the last rank. Times are
// from the GPU's clock, which counts from 1970.
//
// Not thread-safe.
class Stamps {
 public:
  Stamps(std::shared_ptr<Device> device, const Sizes& sizes, int32_t rank)
      : device_(std::move(device)), sizes_(sizes), rank_(rank) {}

  // Opens the trace file. The first call allocates the ring.
  Status Start(const std::string& path);

  // Assigns a stamp in the ring to the next op, if the trace is on.
  void Give(Routing* routing);
  // Adds the op that was enqueued with `routing` and rows of `row_bytes` bytes.
  void Add(TracedOp op, const Routing& routing, int64_t row_bytes);

  // Writes to the trace the ops that have ended: all enqueued ops if
  // `all_have`, otherwise the ops before the last op that has begun.
  void Collect(bool all_have);

  // Writes the file. Does nothing if the trace is off.
  Status Stop();

 private:
  // Number of stamps: 16 for each ep_prepare that the host may be ahead.
  static constexpr uint64_t kRing = 4096;

  struct Enqueued {
    TracedOp op;
    uint64_t number;
    int64_t row_bytes;
  };

  Stamp* StampOf(uint64_t number) const;
  int32_t* CountsOf(uint64_t number) const;
  // Writes an ended op to the trace.
  void Keep(Enqueued enqueued);

  const std::shared_ptr<Device> device_;
  const Sizes sizes_;
  const int32_t rank_;
  Trace trace_;
  std::deque<Enqueued> enqueued_;  // ascending numbers
};

}  // namespace ep::nccl

#endif  // EP_FFI_BACKENDS_NCCL_STAMPS_H_
