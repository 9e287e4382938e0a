// SPDX-License-Identifier: Apache-2.0

// The ranks of an EP domain as NCCL and NCCL EP know them.

#ifndef EP_FFI_BACKENDS_NCCL_COMMUNICATOR_H_
#define EP_FFI_BACKENDS_NCCL_COMMUNICATOR_H_

#include <nccl.h>
#include <nccl_ep.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "ep_ffi/backends/nccl/device.h"
#include "ep_ffi/backends/nccl/limits.h"
#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/status.h"

namespace ep::nccl {

class Communicator {
 public:
  // Collective. `unique_id` is one rank's ncclUniqueId, which all ranks know.
  static Status Create(std::shared_ptr<const Device> device, const Sizes& sizes,
                       int32_t rank, const std::string& unique_id,
                       double timeout_s, std::shared_ptr<Communicator>* out);

  // Aborts what was not destroyed.
  ~Communicator() { Abort(); }

  // Ends both, collectively. The device must be through with all ops.
  void Destroy();
  // Gives up: NCCL's collectives end at once, on this rank. What NCCL EP has
  // does not end, nor is it freed.
  void Abort();

  // Enqueues a gather of `count` integers from each rank.
  Status AllGather(const int32_t* mine, int32_t* all, int64_t count,
                   CUstream stream) const;

  // What NCCL EP keeps in EpHandle.mem, in bytes.
  Status HandleBytes(const Layer& layer, int64_t* out) const;

  // A handle that is open on `mem`, until it is closed. Its `bytes` are
  // HandleBytes.
  Status OpenHandle(const Layer& layer, std::byte* mem, int64_t bytes,
                    ncclEpHandle_t* out) const;
  Status CloseHandle(ncclEpHandle_t handle) const;

  // Calls `use`, named `what`, with a handle that is open on `mem` for as long.
  //
  // It is opened anew for each op: XLA moves buffers, and to open one costs
  // host time only, since it neither allocates nor talks to other ranks.
  Status WithHandle(
      const Layer& layer, std::byte* mem, int64_t bytes, const char* what,
      const std::function<ncclResult_t(ncclEpHandle_t)>& use) const;

 private:
  explicit Communicator(std::shared_ptr<const Device> device)
      : device_(std::move(device)) {}

  Status Init(const Sizes& sizes, int32_t rank, const ncclUniqueId& id);

  const std::shared_ptr<const Device> device_;
  ncclComm_t comm_ = nullptr;
  ncclEpGroup_t group_ = nullptr;
};

// Calls a function of NCCL EP, which throws on some errors.
Status CallNcclEp(const Libraries& libraries, const char* what,
                  const std::function<ncclResult_t()>& call);

}  // namespace ep::nccl

#endif  // EP_FFI_BACKENDS_NCCL_COMMUNICATOR_H_
