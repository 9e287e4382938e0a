// The host backend: the five ops as exchanges (exchange.h).

#ifndef EP_FFI_BACKENDS_HOST_GROUP_H_
#define EP_FFI_BACKENDS_HOST_GROUP_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "ep_ffi/backends/host/exchange.h"
#include "ep_ffi/backends/host/topology.h"
#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/plan.h"
#include "ep_ffi/core/status.h"

namespace ep::host {

class HostGroup : public Group {
 public:
  struct Options {
    std::string name;
    int64_t num_experts;
    Topology topology;
    double timeout_s;  // to connect, and for a rank to wait for its peers
    // See Handshake::Options.
    int listener;
    std::vector<std::string> addresses;
    std::vector<int32_t> pids;
    // Told of each run that fails in this group, once.
    std::function<void(int64_t run_id, const Status&)> on_run_failed;
  };

  // Collective over the processes of the topology.
  static Status Create(Options options, std::shared_ptr<Group>* out);

  int64_t num_experts() const override { return num_experts_; }
  int64_t ep_size() const override { return exchanges_->topology().ep_size; }
  Status MemBytes(const Layer& layer, int64_t num_tokens,
                  int64_t* out) const override {
    *out = PlanBytes(Dims(layer, num_tokens));
    return Status();
  }

  HostMemory Memory() override { return exchanges_->Memory(); }

  void Prepare(Call call, const PrepareArgs& args) override;
  void Dispatch(Call call, const ScatterArgs& args) override;
  void Combine(Call call, const GatherArgs& args) override;
  void DispatchBwd(Call call, const GatherArgs& args) override;
  void CombineBwd(Call call, const ScatterArgs& args) override;
  void FailRun(int64_t run_id, const Status& status) override {
    exchanges_->FailRun(run_id, status);
  }
  Status Close() override { return exchanges_->Close(); }

 private:
  struct Place {
    int32_t domain;
    int32_t rank;
  };

  HostGroup(int64_t num_experts, std::shared_ptr<Exchanges> exchanges)
      : num_experts_(num_experts), exchanges_(std::move(exchanges)) {}

  PlanDims Dims(const Layer& layer, int64_t num_tokens) const;
  Status Locate(const Call& call, Place* place) const;
  void RunScatter(const Call& call, const ScatterArgs& args);
  void RunGather(const Call& call, const GatherArgs& args);

  const int64_t num_experts_;
  const std::shared_ptr<Exchanges> exchanges_;
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_GROUP_H_
