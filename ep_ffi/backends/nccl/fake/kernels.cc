// SPDX-License-Identifier: Apache-2.0

// Compiles kernels.cu for the host, with plain C++ instead of the CUDA
// functions that the kernels call, and makes a table of the kernels.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "ep_ffi/backends/nccl/fake/driver.h"

#define __global__
#define __device__

namespace {

struct Index {
  unsigned x;
};

thread_local Index blockIdx, threadIdx, blockDim, gridDim;

// Needs no atomic access, because a launch runs its threads one after another.
template <typename T>
T atomicMax(T* address, T value) {
  return std::exchange(*address, std::max(*address, value));
}

void __threadfence_system() { __sync_synchronize(); }

using std::max;
using std::min;

}  // namespace

#include "ep_ffi/backends/nccl/kernels.h"

// Replaces warp.h, which warp_test tests. Here lane 0 of a warp calls store()
// for all lanes, and each lane computes the result alone.
#define EP_NCCL_IS_FAKE

namespace ep::nccl {
namespace {

template <typename Load, typename Store>
int32_t WarpScan(int32_t lane, int32_t count, Load load, Store store) {
  int32_t before = 0;
  for (int32_t i = 0; i < count && lane == 0; ++i) {
    const int32_t value = load(i);
    store(i, before);
    before += value;
  }
  return before;
}

template <typename Load>
int32_t WarpMax(int32_t, int32_t count, Load load) {
  int32_t largest = 0;
  for (int32_t i = 0; i < count; ++i) largest = std::max(largest, load(i));
  return largest;
}

template <typename Is>
int32_t WarpFind(int32_t, int32_t count, Is is) {
  int32_t i = 0;
  while (i < count && !is(i)) ++i;
  return i;
}

}  // namespace
}  // namespace ep::nccl

#include "ep_ffi/backends/nccl/kernels.cu"

// The host reads reports and counts while the device writes them. Volatile
// accesses suffice on a GPU, but C++ calls them a data race.
extern "C" const char* __tsan_default_suppressions() {
  return "race:^WriteReport$\nrace:^CountOp$\nrace:Device::ReadProgress\n";
}

namespace ep::nccl::fake {
namespace {

// Runs the threads of a launch, in reverse order if `backwards`. A kernel that
// depends on the order of threads then fails in some test.
void RunGrid(unsigned num_blocks, unsigned block_size, bool backwards,
             const std::function<void()>& thread) {
  gridDim.x = num_blocks;
  blockDim.x = block_size;
  const uint64_t size = uint64_t{num_blocks} * block_size;
  for (uint64_t i = 0; i < size; ++i) {
    const uint64_t at = backwards ? size - 1 - i : i;
    blockIdx.x = at / block_size;
    threadIdx.x = at % block_size;
    thread();
  }
}

using Bind = std::function<std::function<void()>(void** parameters)>;

template <typename... Args, size_t... I>
Bind MakeBind(void (*kernel)(Args...), std::index_sequence<I...>) {
  return [kernel](void** parameters) {
    std::tuple<Args...> args;
    (std::memcpy(&std::get<I>(args), parameters[I], sizeof(Args)), ...);
    return [kernel, args] { std::apply(kernel, args); };
  };
}

template <typename... Args>
Bind MakeBind(void (*kernel)(Args...)) {
  return MakeBind(kernel, std::index_sequence_for<Args...>());
}

const std::map<std::string, Bind>& Table() {
#define EP_KERNEL(name)    \
  {                        \
    #name, MakeBind(&name) \
  }
  static const auto* table = new std::map<std::string, Bind>{
      EP_KERNEL(EpCountChoices),  EP_KERNEL(EpSumChoices),
      EP_KERNEL(EpPlaceSlabs),    EP_KERNEL(EpWriteRouting),
      EP_KERNEL(EpClearForeign),  EP_KERNEL(EpFinish),
      EP_KERNEL(EpFindNotFinite), EP_KERNEL(EpReportNotFinite),
  };
#undef EP_KERNEL
  return *table;
}

}  // namespace

bool HasKernel(const std::string& name) { return Table().count(name) > 0; }

std::function<void()> BindKernel(const std::string& name, unsigned num_blocks,
                                 unsigned block_size, void** parameters) {
  static std::atomic<int> num_launches{0};
  const bool backwards = num_launches++ % 2;
  return [=, thread = Table().at(name)(parameters)] {
    RunGrid(num_blocks, block_size, backwards, thread);
  };
}

}  // namespace ep::nccl::fake
