// SPDX-License-Identifier: Apache-2.0

#ifndef EP_FFI_BACKENDS_NCCL_COMMUNICATOR_H_
#define EP_FFI_BACKENDS_NCCL_COMMUNICATOR_H_

#include <nccl.h>
#include <nccl_ep.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "ep_ffi/backends/nccl/device.h"
#include "ep_ffi/backends/nccl/libraries.h"
#include "ep_ffi/backends/nccl/limits.h"
#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/status.h"

namespace ep::nccl {

// The connection of one rank to its EP domain: owns an NCCL EP group on an NCCL
// communicator, and enqueues the calls of NCCL EP. The rank calls Connect, then
// CheckMachine, then Open, then the other functions. Open is collective, so all
// ranks must have passed CheckMachine.
//
// Not thread-safe.
class Communicator {
 public:
  // Connects this rank. Collective over the domain. Borrows XLA's communicator
  // `lent` of the domain. If `lent` is null, creates a communicator from
  // `unique_id`, the ncclUniqueId that one rank made for all ranks.
  static Status Connect(std::shared_ptr<const Device> device,
                        const Sizes& sizes, int32_t rank,
                        const std::string& unique_id, ncclComm_t lent,
                        double timeout_s, std::shared_ptr<Communicator>* out);

  // Returns an error if NCCL EP does not support this machine. The ranks of the
  // domain have `num_hosts` different host names. Not collective.
  Status CheckMachine(int64_t num_hosts) const;

  // Creates the NCCL EP group. Collective over the domain.
  static Status Open(std::shared_ptr<Communicator> communicator,
                     double timeout_s);

  // Aborts unless Destroy was called.
  ~Communicator() { Abort(); }

  // Disconnects. Collective over the domain. The device must have run all ops.
  void Destroy();
  // Aborts NCCL's collectives on this rank, unless XLA owns the communicator.
  // Leaks the NCCL EP group, because NCCL EP's kernels cannot be aborted.
  void Abort();

  // Returns XLA's communicator, or null if this object created its own.
  void* lent() const { return owns_ ? nullptr : comm_; }

  // Enqueues an all-gather of `count` integers per rank.
  Status AllGather(const int32_t* mine, int32_t* all, int64_t count,
                   CUstream stream) const;

  // Returns the size, in bytes, of NCCL EP's part of EpHandle.mem.
  Status HandleBytes(const Layer& layer, int64_t* out) const;

  // Update, Scatter and Gather each enqueue one NCCL EP function on the handle
  // in `mem`, which has HandleBytes bytes. Each call opens the handle anew,
  // because XLA places buffers at new addresses; this costs only host time.
  //
  // NCCL EP requires that a slot descriptor has the group's number of rows.
  // NCCL EP accesses only slots within the layer's capacity, so the buffer may
  // be shorter than the descriptor.

  // Calls ncclEpUpdateHandle. `choices` is [num_tokens, top_k].
  Status Update(const Layer& layer, const Mem& mem, const int64_t* choices,
                int64_t num_tokens, CUstream stream) const;
  // Calls ncclEpDispatch. Does not read `args.mem`.
  Status Scatter(const Layer& layer, const Mem& mem, const ScatterArgs& args,
                 CUstream stream) const;
  // Calls ncclEpCombine. Does not read `args.mem`.
  Status Gather(const Layer& layer, const Mem& mem, const GatherArgs& args,
                CUstream stream) const;

 private:
  Communicator(std::shared_ptr<const Device> device, const Sizes& sizes)
      : device_(std::move(device)), sizes_(sizes) {}

  Status Init(int32_t rank, const ncclUniqueId& id, ncclComm_t lent);
  Status CreateGroup();
  // Opens the handle and calls `use` on it. Errors name the function `name`.
  Status WithHandle(
      const Layer& layer, const Mem& mem, const char* name,
      const std::function<ncclResult_t(ncclEpHandle_t)>& use) const;

  const std::shared_ptr<const Device> device_;
  const Sizes sizes_;
  bool owns_ = true;  // whether this object created comm_
  ncclComm_t comm_ = nullptr;
  ncclCommProperties_t properties_ = NCCL_COMM_PROPERTIES_INITIALIZER;
  ncclEpGroup_t group_ = nullptr;
};

// Runs `call`, a call of the NCCL EP function `name`. Converts a C++ exception
// to an error whose message has the name.
Status CallNcclEp(const Libraries& libraries, const char* name,
                  const std::function<ncclResult_t()>& call);

}  // namespace ep::nccl

#endif  // EP_FFI_BACKENDS_NCCL_COMMUNICATOR_H_
