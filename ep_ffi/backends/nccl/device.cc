// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/nccl/device.h"

#include <cstring>

#include "ep_ffi/backends/nccl/kernel_images.h"

namespace ep::nccl {
namespace {

constexpr const char* kNames[Device::kNumKernels] = {
    "EpCountChoices", "EpSumChoices", "EpPlaceSlabs",    "EpWriteRouting",
    "EpClearForeign", "EpFinish",     "EpFindNotFinite", "EpReportNotFinite"};

constexpr int kBlock = 256;  // threads per block

}  // namespace

Status Device::Open(const Libraries& libraries, int32_t ordinal,
                    int32_t num_reports, std::shared_ptr<Device>* out) {
  std::shared_ptr<Device> device(new Device(libraries));
  EP_RETURN_IF_ERROR(device->Init(ordinal, num_reports));
  *out = std::move(device);
  return Status();
}

Status Device::Init(int32_t ordinal, int32_t num_reports) {
  const Libraries& cuda = libraries_;
  EP_RETURN_IF_ERROR(cuda.Check(cuda.cuInit(0), "cuInit"));
  EP_RETURN_IF_ERROR(
      cuda.Check(cuda.cuDeviceGet(&device_, ordinal), "cuDeviceGet"));
  EP_RETURN_IF_ERROR(cuda.Check(
      cuda.cuDeviceGetAttribute(
          &shared_bytes_, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
          device_),
      "cuDeviceGetAttribute"));
  EP_RETURN_IF_ERROR(cuda.Check(
      cuda.cuDeviceGetAttribute(
          &has_rdma_,
          CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, device_),
      "cuDeviceGetAttribute"));
  EP_RETURN_IF_ERROR(
      cuda.Check(cuda.cuDevicePrimaryCtxRetain(&context_, device_),
                 "cuDevicePrimaryCtxRetain"));
  Scope scope(*this);
  // Unified addressing, which Hopper has, lets the device use host addresses.
  const size_t bytes = sizeof(Progress) + num_reports * sizeof(Report);
  void* shared = nullptr;
  EP_RETURN_IF_ERROR(
      cuda.Check(cuda.cuMemHostAlloc(&shared, bytes, CU_MEMHOSTALLOC_DEVICEMAP),
                 "cuMemHostAlloc"));
  std::memset(shared, 0, bytes);
  progress_ = static_cast<Progress*>(shared);
  reports_ = reinterpret_cast<Report*>(progress_ + 1);
  return LoadKernels();
}

Status Device::LoadKernels() {
  const Libraries& cuda = libraries_;
  int major = 0;
  EP_RETURN_IF_ERROR(cuda.Check(
      cuda.cuDeviceGetAttribute(
          &major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device_),
      "cuDeviceGetAttribute"));
  if (major < 9) {
    return Status(Code::kFailedPrecondition,
                  StrCat("the GPU has compute capability ", major,
                         ".x, but NCCL EP needs 9.0 (Hopper) or newer"));
  }
  // Prefer a cubin for this architecture, because the driver must compile PTX.
  const KernelImage* image = nullptr;
  for (const KernelImage& i : kKernelImages) {
    if (i.arch == 0 ? !image : i.arch / 10 == major) image = &i;
  }
  EP_RETURN_IF_ERROR(cuda.Check(cuda.cuModuleLoadData(&module_, image->data),
                                "cuModuleLoadData"));
  for (int i = 0; i < kNumKernels; ++i) {
    EP_RETURN_IF_ERROR(
        cuda.Check(cuda.cuModuleGetFunction(&kernels_[i], module_, kNames[i]),
                   "cuModuleGetFunction"));
  }
  return Status();
}

Device::~Device() {
  if (!context_ || leaked_) return;
  {
    Scope scope(*this);
    if (module_) libraries_.cuModuleUnload(module_);
    if (progress_) libraries_.cuMemFreeHost(progress_);
  }
  libraries_.cuDevicePrimaryCtxRelease(device_);
}

Status Device::LaunchThreads(Kernel kernel, int64_t count, CUstream stream,
                             Routing* routing) const {
  void* parameters[] = {routing};
  return Launch(kernel, (count + kBlock - 1) / kBlock, stream, parameters);
}

Status Device::LaunchBlocks(Kernel kernel, int64_t count, CUstream stream,
                            Routing* routing, Moved* moved) const {
  void* parameters[] = {routing, moved};
  return Launch(kernel, count, stream, parameters);
}

Status Device::Launch(Kernel kernel, int64_t blocks, CUstream stream,
                      void** parameters) const {
  if (blocks == 0) return Status();
  return libraries_.Check(
      libraries_.cuLaunchKernel(kernels_[kernel], blocks, 1, 1, kBlock, 1, 1,
                                /*sharedMemBytes=*/0, stream, parameters,
                                /*extra=*/nullptr),
      kNames[kernel]);
}

bool Device::TakeReport(int32_t i, uint64_t ticket, Outcome* out) const {
  Report& report = reports_[i];
  if (__atomic_load_n(&report.ticket, __ATOMIC_ACQUIRE) != ticket) return false;
  *out = report.outcome;
  __atomic_store_n(&report.ticket, uint64_t{0}, __ATOMIC_RELEASE);
  return true;
}

Progress Device::ReadProgress() const {
  return {__atomic_load_n(&progress_->begun, __ATOMIC_RELAXED),
          __atomic_load_n(&progress_->ended, __ATOMIC_RELAXED)};
}

Status Device::CountFreeBytes(int64_t* out) const {
  size_t free = 0, total = 0;
  EP_RETURN_IF_ERROR(
      libraries_.Check(libraries_.cuMemGetInfo(&free, &total), "cuMemGetInfo"));
  *out = free;
  return Status();
}

Status Device::Synchronize() const {
  Scope scope(*this);
  return libraries_.Check(libraries_.cuCtxSynchronize(), "the device");
}

Status Device::FindFailure(CUstream stream) const {
  Scope scope(*this);
  const CUresult result = libraries_.cuStreamQuery(stream);
  if (result == CUDA_ERROR_NOT_READY) return Status();
  return libraries_.Check(result, "the device");
}

}  // namespace ep::nccl
