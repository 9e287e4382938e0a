// SPDX-License-Identifier: Apache-2.0

#ifndef EP_FFI_BACKENDS_NCCL_GROUP_H_
#define EP_FFI_BACKENDS_NCCL_GROUP_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>

#include "ep_ffi/backends/nccl/communicator.h"
#include "ep_ffi/backends/nccl/device.h"
#include "ep_ffi/backends/nccl/kernels.h"
#include "ep_ffi/backends/nccl/limits.h"
#include "ep_ffi/backends/nccl/reports.h"
#include "ep_ffi/backends/nccl/runs.h"
#include "ep_ffi/backends/nccl/watchdog.h"
#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/hash.h"
#include "ep_ffi/core/mutex.h"
#include "ep_ffi/core/status.h"

namespace ep::nccl {

// One rank of an EP domain on one GPU, over NCCL EP: the nccl backend.
//
// An op returns when its work is enqueued on XLA's stream. Prepare enqueues:
//
//   our kernels   check and count the choices          (kernels.cu)
//   NCCL          all-gathers the counts and the faults
//   our kernels   compute the outcome, slots, counts and dropped choices
//   NCCL EP       runs ncclEpUpdateHandle on the choices that remain
//
// Scatter and Gather enqueue a kernel that checks the handle, then
// ncclEpDispatch or ncclEpCombine on NCCL EP's part of the handle, then a
// kernel that writes the rows past the used slots, or NaN to all rows if the
// routing has a fault. In checked mode two kernels check the result of
// ep_combine.
//
// Faults: the device finds a fault long after the op has returned on the host.
// All ranks compute the same outcome of a prepare. The host reads this outcome
// Reports::kWindow prepares later, and may have to wait for the device. So all
// ranks fail at the same op, and no rank stays behind in a collective. A fault
// in another op is known only to its rank. Only Check returns such a fault,
// because the peers would wait for a rank whose op failed.
//
// Waiting: NCCL EP's kernels wait for their peers without a timeout. A host
// that waits for the device gives up and aborts the communicator if an op waits
// for its peers for timeout_s. Check also gives up if no op begins or ends for
// timeout_s. A host that cannot enqueue an op also gives up; its peers then
// fail within timeout_s. The watchdog reports a host that waits in other code.
//
// Order: ranks must enqueue the same ops in the same order. A rank refuses an
// op if two runs interleave on this rank. The next prepare compares, on the
// device, the order of the ranks' dispatches and combines. It fails if the
// orders differ, but mismatched ops have exchanged rows by then.
//
// Thread-safe. The lock guarantees that the ops of a rank are enqueued one
// after another, that the reports match the enqueued ops, and that nothing is
// enqueued after a failure. The host holds the lock while it waits for the
// device.
class NcclGroup : public Group {
 public:
  struct Options {
    std::string name;
    Sizes sizes;
    int32_t rank;
    int32_t domain = 0;  // index of the EP domain in the mesh
    int32_t device;      // XLA's number of the device in this process
    double timeout_s;    // to connect, and for an op to wait for its peers
    // Seconds after timeout_s until the watchdog terminates the process.
    double exit_after_s = std::numeric_limits<double>::infinity();
    std::string nccl_path;  // see Libraries::Load
    std::string nccl_ep_path;
  };

  // Creates the group, which runs ops after Join and Open.
  static Status Create(const Options& options, std::shared_ptr<NcclGroup>* out);
  ~NcclGroup() override { (void)Close(); }

  int64_t num_experts() const override { return options_.sizes.num_experts; }
  int64_t ep_size() const override { return options_.sizes.ep_size; }
  Status MemBytes(const Layer& layer, int64_t num_tokens,
                  int64_t* out) const override;

  // Connects the rank over XLA's communicator `lent`. If `lent` is null,
  // connects the rank over a new communicator from `unique_id`, the result of
  // NewUniqueId on one rank of the domain. Collective over the domain.
  Status Join(const std::string& unique_id, ncclComm_t lent);
  // Returns an error if NCCL EP does not support the machine of this rank. The
  // ranks of the domain have `num_hosts` different host names.
  Status CheckMachine(int64_t num_hosts);
  // Lets ops run. Collective over the domain, so all its ranks must have passed
  // CheckMachine.
  Status Open();

  void Prepare(Call call, const PrepareArgs& args) override;
  void Scatter(Call call, const ScatterArgs& args) override;
  void Gather(Call call, const GatherArgs& args) override;

  // Does nothing, because XLA itself stops the stream of a failed program.
  void FailRun(int64_t, const Status&) override {}
  Status Check() override;
  Status Close() override;

  // Returns the watchdog, without waiting for the lock.
  Watchdog& watchdog() const { return *watchdog_; }

 private:
  NcclGroup(const Options& options, std::shared_ptr<Device> device);

  // Under the lock, runs `enqueue` unless the group failed. Completes the call.
  void Submit(const Call& call, const std::function<Status()>& enqueue)
      EP_EXCLUDES(mutex_);
  // Fails if the call's communicator is not the communicator of this group.
  Status CheckLent(const Call& call) const EP_REQUIRES(mutex_);
  Status EnqueuePrepare(const Call& call, const PrepareArgs& args)
      EP_REQUIRES(mutex_);
  // Enqueues `move` on NCCL EP's part of `mem`, then the kernels that complete
  // the output rows. `moved` has the weights of the output rows.
  Status EnqueueMove(const Call& call, const Mem& mem, int64_t num_tokens,
                     const Rows& rows, Moved moved,
                     const std::function<Status(const Mem&)>& move)
      EP_REQUIRES(mutex_);

  // Returns the routing in `mem` for the next op to enqueue.
  Routing NextRouting(const Layer& layer, int64_t num_tokens, std::byte* mem)
      EP_REQUIRES(mutex_);
  // Records that a whole op was enqueued.
  void NoteEnqueued(const Call& call) EP_REQUIRES(mutex_);

  Status SizeMem(const Layer& layer, int64_t num_tokens, int64_t* out) const
      EP_REQUIRES(mutex_);
  Status CheckMem(const Layer& layer, int64_t num_tokens, const Mem& mem) const
      EP_REQUIRES(mutex_);

  // Waits for the outcome of the oldest prepare. Gives up after the timeout.
  Status TakeOutcome() EP_REQUIRES(mutex_);
  // Waits for the device. Returns the first fault that was not returned yet.
  Status Drain() EP_REQUIRES(mutex_);
  // Aborts the communicator, and makes every later op fail. Returns the error
  // of later ops: `status` and the watchdog's sentence about the other ranks.
  Status GiveUp(const Status& status) EP_REQUIRES(mutex_);
  // Gives up if `enqueued` is an error. Otherwise the waiting peers would pair
  // their kernels with this rank's kernels of a later op.
  Status GiveUpUnlessOk(const Status& enqueued) EP_REQUIRES(mutex_);

  const Options options_;
  const std::shared_ptr<Device> device_;
  const std::unique_ptr<Watchdog> watchdog_;  // stopped by Close

  mutable Mutex mutex_;
  std::shared_ptr<Communicator> communicator_ EP_GUARDED_BY(mutex_);
  Reports reports_ EP_GUARDED_BY(mutex_);
  Runs runs_ EP_GUARDED_BY(mutex_);
  int64_t step_ EP_GUARDED_BY(mutex_) = 0;  // number of the current run
  // Hash of the ops that were enqueued since the last prepare.
  uint64_t order_ EP_GUARDED_BY(mutex_) = kHashSeed;
  // The error of every op before Open or after a failure.
  Status failed_ EP_GUARDED_BY(mutex_);
};

// Creates the ncclUniqueId of a domain. Only one rank of the domain calls this.
Status NewUniqueId(const std::string& nccl_path,
                   const std::string& nccl_ep_path, std::string* out);

}  // namespace ep::nccl

#endif  // EP_FFI_BACKENDS_NCCL_GROUP_H_
