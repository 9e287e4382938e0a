// SPDX-License-Identifier: Apache-2.0

// The CUDA driver. A device is a number, device memory is host memory, and a
// stream is a thread.

#include <cuda.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ep_ffi/backends/nccl/fake/driver.h"
#include "ep_ffi/backends/nccl/fake/fake.h"
#include "ep_ffi/backends/nccl/fake/kernel_table.h"
#include "ep_ffi/backends/nccl/fake/ledger.h"

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
  ep::nccl::fake::Living<CUstream_st>::Get().Add(this);
}

void CUstream_st::Close() {
  ep::nccl::fake::Living<CUstream_st>::Get().Remove(this);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

bool CUstream_st::Enqueue(Task task) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (recorded_) {
      recorded_->push_back(std::move(task));
      return true;
    }
  }
  if (task.admit && !task.admit(this)) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  tasks_.push_back(std::move(task.run));
  changed_.notify_all();
  return true;
}

void CUstream_st::Record(std::vector<Task>* recorded) {
  std::lock_guard<std::mutex> lock(mutex_);
  recorded_ = recorded;
}

bool CUstream_st::IsRecording() {
  std::lock_guard<std::mutex> lock(mutex_);
  return recorded_ != nullptr;
}

void CUstream_st::Synchronize() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return tasks_.empty(); });
}

void CUstream_st::Work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return closed_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    lock.unlock();
    tasks_.front()();  // others only push to the back
    lock.lock();
    tasks_.pop_front();
    changed_.notify_all();
  }
}

namespace ep::nccl::fake {
namespace {

constexpr unsigned kMaxBlockSize = 1024;
constexpr unsigned kMaxGridSize = 0x7fffffff;

std::atomic<bool> initialized{false};
thread_local std::vector<CUcontext> current_contexts;

// A map that several threads use.
template <typename Key, typename Value>
struct Shared {
  std::mutex mutex;
  std::map<Key, Value> map;
};

Shared<int, CUctx_st>& Contexts() {
  static auto* contexts = new Shared<int, CUctx_st>();
  return *contexts;
}

CUcontext ContextOf(int device) {
  std::lock_guard<std::mutex> lock(Contexts().mutex);
  return &Contexts().map.try_emplace(device, device).first->second;
}

// The flags of what cuMemHostAlloc() made.
Shared<void*, unsigned>& HostAllocations() {
  static auto* allocations = new Shared<void*, unsigned>();
  return *allocations;
}

Shared<std::string, unsigned>& LargestGrids() {
  static auto* grids = new Shared<std::string, unsigned>();
  return *grids;
}

CUstream MakeStream(CUcontext context) {
  // A thread that was left behind may still synchronize with a stream.
  static auto* streams = new Shared<int, std::deque<CUstream_st>>();
  std::lock_guard<std::mutex> lock(streams->mutex);
  return &streams->map[context->device].emplace_back(context);
}

bool IsDevice(int device) {
  return device >= 0 && device < TheMachine().num_devices;
}

}  // namespace

size_t CountRetainedContexts() {
  std::lock_guard<std::mutex> lock(Contexts().mutex);
  size_t count = 0;
  for (const auto& entry : Contexts().map) count += entry.second.times_retained;
  return count;
}

size_t CountHostAllocations() {
  std::lock_guard<std::mutex> lock(HostAllocations().mutex);
  return HostAllocations().map.size();
}

CUcontext CurrentContext() {
  return current_contexts.empty() ? nullptr : current_contexts.back();
}

void DemandContext(Contract& contract, int device) {
  const CUcontext current = CurrentContext();
  if (contract.Demand(current, "no context is current")) {
    contract.Demand(current->device == device, "the context of device ",
                    current->device, " is current, not that of ", device);
  }
}

void DemandStream(Contract& contract, CUstream stream) {
  if (contract.Demand(Living<CUstream_st>::Get().Has(stream),
                      "no such stream")) {
    DemandContext(contract, stream->context()->device);
  }
}

std::shared_ptr<CUstream_st> NewStream(int device) {
  return {MakeStream(ContextOf(device)),
          [](CUstream ended) { ended->Close(); }};
}

void Synchronize(CUstream stream) { stream->Synchronize(); }

unsigned TakeLargestGrid(const std::string& kernel) {
  std::lock_guard<std::mutex> lock(LargestGrids().mutex);
  return std::exchange(LargestGrids().map[kernel], 0);
}

struct Capture::Recorded {
  CUstream stream;
  std::vector<CUstream_st::Task> tasks;
};

Capture::Capture(CUstream stream) : recorded_(new Recorded{stream, {}}) {
  stream->Record(&recorded_->tasks);
}

Capture::~Capture() { End(); }

void Capture::End() { recorded_->stream->Record(nullptr); }

void Capture::Replay(CUstream stream) const {
  for (const CUstream_st::Task& task : recorded_->tasks) stream->Enqueue(task);
}

extern "C" {

CUresult cuInit(unsigned flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  initialized = true;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char** sentence) {
  switch (error) {
    case CUDA_SUCCESS:
      *sentence = "no error";
      return CUDA_SUCCESS;
    case CUDA_ERROR_INVALID_VALUE:
      *sentence = "invalid argument";
      return CUDA_SUCCESS;
    case CUDA_ERROR_INVALID_DEVICE:
      *sentence = "invalid device ordinal";
      return CUDA_SUCCESS;
    case CUDA_ERROR_INVALID_CONTEXT:
      *sentence = "invalid device context";
      return CUDA_SUCCESS;
    case CUDA_ERROR_NOT_FOUND:
      *sentence = "named symbol not found";
      return CUDA_SUCCESS;
    case CUDA_ERROR_NOT_INITIALIZED:
      *sentence = "initialization error";
      return CUDA_SUCCESS;
    default:
      *sentence = nullptr;
      return CUDA_ERROR_INVALID_VALUE;
  }
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
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      *value = 0;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      *value = TheMachine().shared_bytes;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      *value = 132;
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
  contract.DemandNoHandler();
  if (!contract.kept()) return CUDA_ERROR_NOT_PERMITTED;
  *context = ContextOf(device);
  ++(*context)->times_retained;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  if (!IsDevice(device)) return CUDA_ERROR_INVALID_DEVICE;
  Contract contract("cuDevicePrimaryCtxRelease");
  contract.DemandNoHandler();
  const CUcontext context = ContextOf(device);
  contract.Demand(context->times_retained > 0,
                  "released more often than retained");
  if (!contract.kept()) return CUDA_ERROR_INVALID_CONTEXT;
  --context->times_retained;
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context) {
  Contract contract("cuCtxPushCurrent");
  contract.Demand(context && context->times_retained > 0,
                  "nobody retains the context");
  if (!contract.kept()) return CUDA_ERROR_INVALID_CONTEXT;
  current_contexts.push_back(context);
  return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext* context) {
  Contract contract("cuCtxPopCurrent");
  contract.Demand(CurrentContext(), "no context is current");
  if (!contract.kept()) return CUDA_ERROR_INVALID_CONTEXT;
  if (context) *context = CurrentContext();
  current_contexts.pop_back();
  return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize() {
  Contract contract("cuCtxSynchronize");
  contract.DemandNoHandler();
  contract.Demand(CurrentContext(), "no context is current");
  if (!contract.kept()) return CUDA_ERROR_INVALID_CONTEXT;
  for (CUstream stream : Living<CUstream_st>::Get().All()) {
    if (stream->context() == CurrentContext()) stream->Synchronize();
  }
  return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream* stream, unsigned) {
  Contract contract("cuStreamCreate");
  contract.DemandNoHandler();
  contract.Demand(CurrentContext(), "no context is current");
  if (!contract.kept()) return CUDA_ERROR_INVALID_CONTEXT;
  *stream = MakeStream(CurrentContext());
  return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream stream) {
  Contract contract("cuStreamSynchronize");
  contract.DemandNoHandler();
  DemandStream(contract, stream);
  if (!contract.kept()) return CUDA_ERROR_INVALID_HANDLE;
  stream->Synchronize();
  return CUDA_SUCCESS;
}

CUresult cuStreamDestroy(CUstream stream) {
  Contract contract("cuStreamDestroy");
  contract.DemandNoHandler();
  DemandStream(contract, stream);
  if (!contract.kept()) return CUDA_ERROR_INVALID_HANDLE;
  stream->Close();
  return CUDA_SUCCESS;
}

CUresult cuMemGetInfo(size_t* free, size_t* total) {
  Contract contract("cuMemGetInfo");
  contract.DemandNoHandler();
  contract.Demand(CurrentContext(), "no context is current");
  if (!contract.kept()) return CUDA_ERROR_INVALID_CONTEXT;
  *free = *total = TheMachine().free_bytes;
  return CUDA_SUCCESS;
}

CUresult cuMemHostAlloc(void** memory, size_t bytes, unsigned flags) {
  Contract contract("cuMemHostAlloc");
  contract.DemandNoHandler();
  contract.Demand(CurrentContext(), "no context is current");
  if (!contract.kept()) return CUDA_ERROR_INVALID_CONTEXT;
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  *memory = std::malloc(bytes);
  std::memset(*memory, 0xc5, bytes);  // nobody promises zeros
  std::lock_guard<std::mutex> lock(HostAllocations().mutex);
  HostAllocations().map[*memory] = flags;
  return CUDA_SUCCESS;
}

CUresult cuMemHostGetDevicePointer(CUdeviceptr* address, void* memory,
                                   unsigned flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard<std::mutex> lock(HostAllocations().mutex);
  const auto found = HostAllocations().map.find(memory);
  if (found == HostAllocations().map.end() ||
      !(found->second & CU_MEMHOSTALLOC_DEVICEMAP)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *address = reinterpret_cast<CUdeviceptr>(memory);
  return CUDA_SUCCESS;
}

CUresult cuMemFreeHost(void* memory) {
  Contract contract("cuMemFreeHost");
  contract.DemandNoHandler();
  contract.Demand(CurrentContext(), "no context is current");
  std::lock_guard<std::mutex> lock(HostAllocations().mutex);
  if (!contract.Demand(HostAllocations().map.erase(memory) > 0,
                       "cuMemHostAlloc() did not make it")) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  std::free(memory);
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  Contract contract("cuModuleLoadData");
  contract.DemandNoHandler();
  contract.Demand(CurrentContext(), "no context is current");
  if (!contract.kept()) return CUDA_ERROR_INVALID_CONTEXT;
  if (!image) return CUDA_ERROR_INVALID_VALUE;
  *module = Living<CUmod_st>::Get().Add(new CUmod_st{CurrentContext(), {}});
  return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) {
  Contract contract("cuModuleUnload");
  contract.DemandNoHandler();
  if (!contract.Demand(Living<CUmod_st>::Get().Remove(module),
                       "no such module")) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  DemandContext(contract, module->context->device);
  delete module;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule module,
                             const char* name) {
  Contract contract("cuModuleGetFunction");
  contract.Demand(Living<CUmod_st>::Get().Has(module), "no such module");
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
  DemandContext(contract, function->context->device);
  DemandStream(contract, stream);
  contract.Demand(shared_bytes == 0 && !extra && grid_y == 1 && grid_z == 1 &&
                      block_y == 1 && block_z == 1,
                  "the fake knows grids of one dimension only");
  if (!contract.kept()) return CUDA_ERROR_INVALID_CONTEXT;
  if (grid_x < 1 || grid_x > kMaxGridSize || block_x < 1 ||
      block_x > kMaxBlockSize) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  {
    std::lock_guard<std::mutex> lock(LargestGrids().mutex);
    unsigned& largest = LargestGrids().map[function->name];
    largest = std::max(largest, grid_x);
  }
  stream->Enqueue({BindKernel(function->name, grid_x, block_x, parameters)});
  return CUDA_SUCCESS;
}

CUresult cuMemsetD32Async(CUdeviceptr address, unsigned value, size_t count,
                          CUstream stream) {
  Contract contract("cuMemsetD32Async");
  DemandStream(contract, stream);
  if (!contract.kept()) return CUDA_ERROR_INVALID_CONTEXT;
  if (address % sizeof(value) != 0) return CUDA_ERROR_INVALID_VALUE;
  stream->Enqueue({[=] {
    std::fill_n(reinterpret_cast<unsigned*>(address), count, value);
  }});
  return CUDA_SUCCESS;
}

}  // extern "C"

}  // namespace ep::nccl::fake
