// SPDX-License-Identifier: Apache-2.0

// The nccl backend: one rank of an EP domain on one GPU, over NCCL EP.
//
// An op enqueues its work on XLA's stream and is done. The work of ep_prepare:
//
//   our kernels   check and count the choices          (kernels.cu)
//   NCCL          all-gather of counts and verdicts
//   our kernels   verdict, slots, counts, drops
//   NCCL EP       ncclEpUpdateHandle of what is left
//
// A mover lets a kernel of ours look at the handle that it is given, opens NCCL
// EP's handle on it, calls ncclEpDispatch or ncclEpCombine, and lets another
// kernel write the tail, or NaN if the routing was at fault. In checked mode
// two more look at what ep_combine returns.
//
// Faults. The device finds them when the host is long past the op. Every rank
// comes to the same verdict on a prepare, and the host looks at it
// kWindow prepares later, which is one place for all ranks; so all fail at the
// same op and none is left waiting in a collective. The host may have to wait
// there, for work that it enqueued kWindow prepares ago. What a mover finds is
// this rank's alone, so only Check tells: an op that failed for it would leave
// the peers waiting.
//
// Waiting. NCCL EP's kernels wait for their peers without end. A host that
// waits here gives up after timeout_s and aborts what can be aborted; so does
// one that cannot enqueue its part, for its peers to find out in that time.

#ifndef EP_FFI_BACKENDS_NCCL_GROUP_H_
#define EP_FFI_BACKENDS_NCCL_GROUP_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ep_ffi/backends/nccl/communicator.h"
#include "ep_ffi/backends/nccl/device.h"
#include "ep_ffi/backends/nccl/kernels.h"
#include "ep_ffi/backends/nccl/limits.h"
#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/status.h"

namespace ep::nccl {

class NcclGroup : public Group {
 public:
  struct Options {
    std::string name;
    Sizes sizes;
    int32_t rank;
    int32_t domain = 0;     // of the mesh's EP domains
    int32_t device;         // as XLA numbers the devices of the process
    double timeout_s;       // to connect, and to wait for the device
    std::string unique_id;  // of the domain, from NewUniqueId
    std::string nccl_path;  // see Libraries::Load
    std::string nccl_ep_path;
  };

  // Prepares in flight whose verdict the host has not seen.
  static constexpr int64_t kWindow = 8;

  // Collective over the ranks of the domain.
  static Status Create(const Options& options, std::shared_ptr<Group>* out);
  ~NcclGroup() override { (void)Close(); }

  int64_t num_experts() const override { return options_.sizes.num_experts; }
  int64_t ep_size() const override { return options_.sizes.ep_size; }
  Status MemBytes(const Layer& layer, int64_t num_tokens,
                  int64_t* out) const override;

  void Prepare(Call call, const PrepareArgs& args) override;
  void Scatter(Call call, const ScatterArgs& args) override;
  void Gather(Call call, const GatherArgs& args) override;

  // A stream ends with its program; there is no run to fail.
  void FailRun(int64_t, const Status&) override {}
  Status Check() override;
  Status Close() override;

 private:
  // A prepare whose verdict has not been looked at.
  struct Pending {
    uint64_t ticket;
    std::string op;  // and its layer, for messages
    int64_t top_k;
  };

  explicit NcclGroup(const Options& options) : options_(options) {}

  // Returns the place of a rank in the group's mesh; see PrepareArgs::place.
  int32_t Index(int32_t rank) const {
    return options_.domain * ep_size() + rank;
  }
  Status Connect(const Libraries& libraries);

  // Where movers report, the first fault until it is taken; before it, those of
  // the prepares.
  static constexpr int32_t kMoverReport = kWindow;
  static constexpr int32_t kNumReports = kWindow + 1;

  // Runs `enqueue` if the group can take an op, and tells the caller.
  void Submit(const Call& call, const std::function<Status()>& enqueue);
  Status EnqueuePrepare(const Call& call, const PrepareArgs& args);
  // Enqueues `move`, which is called `what`, and the end of what it writes:
  // `rows`, to which `moved` adds their weights.
  Status EnqueueMove(const Call& call, const Mem& mem, int64_t num_tokens,
                     const Rows& rows, Moved moved, const char* what,
                     const std::function<ncclResult_t(ncclEpHandle_t)>& move);
  // And a look at `rows`, which ep_combine returns.
  Status EnqueueFiniteCheck(const Call& call, const Rows& rows, Routing routing,
                            Moved moved);

  Status SizeMem(const Layer& layer, int64_t num_tokens, int64_t* out) const;
  Status CheckMem(const Layer& layer, int64_t num_tokens, const Mem& mem) const;

  // The number of an op that the device checks, for its reports.
  int32_t NumberOf(const std::string& op);

  // Waits for the oldest pending prepare, and returns what it found wrong.
  Status TakeVerdict();
  Status ToStatus(const Verdict& verdict, const Pending& pending) const;
  // Check, under the lock.
  Status Drain();
  // From now on every op fails with `status`, which it returns.
  Status GiveUp(const Status& status);
  // Gives up if this rank did not enqueue what its peers wait for: its later
  // ops would meet this one of theirs.
  Status KeepUp(const Status& enqueued);

  const Options options_;
  std::shared_ptr<Device> device_;
  std::shared_ptr<Communicator> communicator_;

  mutable std::mutex mutex_;
  Status failed_;  // what all later ops get
  uint64_t last_ticket_ = 0;
  std::deque<Pending> pending_;
  std::vector<std::string> checked_ops_;  // by number: each op and its layer
};

// A new id for one domain, made by one of its ranks.
Status NewUniqueId(const std::string& nccl_path,
                   const std::string& nccl_ep_path, std::string* out);

}  // namespace ep::nccl

#endif  // EP_FFI_BACKENDS_NCCL_GROUP_H_
