// SPDX-License-Identifier: Apache-2.0

// The times of the ops of a rank, for a trace: the device writes them into a
// ring in host memory, and this reads them when the ops have ended.
//
// The device knows when this rank came to an op, and when the op ended, but not
// when the last rank came; that is found where the parts of all ranks are
// merged. Times are of the GPU's clock, which counts from 1970.

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

// Not thread-safe: the lock of the group guards it.
class Stamps {
 public:
  Stamps(std::shared_ptr<Device> device, const Sizes& sizes, int32_t rank)
      : device_(std::move(device)), sizes_(sizes), rank_(rank) {}

  // Opens the file, and allocates the ring if this is the first trace.
  Status Start(const std::string& path);

  // Gives the op that is enqueued next its place in the ring, if the trace is
  // on.
  void Give(Routing* routing);
  // Adds the op that was enqueued with this routing. A slot has `row_bytes`.
  void Add(TracedOp op, const Routing& routing, int64_t row_bytes);

  // Keeps the ops that have ended: all if `all_have`, else those before the
  // last one that the device has begun.
  void Collect(bool all_have);

  // Writes the file. No effect if the trace is off.
  Status Stop();

 private:
  // More ops than a stream takes before the host must wait for the device.
  static constexpr uint64_t kRing = 4096;

  struct Enqueued {
    TracedOp op;
    uint64_t number;
    int64_t row_bytes;
  };

  // Returns the place of an op in a ring at this address.
  Stamp* StampOf(uint64_t number, std::byte* ring) const;
  int32_t* CountsOf(uint64_t number, std::byte* ring) const;
  // Keeps an op that has ended.
  void Keep(Enqueued enqueued);

  const std::shared_ptr<Device> device_;
  const Sizes sizes_;
  const int32_t rank_;
  Trace trace_;
  std::deque<Enqueued> enqueued_;  // ascending numbers
};

}  // namespace ep::nccl

#endif  // EP_FFI_BACKENDS_NCCL_STAMPS_H_
