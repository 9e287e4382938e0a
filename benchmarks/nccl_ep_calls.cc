// SPDX-License-Identifier: Apache-2.0

// C functions that call NCCL EP directly, without XLA, and without the kernels
// that ep_ffi/backends/nccl adds to it. benchmarks/nccl_ep.py calls them
// through ctypes; see ep_ffi/core/export.h.

#include <cuda.h>
#include <nccl_ep.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "ep_ffi/backends/nccl/calls.h"
#include "ep_ffi/backends/nccl/communicator.h"
#include "ep_ffi/backends/nccl/deadline.h"
#include "ep_ffi/backends/nccl/device.h"
#include "ep_ffi/backends/nccl/libraries.h"
#include "ep_ffi/backends/nccl/limits.h"
#include "ep_ffi/backends/nccl/symbols.h"
#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/export.h"
#include "ep_ffi/core/status.h"

namespace ep::nccl {

// A rank, with a group, a handle and a stream of its own.
struct Rank {
  ~Rank() {
    if (stream) {
      Device::Scope scope(*device);
      if (handle) (void)communicator->CloseHandle(handle);
      destroy_stream(stream);
    }
    if (!communicator) return;
    (void)RunWithin(timeout_s, "to disconnect", [c = communicator] {
      c->Destroy();
      return Status();
    });
  }

  // The backend does not need these functions, because XLA gives it streams.
  Status CreateStream() {
    decltype(&::cuStreamCreate) create = nullptr;
    Symbols symbols("libcuda.so.1", "");
    symbols.Find(EP_SYMBOL(cuStreamCreate), &create);
    symbols.Find(EP_SYMBOL(cuStreamDestroy), &destroy_stream);
    EP_RETURN_IF_ERROR(symbols.status());
    Device::Scope scope(*device);
    return device->libraries().Check(create(&stream, CU_STREAM_NON_BLOCKING),
                                     "cuStreamCreate");
  }

  // Makes the context current, and runs a function of NCCL EP.
  template <typename Function>
  Status Run(const char* name, Function function) const {
    Device::Scope scope(*device);
    return CallNcclEp(device->libraries(), name, function);
  }

  template <typename Byte>
  RowsOf<Byte> Tokens(Byte* data) const {
    return {data, sizes.max_tokens, width, dtype};
  }
  template <typename Byte>
  RowsOf<Byte> Slots(Byte* data) const {
    return {data, sizes.capacity, width, dtype};
  }

  Sizes sizes;
  Layer layer;
  int64_t width;
  DType dtype;
  double timeout_s;
  std::shared_ptr<Device> device;
  std::shared_ptr<Communicator> communicator;
  decltype(&::cuStreamDestroy) destroy_stream = nullptr;
  CUstream stream = nullptr;
  ncclEpHandle_t handle = nullptr;
};

}  // namespace ep::nccl

using ep::Export;
using ep::Status;
using ep::nccl::Device;
using ep::nccl::Rank;

// Connects a rank, until ep_bench_disconnect. `handle_bytes` receives the size
// of the memory that ep_bench_route needs. Collective.
EP_EXPORT int32_t ep_bench_connect(
    int32_t rank, int32_t device, int64_t num_experts, int64_t ep_size,
    int64_t num_tokens, int64_t top_k, int64_t capacity, int64_t width,
    int32_t dtype, double timeout_s, const char* id, int64_t id_bytes,
    const char* nccl, const char* nccl_ep, Rank** out, int64_t* handle_bytes,
    char* error, int64_t error_bytes) {
  return Export(error, error_bytes, [&] {
    auto made = std::make_unique<Rank>();
    made->width = width;
    made->dtype = static_cast<ep::DType>(dtype);
    made->timeout_s = timeout_s;
    made->sizes = {num_experts,
                   ep_size,
                   num_tokens,
                   capacity,
                   width * ep::ByteWidth(made->dtype),
                   /*max_num_sms=*/0};
    made->layer = {top_k, /*alignment=*/1, capacity, /*drop=*/false, {}};
    EP_RETURN_IF_ERROR(ep::nccl::CheckSizes(made->sizes));
    EP_RETURN_IF_ERROR(
        ep::nccl::CheckLayer(made->sizes, made->layer, num_tokens));
    EP_RETURN_IF_ERROR(ep::nccl::CheckRows(made->sizes, width, made->dtype));
    ep::nccl::Libraries libraries;
    EP_RETURN_IF_ERROR(ep::nccl::Libraries::Load(nccl, nccl_ep, &libraries));
    EP_RETURN_IF_ERROR(
        Device::Open(libraries, device, /*num_reports=*/1, &made->device));
    EP_RETURN_IF_ERROR(made->CreateStream());
    EP_RETURN_IF_ERROR(ep::nccl::Communicator::Create(
        made->device, made->sizes, rank, std::string(id, id_bytes), timeout_s,
        &made->communicator));
    Device::Scope scope(*made->device);
    EP_RETURN_IF_ERROR(
        made->communicator->HandleBytes(made->layer, handle_bytes));
    *out = made.release();
    return Status();
  });
}

// Makes the handle of choices [T, K] in `mem`. Collective.
EP_EXPORT int32_t ep_bench_route(Rank* rank, std::byte* mem, int64_t bytes,
                                 const int64_t* choices, char* error,
                                 int64_t error_bytes) {
  return Export(error, error_bytes, [&] {
    {
      Device::Scope scope(*rank->device);
      EP_RETURN_IF_ERROR(rank->communicator->OpenHandle(rank->layer, mem, bytes,
                                                        &rank->handle));
    }
    EP_RETURN_IF_ERROR(rank->Run("ncclEpUpdateHandle", [&] {
      return Update(rank->device->libraries(), rank->handle, choices,
                    rank->sizes.max_tokens, rank->layer.top_k, rank->stream);
    }));
    return rank->device->Synchronize();
  });
}

// Both weights may be null, here and below.
EP_EXPORT int32_t ep_bench_dispatch(Rank* rank, const std::byte* tokens,
                                    const float* topk_weights, std::byte* rows,
                                    float* row_weights, char* error,
                                    int64_t error_bytes) {
  return Export(error, error_bytes, [&] {
    return rank->Run("ncclEpDispatch", [&] {
      return Scatter(rank->device->libraries(), rank->handle,
                     {/*mem=*/{}, rank->Tokens(tokens), topk_weights,
                      rank->Slots(rows), row_weights},
                     rank->layer.top_k, rank->sizes.capacity, rank->stream);
    });
  });
}

EP_EXPORT int32_t ep_bench_combine(Rank* rank, const std::byte* rows,
                                   const float* row_weights, std::byte* tokens,
                                   float* topk_weights, char* error,
                                   int64_t error_bytes) {
  return Export(error, error_bytes, [&] {
    return rank->Run("ncclEpCombine", [&] {
      return Gather(rank->device->libraries(), rank->handle,
                    {/*mem=*/{}, rank->Slots(rows), row_weights,
                     rank->Tokens(tokens), topk_weights},
                    rank->layer.top_k, rank->sizes.capacity, rank->stream);
    });
  });
}

// Waits for what was enqueued.
EP_EXPORT int32_t ep_bench_synchronize(Rank* rank, char* error,
                                       int64_t error_bytes) {
  return Export(error, error_bytes,
                [&] { return rank->device->Synchronize(); });
}

// Disconnects and deletes a rank. Collective.
EP_EXPORT void ep_bench_disconnect(Rank* rank) { delete rank; }
