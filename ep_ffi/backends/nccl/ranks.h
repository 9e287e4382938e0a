// SPDX-License-Identifier: Apache-2.0

#ifndef EP_FFI_BACKENDS_NCCL_RANKS_H_
#define EP_FFI_BACKENDS_NCCL_RANKS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ep_ffi/backends/nccl/group.h"
#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/status.h"

namespace ep::nccl {

// The ranks of a group in this process, all of one EP domain. Each rank has its
// own GPU, and XLA calls the ops of each GPU from a separate thread.
//
// Thread-safe.
class NcclRanks : public Group {
 public:
  struct Rank {
    int32_t device;  // XLA's number of the device in this process
    std::shared_ptr<NcclGroup> group;
  };

  // `ranks` must not be empty.
  explicit NcclRanks(std::vector<Rank> ranks) : ranks_(std::move(ranks)) {}
  ~NcclRanks() override { (void)Close(); }

  NcclGroup* At(size_t i) const {
    return i < ranks_.size() ? ranks_[i].group.get() : nullptr;
  }

  int64_t num_experts() const override { return first().num_experts(); }
  int64_t ep_size() const override { return first().ep_size(); }
  Status MemBytes(const Layer& layer, int64_t num_tokens,
                  int64_t* out) const override {
    return first().MemBytes(layer, num_tokens, out);
  }

  // See NcclGroup. ConnectById is for a process with one rank.
  Status ConnectById(const std::string& unique_id) {
    return first().Join(unique_id, /*lent=*/nullptr);
  }
  Status Connect(int32_t device, void* communicator) override;
  Status CheckMachine(int64_t num_hosts);
  Status Open();

  NcclGroup* OnDevice(int32_t device) override;
  void Prepare(Call call, const PrepareArgs& args) override {
    OnDevice(call.device)->Prepare(std::move(call), args);
  }
  void Scatter(Call call, const ScatterArgs& args) override {
    OnDevice(call.device)->Scatter(std::move(call), args);
  }
  void Gather(Call call, const GatherArgs& args) override {
    OnDevice(call.device)->Gather(std::move(call), args);
  }

  // Does nothing, because XLA itself stops the stream of a failed program.
  void FailRun(int64_t, const Status&) override {}
  Status Check() override;
  Status Close() override;

 private:
  NcclGroup& first() const { return *ranks_.front().group; }
  // Calls `call` on all ranks in parallel, because it may be collective.
  // Returns the first error.
  Status ForEach(const std::function<Status(NcclGroup&)>& call) const;
  const std::vector<Rank> ranks_;
};

}  // namespace ep::nccl

#endif  // EP_FFI_BACKENDS_NCCL_RANKS_H_
