// SPDX-License-Identifier: Apache-2.0

// The GPU of a rank: its context, our kernels, and memory that it shares with
// the host.

#ifndef EP_FFI_BACKENDS_NCCL_DEVICE_H_
#define EP_FFI_BACKENDS_NCCL_DEVICE_H_

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "ep_ffi/backends/nccl/kernels.h"
#include "ep_ffi/backends/nccl/libraries.h"
#include "ep_ffi/core/status.h"

namespace ep::nccl {

// Thread-safe after Open, with the exception of TakeReport and Leak.
class Device {
 public:
  // Opens the device that XLA calls `ordinal` in this process, and allocates
  // `num_reports` reports.
  static Status Open(const Libraries& libraries, int32_t ordinal,
                     int32_t num_reports, std::shared_ptr<Device>* out);
  ~Device();

  // Makes the context current on this thread for as long as the object lives.
  class Scope {
   public:
    explicit Scope(const Device& device) : libraries_(device.libraries_) {
      libraries_.cuCtxPushCurrent(device.context_);
    }
    ~Scope() {
      CUcontext context;
      libraries_.cuCtxPopCurrent(&context);
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const Libraries& libraries_;
  };

  const Libraries& libraries() const { return libraries_; }

  // Returns the bytes of shared memory that a block of threads may have.
  int32_t shared_bytes() const { return shared_bytes_; }

  // Returns the free bytes of the device. Its context must be current.
  Status CountFreeBytes(int64_t* out) const;

  // The kernels of kernels.cu.
  enum Kernel {
    kCountChoices,
    kSumChoices,
    kPlaceSlabs,
    kWriteRouting,
    kClearForeign,
    kFinish,
    kFindNotFinite,
    kReportNotFinite,
    kNumKernels,
  };
  // These launch a thread, a warp or a block for each of `count` items. With no
  // items they launch nothing.
  Status LaunchThreads(Kernel kernel, int64_t count, CUstream stream,
                       Routing* routing) const;
  Status LaunchWarps(Kernel kernel, int64_t count, CUstream stream,
                     Routing* routing) const;
  Status LaunchBlocks(Kernel kernel, int64_t count, CUstream stream,
                      Routing* routing, Moved* moved = nullptr) const;

  // Returns the address of report `i` on the device.
  Report* device_report(int32_t i) const { return device_reports_ + i; }
  // Takes the outcome in report `i`. Returns false if the device has not
  // written it under this ticket yet.
  bool TakeReport(int32_t i, uint64_t ticket, Outcome* out) const;

  // Returns the address of the counts of ops on the device.
  Progress* device_progress() const { return device_progress_; }
  Progress ReadProgress() const;

  // Allocates host memory that the device sees, for as long as the object
  // lives. No effect if there is some.
  Status AllocateRing(int64_t bytes);
  std::byte* ring() const { return ring_; }
  std::byte* device_ring() const { return device_ring_; }

  // Waits until the device has run all that was enqueued.
  Status Synchronize() const;

  // Makes the destructor leak everything on purpose: enqueued work may never
  // finish, and freeing what it uses would block or break it.
  void Leak() { leaked_ = true; }

 private:
  explicit Device(const Libraries& libraries) : libraries_(libraries) {}

  Status Init(int32_t ordinal, int32_t num_reports);
  // Allocates `bytes` zeros, which the host and the device see at addresses of
  // their own.
  Status AllocateShared(int64_t bytes, std::byte** host,
                        std::byte** device) const;
  Status LoadKernels();
  Status Launch(Kernel kernel, int64_t blocks, CUstream stream,
                void** parameters) const;

  const Libraries libraries_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  int32_t shared_bytes_ = 0;
  CUmodule module_ = nullptr;
  CUfunction kernels_[kNumKernels] = {};
  // In one allocation of host memory, which the device sees at other addresses.
  Progress* progress_ = nullptr;
  Report* reports_ = nullptr;
  Progress* device_progress_ = nullptr;
  Report* device_reports_ = nullptr;
  std::byte* ring_ = nullptr;
  std::byte* device_ring_ = nullptr;
  bool leaked_ = false;
};

}  // namespace ep::nccl

#endif  // EP_FFI_BACKENDS_NCCL_DEVICE_H_
