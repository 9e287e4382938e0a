// SPDX-License-Identifier: Apache-2.0

#ifndef EP_FFI_BACKENDS_NCCL_LIBRARIES_H_
#define EP_FFI_BACKENDS_NCCL_LIBRARIES_H_

#include <cuda.h>
#include <nccl.h>
#include <nccl_device/core.h>
#include <nccl_ep.h>

#include <string>

#include "ep_ffi/core/status.h"

namespace ep::nccl {

// The functions that this backend calls. symbols_test in //third_party/cuda
// parses them.
#define EP_CUDA_FUNCTIONS(F)   \
  F(cuCtxPopCurrent)           \
  F(cuCtxPushCurrent)          \
  F(cuCtxSynchronize)          \
  F(cuDeviceGet)               \
  F(cuDeviceGetAttribute)      \
  F(cuDevicePrimaryCtxRelease) \
  F(cuDevicePrimaryCtxRetain)  \
  F(cuGetErrorString)          \
  F(cuInit)                    \
  F(cuLaunchKernel)            \
  F(cuMemFreeHost)             \
  F(cuMemGetInfo)              \
  F(cuMemHostAlloc)            \
  F(cuModuleGetFunction)       \
  F(cuModuleLoadData)          \
  F(cuModuleUnload)            \
  F(cuStreamQuery)

#define EP_NCCL_FUNCTIONS(F) \
  F(ncclAllGather)           \
  F(ncclCommAbort)           \
  F(ncclCommDestroy)         \
  F(ncclCommInitRank)        \
  F(ncclCommQueryProperties) \
  F(ncclGetErrorString)      \
  F(ncclGetLastError)        \
  F(ncclGetUniqueId)         \
  F(ncclGetVersion)

#define EP_NCCL_EP_FUNCTIONS(F) \
  F(ncclEpCombine)              \
  F(ncclEpCreateGroup)          \
  F(ncclEpDispatch)             \
  F(ncclEpGroupDestroy)         \
  F(ncclEpHandleDestroy)        \
  F(ncclEpHandleMemSize)        \
  F(ncclEpInitHandle)           \
  F(ncclEpUpdateHandle)

// The functions of NCCL, NCCL EP and the CUDA driver, found at run time.
//
// A process must have only one NCCL, and JAX loads one. So this backend links
// no NCCL, and uses the NCCL that the process has already loaded, if any.
struct Libraries {
#define EP_MEMBER(function) decltype(&::function) function;
  EP_CUDA_FUNCTIONS(EP_MEMBER)
  EP_NCCL_FUNCTIONS(EP_MEMBER)
  EP_NCCL_EP_FUNCTIONS(EP_MEMBER)
#undef EP_MEMBER
  int nccl_version;

  // Finds all functions, and checks the libraries. `nccl` is the path of NCCL
  // if the process has loaded none. `nccl_ep` is the path of NCCL EP. If a path
  // is empty, the process may define the functions, as in tests; otherwise the
  // system's search path decides.
  static Status Load(const std::string& nccl, const std::string& nccl_ep,
                     Libraries* out);

  // Returns an error that names the function `what` unless `result` is success.
  Status Check(CUresult result, const char* what) const;
  Status Check(ncclResult_t result, const char* what) const;
};

}  // namespace ep::nccl

#endif  // EP_FFI_BACKENDS_NCCL_LIBRARIES_H_
