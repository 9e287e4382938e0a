// SPDX-License-Identifier: Apache-2.0

#ifndef EP_FFI_BACKENDS_NCCL_DEVICE_H_
#define EP_FFI_BACKENDS_NCCL_DEVICE_H_

#include <cuda.h>

#include <cstdint>
#include <memory>

#include "ep_ffi/backends/nccl/kernels.h"
#include "ep_ffi/backends/nccl/libraries.h"
#include "ep_ffi/core/status.h"

namespace ep::nccl {

// A rank's GPU: its context, our kernels, and host memory for the device.
//
// Thread-safe after Open, except TakeReport and Leak.
class Device {
 public:
  // Opens the GPU with XLA's number `ordinal` in this process, and allocates
  // `num_reports` reports.
  static Status Open(const Libraries& libraries, int32_t ordinal,
                     int32_t num_reports, std::shared_ptr<Device>* out);
  ~Device();

  // A scope in which the GPU's context is current on this thread.
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

  // Returns the limit of a thread block's shared memory, in bytes.
  int32_t shared_bytes() const { return shared_bytes_; }

  // Returns whether network cards may access memory of this GPU, as NCCL
  // allocates it.
  bool has_rdma() const { return has_rdma_; }

  // Sets `out` to the free bytes of the GPU, whose context must be current.
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
  // Launch a thread or a block for each of `count` items. Launch nothing if
  // there are no items.
  Status LaunchThreads(Kernel kernel, int64_t count, CUstream stream,
                       Routing* routing) const;
  Status LaunchBlocks(Kernel kernel, int64_t count, CUstream stream,
                      Routing* routing, Moved* moved = nullptr) const;

  // The reports and the op counts are in host memory, which the device accesses
  // at the same addresses.
  Report* report(int32_t i) const { return reports_ + i; }
  // Moves the outcome of report `i` to `out`. Returns false if the device has
  // not yet written an outcome with this ticket.
  bool TakeReport(int32_t i, uint64_t ticket, Outcome* out) const;

  Progress* progress() const { return progress_; }
  Progress ReadProgress() const;

  // Waits until the device has run all enqueued work.
  Status Synchronize() const;
  // Returns the error after which the device runs no more work, if any. Does
  // not wait.
  Status FindFailure(CUstream stream) const;

  // Makes the destructor leak all resources: enqueued work may never finish,
  // and freeing memory that the work uses would block or break the work.
  void Leak() { leaked_ = true; }

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
  int32_t has_rdma_ = 0;
  CUmodule module_ = nullptr;
  CUfunction kernels_[kNumKernels] = {};
  Progress* progress_ = nullptr;
  Report* reports_ = nullptr;  // part of progress_'s allocation
  bool leaked_ = false;
};

}  // namespace ep::nccl

#endif  // EP_FFI_BACKENDS_NCCL_DEVICE_H_
