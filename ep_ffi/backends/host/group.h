// SPDX-License-Identifier: Apache-2.0

// The host backend: runs the five ops as exchanges (exchanges.h).
//
// Executables hold references to the group and may outlive its closing. A
// closed group drops its `Exchanges` object, which frees sockets, threads and
// shared memory after the last op in flight. In a forked child process, a group
// does nothing: the child lacks the threads but shares the sockets.

#ifndef EP_FFI_BACKENDS_HOST_GROUP_H_
#define EP_FFI_BACKENDS_HOST_GROUP_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "ep_ffi/backends/host/engine/exchanges.h"
#include "ep_ffi/backends/host/movers/job.h"
#include "ep_ffi/backends/host/transport/fd.h"
#include "ep_ffi/backends/host/transport/topology.h"
#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/mutex.h"
#include "ep_ffi/core/plan.h"
#include "ep_ffi/core/status.h"

namespace ep::host {

// Thread-safe. The lock guards only the pointer `exchanges_`. A method that has
// copied the pointer may use the object while the group closes.
class HostGroup : public Group {
 public:
  struct Options {
    int64_t num_experts;
    Topology topology;
    std::vector<Fd> sockets;  // see Peers::Create
    Exchanges::Options exchanges;
  };

  // Creates a group.
  static Status Create(Options options, std::shared_ptr<Group>* out);
  ~HostGroup() override;

  int64_t num_experts() const override { return num_experts_; }
  int64_t ep_size() const override { return topology_.ep_size; }
  Status MemBytes(const Layer& layer, int64_t num_tokens,
                  int64_t* out) const override {
    *out = PlanBytes(Dims(layer, num_tokens));
    return Status();
  }

  void Prepare(Call call, const PrepareArgs& args) override;
  void Scatter(Call call, const ScatterArgs& args) override;
  void Gather(Call call, const GatherArgs& args) override;
  void FailRun(int64_t run_id, const Status& status) override;
  Status Close() override;

 private:
  HostGroup(Options options, std::shared_ptr<Exchanges> exchanges);

  PlanDims Dims(const Layer& layer, int64_t num_tokens) const;
  std::shared_ptr<Job> MakeJob(Job::Kind kind, Call call,
                               int64_t num_tokens) const;
  bool IsForked() const;
  // Returns null if the group is closed or this process is a forked child.
  std::shared_ptr<Exchanges> exchanges() const;
  // Sets the rank that makes the call of a job. Fails if the group is not open.
  Status Locate(bool is_open, Job* job) const;
  // Posts a job. If an argument is wrong, fails the call, and fails its run on
  // all ranks.
  void Post(std::shared_ptr<Job> job);

  const int64_t num_experts_;
  const Topology topology_;
  const Exchanges::Options options_;
  const pid_t process_;  // the process that created the group

  mutable Mutex mutex_;
  std::shared_ptr<Exchanges> exchanges_ EP_GUARDED_BY(mutex_);
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_GROUP_H_
