// SPDX-License-Identifier: Apache-2.0

// C functions that call NCCL EP directly, without XLA, and without the kernels
// that ep_ffi/backends/nccl adds to it. benchmarks/nccl_ep.py calls them.

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

// The backend does not need these, because XLA gives it streams.
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

// The parameters that all ops of a rank share.
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

  // Connects the rank. Collective.
  Status Connect(int32_t rank, int32_t device, const std::string& unique_id,
                 const std::string& nccl, const std::string& nccl_ep);
  // Returns the size of the memory that Route needs.
  Status HandleBytes(int64_t* out) const;
  // Makes the handle of choices [T, K] in `mem`. Collective.
  Status Route(std::byte* mem, int64_t bytes, const int64_t* choices);

  // These enqueue a call. Both weights may be null.
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
  (void)RunWithin(problem_.timeout_s, "to disconnect", [c = communicator_] {
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
        problem_.top_k, problem_.sizes.capacity, stream_);
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
        problem_.top_k, problem_.sizes.capacity, stream_);
  });
}

Status Rank::Synchronize() {
  Device::Scope scope(*device_);
  return device_->libraries().Check(streams_.cuStreamSynchronize(stream_),
                                    "cuStreamSynchronize");
}

}  // namespace
}  // namespace ep::nccl

// Python calls these functions through ctypes; see ep_ffi/core/export.h. Those
// that take a rank accept one from ep_bench_connect, until ep_bench_disconnect.

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

// Disconnects and deletes a rank. Collective.
EP_EXPORT void ep_bench_disconnect(ep::nccl::Rank* rank) { delete rank; }
