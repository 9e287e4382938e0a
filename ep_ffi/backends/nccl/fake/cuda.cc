// SPDX-License-Identifier: Apache-2.0

// The fake CUDA driver. A device is a number, device memory is host memory, and
// a stream is a thread.

#include <cuda.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ep_ffi/backends/nccl/fake/checks.h"
#include "ep_ffi/backends/nccl/fake/driver.h"
#include "ep_ffi/backends/nccl/fake/fake.h"
#include "ep_ffi/core/mutex.h"

struct CUfunc_st {
  const CUctx_st* context;
  std::string name;
};

struct CUmod_st {
  const CUctx_st* context;
  std::map<std::string, CUfunc_st> functions;
};

CUstream_st::CUstream_st(CUcontext context)
    : context_(context), thread_([this] { Work(); }) {}

void CUstream_st::Close() {
  {
    ep::MutexLock lock(mutex_);
    closed_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
}

bool CUstream_st::IsClosed() {
  ep::MutexLock lock(mutex_);
  return closed_;
}

void CUstream_st::Enqueue(const std::string& name, std::function<void()> task) {
  ep::MutexLock lock(mutex_);
  names_.push_back(name);
  tasks_.push_back(std::move(task));
  changed_.NotifyAll();
}

std::vector<std::string> CUstream_st::TakeNames() {
  ep::MutexLock lock(mutex_);
  return std::exchange(names_, {});
}

void CUstream_st::Synchronize() {
  ep::MutexLock lock(mutex_);
  while (!tasks_.empty()) changed_.Wait(mutex_);
}

void CUstream_st::Work() {
  ep::MutexLock lock(mutex_);
  while (true) {
    while (!closed_ && tasks_.empty()) changed_.Wait(mutex_);
    if (tasks_.empty()) return;
    // The task keeps its address, because other threads only push to the back.
    const std::function<void()>& task = tasks_.front();
    mutex_.Unlock();
    task();
    mutex_.Lock();
    tasks_.pop_front();
    changed_.NotifyAll();
  }
}

namespace ep::nccl::fake {
namespace {

constexpr int kMaxDevices = 16;

std::atomic<bool> initialized{false};
thread_local std::vector<CUcontext> current_contexts;

CUcontext ContextOf(int device) {
  // Leaked, because threads may outlive the destructors of static objects.
  static auto* contexts = [] {
    auto* all = new std::array<CUctx_st, kMaxDevices>();
    for (int i = 0; i < kMaxDevices; ++i) (*all)[i].device = i;
    return all;
  }();
  return &contexts->at(device);
}

}  // namespace

size_t CountRetainedContexts() {
  size_t count = 0;
  for (int i = 0; i < kMaxDevices; ++i) count += ContextOf(i)->times_retained;
  return count;
}

CUcontext CurrentContext() {
  return current_contexts.empty() ? nullptr : current_contexts.back();
}

bool MayWait(Contract contract) {
  contract.RequireNoHandler();
  contract.Require(CurrentContext(), "no context is current");
  return contract.kept();
}

void RequireContext(Contract& contract, int device) {
  const CUcontext current = CurrentContext();
  if (contract.Require(current, "no context is current")) {
    contract.Require(current->device == device, "the context of device ",
                     current->device, " is current, expected device ", device);
  }
}

void RequireStream(Contract& contract, CUstream stream) {
  if (contract.Require(
          LiveObjects<CUstream_st>::Get().Has(stream) && !stream->IsClosed(),
          "no such stream")) {
    RequireContext(contract, stream->context()->device);
  }
}

std::shared_ptr<CUstream_st> NewStream(int device) {
  return {
      LiveObjects<CUstream_st>::Get().Add(new CUstream_st(ContextOf(device))),
      [](CUstream stream) { stream->Close(); }};
}

void Synchronize(CUstream stream) { stream->Synchronize(); }

void Enqueue(CUstream stream, std::function<void()> task) {
  stream->Enqueue("", std::move(task));
}

std::vector<std::string> TakeEnqueued(CUstream stream) {
  return stream->TakeNames();
}

extern "C" {

CUresult cuInit(unsigned) {
  initialized = true;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char** sentence) {
  *sentence = error == CUDA_ERROR_INVALID_DEVICE
                  ? "invalid device ordinal"
                  : "an error of the fake driver";
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (!initialized) return CUDA_ERROR_NOT_INITIALIZED;
  if (ordinal < 0 || ordinal >= TheMachine().num_devices) {
    return CUDA_ERROR_INVALID_DEVICE;
  }
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute,
                              CUdevice) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
               ? TheMachine().compute_capability_major
               : TheMachine().shared_bytes;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  Contract("cuDevicePrimaryCtxRetain").RequireNoHandler();
  *context = ContextOf(device);
  ++(*context)->times_retained;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  Contract contract("cuDevicePrimaryCtxRelease");
  contract.RequireNoHandler();
  contract.Require(ContextOf(device)->times_retained-- > 0,
                   "released more often than retained");
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context) {
  Contract contract("cuCtxPushCurrent");
  contract.Require(context && context->times_retained > 0,
                   "the context is not retained");
  if (!contract.kept()) return CUDA_ERROR_INVALID_CONTEXT;
  current_contexts.push_back(context);
  return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext* context) {
  Contract contract("cuCtxPopCurrent");
  contract.Require(CurrentContext(), "no context is current");
  if (!contract.kept()) return CUDA_ERROR_INVALID_CONTEXT;
  if (context) *context = CurrentContext();
  current_contexts.pop_back();
  return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize() {
  if (!MayWait(Contract("cuCtxSynchronize"))) return CUDA_ERROR_INVALID_CONTEXT;
  for (CUstream stream : LiveObjects<CUstream_st>::Get().All()) {
    if (stream->context() == CurrentContext()) stream->Synchronize();
  }
  return CUDA_SUCCESS;
}

CUresult cuStreamQuery(CUstream stream) {
  Contract contract("cuStreamQuery");
  RequireStream(contract, stream);
  const Machine& machine = TheMachine();
  const bool fails = machine.failing == contract.function() &&
                     machine.failing_device == stream->context()->device;
  return fails ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_ERROR_NOT_READY;
}

CUresult cuMemGetInfo(size_t* free, size_t* total) {
  if (!MayWait(Contract("cuMemGetInfo"))) return CUDA_ERROR_INVALID_CONTEXT;
  const bool is_poor = CurrentContext()->device == TheMachine().poor_device;
  *free = *total = is_poor ? 0 : TheMachine().free_bytes;
  return CUDA_SUCCESS;
}

CUresult cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  if (!MayWait(Contract("cuMemHostAlloc"))) return CUDA_ERROR_INVALID_CONTEXT;
  *memory = std::malloc(bytes);
  std::memset(*memory, 0xc5, bytes);  // CUDA does not promise zeros
  LiveObjects<std::byte>::Get().Add(static_cast<std::byte*>(*memory));
  return CUDA_SUCCESS;
}

CUresult cuMemFreeHost(void* memory) {
  Contract contract("cuMemFreeHost");
  contract.RequireNoHandler();
  contract.Require(CurrentContext(), "no context is current");
  if (!contract.Require(
          LiveObjects<std::byte>::Get().Remove(static_cast<std::byte*>(memory)),
          "cuMemHostAlloc() did not make it")) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  std::free(memory);
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule* module, const void*) {
  if (!MayWait(Contract("cuModuleLoadData"))) return CUDA_ERROR_INVALID_CONTEXT;
  *module =
      LiveObjects<CUmod_st>::Get().Add(new CUmod_st{CurrentContext(), {}});
  return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) {
  Contract contract("cuModuleUnload");
  contract.RequireNoHandler();
  if (!contract.Require(LiveObjects<CUmod_st>::Get().Remove(module),
                        "no such module")) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  RequireContext(contract, module->context->device);
  delete module;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule module,
                             const char* name) {
  if (!HasKernel(name)) return CUDA_ERROR_NOT_FOUND;
  *function =
      &module->functions.try_emplace(name, CUfunc_st{module->context, name})
           .first->second;
  return CUDA_SUCCESS;
}

// Ignores the y and z dimensions, because our grids have only one dimension.
CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned,
                        unsigned, unsigned block_x, unsigned, unsigned,
                        unsigned, CUstream stream, void** parameters, void**) {
  Contract contract("cuLaunchKernel");
  RequireContext(contract, function->context->device);
  RequireStream(contract, stream);
  if (!contract.kept()) return CUDA_ERROR_INVALID_CONTEXT;
  if (grid_x < 1) return CUDA_ERROR_INVALID_VALUE;
  stream->Enqueue(function->name,
                  BindKernel(function->name, grid_x, block_x, parameters));
  return CUDA_SUCCESS;
}

}  // extern "C"

}  // namespace ep::nccl::fake
