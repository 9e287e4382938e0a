// SPDX-License-Identifier: Apache-2.0

// The connection of a rank to its EP domain: an NCCL communicator and a group
// of NCCL EP.

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

// Not thread-safe.
class Communicator {
 public:
  // Connects this rank. Collective over the domain. `unique_id` is the
  // ncclUniqueId that one rank has made for all.
  static Status Create(std::shared_ptr<const Device> device, const Sizes& sizes,
                       int32_t rank, const std::string& unique_id,
                       double timeout_s, std::shared_ptr<Communicator>* out);
  // Connects this rank over `lent`, an NCCL communicator of the domain that
  // stays XLA's. Collective over the domain.
  static Status Borrow(std::shared_ptr<const Device> device, const Sizes& sizes,
                       int32_t rank, ncclComm_t lent, double timeout_s,
                       std::shared_ptr<Communicator>* out);

  // Aborts unless Destroy was called.
  ~Communicator() { Abort(); }

  // Disconnects. Collective over the domain. The device must have run all ops.
  void Destroy();
  // Ends NCCL's collectives on this rank at once, unless the communicator is
  // XLA's. NCCL EP's kernels cannot be ended, so its group is leaked.
  void Abort();

  // Returns XLA's communicator, or null if this one has its own.
  void* lent() const { return owns_ ? nullptr : comm_; }

  // Enqueues a gather of `count` integers from each rank.
  Status AllGather(const int32_t* mine, int32_t* all, int64_t count,
                   CUstream stream) const;

  // Returns the bytes of NCCL EP's part of EpHandle.mem.
  Status HandleBytes(const Layer& layer, int64_t* out) const;

  // Opens a handle on `mem`, whose size `bytes` is HandleBytes.
  Status OpenHandle(const Layer& layer, std::byte* mem, int64_t bytes,
                    ncclEpHandle_t* out) const;
  Status CloseHandle(ncclEpHandle_t handle) const;

  // Calls `use`, a function called `name`, with a handle that is open on `mem`
  // during the call. Each op opens a handle anew, because XLA moves buffers.
  // That costs host time only: it neither allocates nor communicates.
  Status WithHandle(
      const Layer& layer, std::byte* mem, int64_t bytes, const char* name,
      const std::function<ncclResult_t(ncclEpHandle_t)>& use) const;

 private:
  explicit Communicator(std::shared_ptr<const Device> device)
      : device_(std::move(device)) {}

  Status Init(const Sizes& sizes, int32_t rank, const ncclUniqueId& id);
  Status InitLent(const Sizes& sizes, int32_t rank, ncclComm_t lent);
  // Creates the group of NCCL EP.
  Status InitGroup(const Sizes& sizes, const ncclCommProperties_t& properties);

  const std::shared_ptr<const Device> device_;
  bool owns_ = true;  // whether comm_ is not XLA's
  ncclComm_t comm_ = nullptr;
  ncclEpGroup_t group_ = nullptr;
};

// Calls a function of NCCL EP by `call`. NCCL EP throws on some errors; this
// does not. `name` is for the message.
Status CallNcclEp(const Libraries& libraries, const char* name,
                  const std::function<ncclResult_t()>& call);

}  // namespace ep::nccl

#endif  // EP_FFI_BACKENDS_NCCL_COMMUNICATOR_H_
