// SPDX-License-Identifier: Apache-2.0

// The GPU of a rank: its context, our kernels, and memory that both sides see.

#ifndef EP_FFI_BACKENDS_NCCL_DEVICE_H_
#define EP_FFI_BACKENDS_NCCL_DEVICE_H_

#include <cuda.h>

#include <cstdint>
#include <memory>

#include "ep_ffi/backends/nccl/kernels.h"
#include "ep_ffi/backends/nccl/libraries.h"
#include "ep_ffi/core/status.h"

namespace ep::nccl {

class Device {
 public:
  // `ordinal` as XLA numbers the devices of the process. `num_reports` are
  // shared with the device.
  static Status Open(const Libraries& libraries, int32_t ordinal,
                     int32_t num_reports, std::shared_ptr<Device>* out);
  ~Device();

  // Makes the context the calling thread's while it lives.
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

  // The shared memory that a block of threads may have.
  int32_t shared_bytes() const { return shared_bytes_; }

  // In the current context.
  Status CountFreeBytes(int64_t* out) const;

  // The kernels of kernels.cu. A count of zero is no launch.
  enum Kernel {
    kCountChoices,
    kTell,
    kPlaceSlabs,
    kJudge,
    kChoose,
    kGuard,
    kFinish,
    kFindNotFinite,
    kReportNotFinite,
    kNumKernels,
  };
  // A thread for each of `count` items.
  Status LaunchThreads(Kernel kernel, int64_t count, CUstream stream,
                       Routing* routing) const;
  // A warp for each of `count` items.
  Status LaunchWarps(Kernel kernel, int64_t count, CUstream stream,
                     Routing* routing) const;
  // A block for each of `count` items.
  Status LaunchBlocks(Kernel kernel, int64_t count, CUstream stream,
                      Routing* routing, Moved* moved) const;

  // Where the device writes report `i`.
  Report* device_report(int32_t i) const { return device_reports_ + i; }
  // Takes what the device has written there under `ticket`, if it has.
  bool TakeReport(int32_t i, uint64_t ticket, Verdict* out) const;

  // Waits until all that was enqueued has run.
  Status Synchronize() const;

  // Frees nothing in the end: what was enqueued may never have run, and to free
  // what it uses waits for it, or pulls it away.
  void Forsake() { forsaken_ = true; }

 private:
  explicit Device(const Libraries& libraries) : libraries_(libraries) {}

  Status Init(int32_t ordinal, int32_t num_reports);
  Status LoadKernels();
  Status Launch(Kernel kernel, int64_t blocks, CUstream stream,
                void** parameters) const;

  const Libraries libraries_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  int32_t shared_bytes_ = 0;
  CUmodule module_ = nullptr;
  CUfunction kernels_[kNumKernels] = {};
  Report* reports_ = nullptr;
  Report* device_reports_ = nullptr;
  bool forsaken_ = false;
};

}  // namespace ep::nccl

#endif  // EP_FFI_BACKENDS_NCCL_DEVICE_H_
