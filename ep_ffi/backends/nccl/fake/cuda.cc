// SPDX-License-Identifier: Apache-2.0

// The fake CUDA driver. A device is a number, device memory is host memory, and
// a stream is a thread.

#include <cuda.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
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
    : context_(context), thread_([this] { Work(); }) {
  ep::nccl::fake::LiveObjects<CUstream_st>::Get().Add(this);
}

void CUstream_st::Close() {
  ep::nccl::fake::LiveObjects<CUstream_st>::Get().Remove(this);
  {
    ep::MutexLock lock(mutex_);
    closed_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
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
    // Stays in place, since other threads only push to the back.
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

constexpr unsigned kMaxBlockSize = 1024;
constexpr unsigned kMaxGridSize = 0x7fffffff;

std::atomic<bool> initialized{false};
thread_local std::vector<CUcontext> current_contexts;

// A map that several threads use. The maps below are leaked, because threads
// may outlive the destructors of static objects.
template <typename Key, typename Value>
struct SharedMap {
  Mutex mutex;
  std::map<Key, Value> map EP_GUARDED_BY(mutex);
};

// The contexts, by device.
SharedMap<int, CUctx_st>& Contexts() {
  static auto* contexts = new SharedMap<int, CUctx_st>();
  return *contexts;
}

CUcontext ContextOf(int device) {
  auto& contexts = Contexts();
  MutexLock lock(contexts.mutex);
  return &contexts.map.try_emplace(device, device).first->second;
}

// The flags of each allocation of cuMemHostAlloc().
SharedMap<void*, unsigned>& HostAllocations() {
  static auto* allocations = new SharedMap<void*, unsigned>();
  return *allocations;
}

// Returns a stream that is never freed: a thread that the backend left behind
// after a timeout may still synchronize with it.
CUstream MakeStream(CUcontext context) {
  static auto* streams = new SharedMap<int, std::deque<CUstream_st>>();
  MutexLock lock(streams->mutex);
  return &streams->map[context->device].emplace_back(context);
}

bool IsDevice(int device) {
  return device >= 0 && device < TheMachine().num_devices;
}

}  // namespace

size_t CountRetainedContexts() {
  auto& contexts = Contexts();
  MutexLock lock(contexts.mutex);
  size_t count = 0;
  for (const auto& entry : contexts.map) count += entry.second.times_retained;
  return count;
}

size_t CountHostAllocations() {
  auto& allocations = HostAllocations();
  MutexLock lock(allocations.mutex);
  return allocations.map.size();
}

CUcontext CurrentContext() {
  return current_contexts.empty() ? nullptr : current_contexts.back();
}

bool MayWait(Contract& contract) {
  contract.RequireNoHandler();
  contract.Require(CurrentContext(), "no context is current");
  return contract.kept();
}

void RequireContext(Contract& contract, int device) {
  const CUcontext current = CurrentContext();
  if (contract.Require(current, "no context is current")) {
    contract.Require(current->device == device, "the context of device ",
                     current->device, " is current, not that of ", device);
  }
}

void RequireStream(Contract& contract, CUstream stream) {
  if (contract.Require(LiveObjects<CUstream_st>::Get().Has(stream),
                       "no such stream")) {
    RequireContext(contract, stream->context()->device);
  }
}

std::shared_ptr<CUstream_st> NewStream(int device) {
  return {MakeStream(ContextOf(device)),
          [](CUstream ended) { ended->Close(); }};
}

void Synchronize(CUstream stream) { stream->Synchronize(); }

void Enqueue(CUstream stream, std::function<void()> task) {
  stream->Enqueue("", std::move(task));
}

std::vector<std::string> TakeEnqueued(CUstream stream) {
  return stream->TakeNames();
}

extern "C" {

CUresult cuInit(unsigned flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  initialized = true;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char** sentence) {
  static const auto* sentences = new std::map<CUresult, const char*>{
      {CUDA_SUCCESS, "no error"},
      {CUDA_ERROR_INVALID_VALUE, "invalid argument"},
      {CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"},
      {CUDA_ERROR_INVALID_CONTEXT, "invalid device context"},
      {CUDA_ERROR_NOT_FOUND, "named symbol not found"},
      {CUDA_ERROR_NOT_INITIALIZED, "initialization error"},
  };
  const auto found = sentences->find(error);
  *sentence = found == sentences->end() ? nullptr : found->second;
  return *sentence ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (!initialized) return CUDA_ERROR_NOT_INITIALIZED;
  if (!IsDevice(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute,
                              CUdevice device) {
  if (!initialized) return CUDA_ERROR_NOT_INITIALIZED;
  if (!IsDevice(device)) return CUDA_ERROR_INVALID_DEVICE;
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = TheMachine().compute_capability_major;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      *value = TheMachine().shared_bytes;
      return CUDA_SUCCESS;
    default:
      RecordViolation(
          StrCat("cuDeviceGetAttribute: the fake does not know attribute ",
                 static_cast<int>(attribute)));
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  if (!initialized) return CUDA_ERROR_NOT_INITIALIZED;
  if (!IsDevice(device)) return CUDA_ERROR_INVALID_DEVICE;
  Contract contract("cuDevicePrimaryCtxRetain");
  contract.RequireNoHandler();
  if (!contract.kept()) return CUDA_ERROR_NOT_PERMITTED;
  *context = ContextOf(device);
  ++(*context)->times_retained;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  if (!IsDevice(device)) return CUDA_ERROR_INVALID_DEVICE;
  Contract contract("cuDevicePrimaryCtxRelease");
  contract.RequireNoHandler();
  const CUcontext context = ContextOf(device);
  contract.Require(context->times_retained > 0,
                   "released more often than retained");
  if (!contract.kept()) return CUDA_ERROR_INVALID_CONTEXT;
  --context->times_retained;
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
  Contract contract("cuCtxSynchronize");
  if (!MayWait(contract)) return CUDA_ERROR_INVALID_CONTEXT;
  for (CUstream stream : LiveObjects<CUstream_st>::Get().All()) {
    if (stream->context() == CurrentContext()) stream->Synchronize();
  }
  return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream* stream, unsigned) {
  Contract contract("cuStreamCreate");
  if (!MayWait(contract)) return CUDA_ERROR_INVALID_CONTEXT;
  *stream = MakeStream(CurrentContext());
  return CUDA_SUCCESS;
}

CUresult cuStreamDestroy(CUstream stream) {
  Contract contract("cuStreamDestroy");
  contract.RequireNoHandler();
  RequireStream(contract, stream);
  if (!contract.kept()) return CUDA_ERROR_INVALID_HANDLE;
  stream->Close();
  return CUDA_SUCCESS;
}

CUresult cuMemGetInfo(size_t* free, size_t* total) {
  Contract contract("cuMemGetInfo");
  if (!MayWait(contract)) return CUDA_ERROR_INVALID_CONTEXT;
  *free = *total = TheMachine().free_bytes;
  return CUDA_SUCCESS;
}

CUresult cuMemHostAlloc(void** memory, size_t bytes, unsigned flags) {
  Contract contract("cuMemHostAlloc");
  if (!MayWait(contract)) return CUDA_ERROR_INVALID_CONTEXT;
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  *memory = std::malloc(bytes);
  std::memset(*memory, 0xc5, bytes);  // CUDA does not promise zeros
  auto& allocations = HostAllocations();
  MutexLock lock(allocations.mutex);
  allocations.map[*memory] = flags;
  return CUDA_SUCCESS;
}

CUresult cuMemHostGetDevicePointer(CUdeviceptr* address, void* memory,
                                   unsigned flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  auto& allocations = HostAllocations();
  MutexLock lock(allocations.mutex);
  const auto found = allocations.map.find(memory);
  if (found == allocations.map.end() ||
      !(found->second & CU_MEMHOSTALLOC_DEVICEMAP)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *address = reinterpret_cast<CUdeviceptr>(memory);
  return CUDA_SUCCESS;
}

CUresult cuMemFreeHost(void* memory) {
  Contract contract("cuMemFreeHost");
  contract.RequireNoHandler();
  contract.Require(CurrentContext(), "no context is current");
  auto& allocations = HostAllocations();
  MutexLock lock(allocations.mutex);
  if (!contract.Require(allocations.map.erase(memory) > 0,
                        "cuMemHostAlloc() did not make it")) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  std::free(memory);
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  Contract contract("cuModuleLoadData");
  if (!MayWait(contract)) return CUDA_ERROR_INVALID_CONTEXT;
  if (!image) return CUDA_ERROR_INVALID_VALUE;
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
  Contract contract("cuModuleGetFunction");
  contract.Require(LiveObjects<CUmod_st>::Get().Has(module), "no such module");
  if (!contract.kept()) return CUDA_ERROR_INVALID_HANDLE;
  if (!HasKernel(name)) return CUDA_ERROR_NOT_FOUND;
  *function =
      &module->functions.try_emplace(name, CUfunc_st{module->context, name})
           .first->second;
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y,
                        unsigned grid_z, unsigned block_x, unsigned block_y,
                        unsigned block_z, unsigned shared_bytes,
                        CUstream stream, void** parameters, void** extra) {
  Contract contract("cuLaunchKernel");
  RequireContext(contract, function->context->device);
  RequireStream(contract, stream);
  contract.Require(shared_bytes == 0 && !extra && grid_y == 1 && grid_z == 1 &&
                       block_y == 1 && block_z == 1,
                   "the fake supports grids of one dimension only");
  if (!contract.kept()) return CUDA_ERROR_INVALID_CONTEXT;
  if (grid_x < 1 || grid_x > kMaxGridSize || block_x < 1 ||
      block_x > kMaxBlockSize) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  stream->Enqueue(function->name,
                  BindKernel(function->name, grid_x, block_x, parameters));
  return CUDA_SUCCESS;
}

}  // extern "C"

}  // namespace ep::nccl::fake
