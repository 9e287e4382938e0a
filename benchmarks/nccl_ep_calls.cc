// SPDX-License-Identifier: Apache-2.0

// NCCL EP as it is, called from benchmarks/nccl_ep.py: without XLA, and without
// the kernels by which ep_ffi/backends/nccl makes ep's ops of it.

#include <cuda.h>
#include <nccl_ep.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

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
namespace {

// The backend itself is given streams.
#define EP_STREAM_FUNCTIONS(F) \
  F(cuStreamCreate)            \
  F(cuStreamDestroy)           \
  F(cuStreamSynchronize)

struct StreamFunctions {
#define EP_MEMBER(function) decltype(&::function) function;
  EP_STREAM_FUNCTIONS(EP_MEMBER)
#undef EP_MEMBER

  static Status Load(StreamFunctions* out) {
    Symbols symbols("libcuda.so.1", "");
#define EP_FIND(function) symbols.Find(EP_SYMBOL(function), &out->function);
    EP_STREAM_FUNCTIONS(EP_FIND)
#undef EP_FIND
    return symbols.status();
  }
};

// What all ops of a rank share.
struct Problem {
  Sizes sizes;
  int64_t top_k;
  int64_t width;
  DType dtype;
  double timeout_s;
};

// A rank, with a group, a handle and a stream of its own.
class Rank {
 public:
  explicit Rank(const Problem& problem) : problem_(problem) {
    layer_.top_k = problem.top_k;
    layer_.alignment = 1;
    layer_.capacity = problem.sizes.capacity;
  }
  ~Rank();

  // Collective.
  Status Connect(int32_t rank, int32_t device, const std::string& unique_id,
                 const std::string& nccl, const std::string& nccl_ep);
  // What Route wants to be given.
  Status HandleBytes(int64_t* out) const;
  // Makes the handle, in `mem`, of choices [T, K]. Collective.
  Status Route(std::byte* mem, int64_t bytes, const int64_t* choices);

  // These enqueue a call. Weights may be null, on both sides.
  Status Dispatch(const std::byte* tokens, const float* topk_weights,
                  std::byte* rows, float* row_weights);
  Status Combine(const std::byte* rows, const float* row_weights,
                 std::byte* tokens, float* topk_weights);
  Status Synchronize();

 private:
  template <typename Byte>
  RowsOf<Byte> Tokens(Byte* data) const {
    return {data, problem_.sizes.max_tokens, problem_.width, problem_.dtype};
  }
  template <typename Byte>
  RowsOf<Byte> Slots(Byte* data) const {
    return {data, problem_.sizes.capacity, problem_.width, problem_.dtype};
  }

  const Problem problem_;
  Layer layer_ = {};
  StreamFunctions streams_ = {};
  std::shared_ptr<Device> device_;
  std::shared_ptr<Communicator> communicator_;
  CUstream stream_ = nullptr;
  ncclEpHandle_t handle_ = nullptr;
};

Status Rank::Connect(int32_t rank, int32_t device, const std::string& unique_id,
                     const std::string& nccl, const std::string& nccl_ep) {
  EP_RETURN_IF_ERROR(CheckSizes(problem_.sizes));
  EP_RETURN_IF_ERROR(
      CheckLayer(problem_.sizes, layer_, problem_.sizes.max_tokens));
  EP_RETURN_IF_ERROR(CheckRows(problem_.sizes, problem_.width, problem_.dtype));
  Libraries libraries;
  EP_RETURN_IF_ERROR(Libraries::Load(nccl, nccl_ep, &libraries));
  EP_RETURN_IF_ERROR(StreamFunctions::Load(&streams_));
  EP_RETURN_IF_ERROR(
      Device::Open(libraries, device, /*num_reports=*/1, &device_));
  {
    Device::Scope scope(*device_);
    EP_RETURN_IF_ERROR(libraries.Check(
        streams_.cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING),
        "cuStreamCreate"));
  }
  return Communicator::Create(device_, problem_.sizes, rank, unique_id,
                              problem_.timeout_s, &communicator_);
}

Rank::~Rank() {
  if (stream_) {
    Device::Scope scope(*device_);
    if (handle_) (void)communicator_->CloseHandle(handle_);
    streams_.cuStreamDestroy(stream_);
  }
  if (!communicator_) return;
  (void)RunWithin(problem_.timeout_s, "to part", [c = communicator_] {
    c->Destroy();
    return Status();
  });
}

Status Rank::HandleBytes(int64_t* out) const {
  Device::Scope scope(*device_);
  return communicator_->HandleBytes(layer_, out);
}

Status Rank::Route(std::byte* mem, int64_t bytes, const int64_t* choices) {
  const Libraries& nccl = device_->libraries();
  {
    Device::Scope scope(*device_);
    EP_RETURN_IF_ERROR(communicator_->OpenHandle(layer_, mem, bytes, &handle_));
    EP_RETURN_IF_ERROR(CallNcclEp(nccl, "ncclEpUpdateHandle", [&] {
      return Update(nccl, handle_, choices, problem_.sizes.max_tokens,
                    problem_.top_k, stream_);
    }));
  }
  return Synchronize();
}

Status Rank::Dispatch(const std::byte* tokens, const float* topk_weights,
                      std::byte* rows, float* row_weights) {
  const Libraries& nccl = device_->libraries();
  Device::Scope scope(*device_);
  return CallNcclEp(nccl, "ncclEpDispatch", [&] {
    return Scatter(
        nccl, handle_,
        {/*mem=*/{}, Tokens(tokens), topk_weights, Slots(rows), row_weights},
        problem_.top_k, stream_);
  });
}

Status Rank::Combine(const std::byte* rows, const float* row_weights,
                     std::byte* tokens, float* topk_weights) {
  const Libraries& nccl = device_->libraries();
  Device::Scope scope(*device_);
  return CallNcclEp(nccl, "ncclEpCombine", [&] {
    return Gather(
        nccl, handle_,
        {/*mem=*/{}, Slots(rows), row_weights, Tokens(tokens), topk_weights},
        problem_.top_k, stream_);
  });
}

Status Rank::Synchronize() {
  Device::Scope scope(*device_);
  return device_->libraries().Check(streams_.cuStreamSynchronize(stream_),
                                    "cuStreamSynchronize");
}

}  // namespace
}  // namespace ep::nccl

// What follows is called through ctypes; see ep_ffi/core/export.h. A rank is
// what ep_bench_connect made, until ep_bench_part.

EP_EXPORT int32_t ep_bench_connect(
    int32_t rank, int32_t device, int64_t num_experts, int64_t ep_size,
    int64_t num_tokens, int64_t top_k, int64_t capacity, int64_t width,
    int32_t dtype, double timeout_s, const char* id, int64_t id_bytes,
    const char* nccl, const char* nccl_ep, ep::nccl::Rank** out,
    int64_t* handle_bytes, char* error, int64_t error_bytes) {
  return ep::Export(error, error_bytes, [&] {
    ep::nccl::Problem problem = {};
    problem.top_k = top_k;
    problem.width = width;
    problem.dtype = static_cast<ep::DType>(dtype);
    problem.timeout_s = timeout_s;
    problem.sizes = {num_experts,
                     ep_size,
                     num_tokens,
                     capacity,
                     width * ep::ByteWidth(problem.dtype),
                     /*max_num_sms=*/0};
    auto made = std::make_unique<ep::nccl::Rank>(problem);
    EP_RETURN_IF_ERROR(
        made->Connect(rank, device, std::string(id, id_bytes), nccl, nccl_ep));
    EP_RETURN_IF_ERROR(made->HandleBytes(handle_bytes));
    *out = made.release();
    return ep::Status();
  });
}

EP_EXPORT int32_t ep_bench_route(ep::nccl::Rank* rank, std::byte* mem,
                                 int64_t bytes, const int64_t* choices,
                                 char* error, int64_t error_bytes) {
  return ep::Export(error, error_bytes,
                    [&] { return rank->Route(mem, bytes, choices); });
}

EP_EXPORT int32_t ep_bench_dispatch(ep::nccl::Rank* rank,
                                    const std::byte* tokens,
                                    const float* topk_weights, std::byte* rows,
                                    float* row_weights, char* error,
                                    int64_t error_bytes) {
  return ep::Export(error, error_bytes, [&] {
    return rank->Dispatch(tokens, topk_weights, rows, row_weights);
  });
}

EP_EXPORT int32_t ep_bench_combine(ep::nccl::Rank* rank, const std::byte* rows,
                                   const float* row_weights, std::byte* tokens,
                                   float* topk_weights, char* error,
                                   int64_t error_bytes) {
  return ep::Export(error, error_bytes, [&] {
    return rank->Combine(rows, row_weights, tokens, topk_weights);
  });
}

EP_EXPORT int32_t ep_bench_synchronize(ep::nccl::Rank* rank, char* error,
                                       int64_t error_bytes) {
  return ep::Export(error, error_bytes, [&] { return rank->Synchronize(); });
}

// Collective.
EP_EXPORT void ep_bench_part(ep::nccl::Rank* rank) { delete rank; }
