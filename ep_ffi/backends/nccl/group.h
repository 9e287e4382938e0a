// SPDX-License-Identifier: Apache-2.0

// The nccl backend: one rank of an EP domain on one GPU, over NCCL EP.
//
// An op is done when its work is enqueued on XLA's stream. ep_prepare enqueues:
//
//   our kernels   check and count the choices          (kernels.cu)
//   NCCL          all-gathers the counts and the faults
//   our kernels   compute the outcome, slots, counts, and which choices drop
//   NCCL EP       runs ncclEpUpdateHandle on the choices that remain
//
// The other ops enqueue a kernel that checks the handle they are given, then
// ncclEpDispatch or ncclEpCombine on NCCL EP's handle in it, then a kernel that
// writes the tail, or NaN if the routing has a fault. In checked mode two more
// kernels check what ep_combine returns.
//
// Faults. The device finds a fault long after the op has returned on the host.
// Every rank computes the same outcome of a prepare, and the host reads it
// Reports::kWindow prepares later, at the same op on all ranks. So all ranks
// fail at the same op, and none is left waiting in a collective. To read it,
// the host may have to wait for the device. A fault that another op finds is
// known to this rank only, so only Check returns it: if an op failed for it,
// its peers would wait for this rank.
//
// Waiting. NCCL EP's kernels wait for their peers without a timeout. A host
// that waits for the device gives up after timeout_s and aborts the
// communicator. So does a host that cannot enqueue an op; its peers then fail
// within timeout_s. A host that waits elsewhere hears of it from the watchdog.
//
// Order. Ranks must enqueue the same ops in the same order. A rank refuses an
// op that shows it that two of its runs interleave. The order of the ops that
// move rows is compared at the next prepare, on the device: a difference there
// fails as a fault does, after wrong pairs have exchanged rows.

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
#include "ep_ffi/backends/nccl/stamps.h"
#include "ep_ffi/backends/nccl/watchdog.h"
#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/hash.h"
#include "ep_ffi/core/mutex.h"
#include "ep_ffi/core/status.h"

namespace ep::nccl {

// Thread-safe. The lock guarantees that all ops of a rank are enqueued one
// after another, that the reports match what was enqueued, and that nothing is
// enqueued after a failure. It is held while the host waits for the device.
class NcclGroup : public Group {
 public:
  struct Options {
    std::string name;
    Sizes sizes;
    int32_t rank;
    int32_t domain = 0;  // index of the EP domain in the mesh
    int32_t device;      // as XLA numbers the devices of the process
    double timeout_s;    // to connect, and to wait for the device
    // See Watchdog.
    double exit_after_s = std::numeric_limits<double>::infinity();
    // Made by NewUniqueId on one rank of the domain. Empty if the group is to
    // have XLA's communicator, by Borrow.
    std::string unique_id;
    std::string nccl_path;  // see Libraries::Load
    std::string nccl_ep_path;
  };

  // Connects the rank. Collective over the ranks of the domain, unless Borrow
  // is to be called.
  static Status Create(const Options& options, std::shared_ptr<NcclGroup>* out);
  ~NcclGroup() override { (void)Close(); }

  int64_t num_experts() const override { return options_.sizes.num_experts; }
  int64_t ep_size() const override { return options_.sizes.ep_size; }
  Status MemBytes(const Layer& layer, int64_t num_tokens,
                  int64_t* out) const override;

  // Borrows XLA's communicator, before the first op. Collective over the
  // domain.
  Status Borrow(void* communicator);

  void Prepare(Call call, const PrepareArgs& args) override;
  void Scatter(Call call, const ScatterArgs& args) override;
  void Gather(Call call, const GatherArgs& args) override;

  // A stream ends with its program; there is no run to fail.
  void FailRun(int64_t, const Status&) override {}
  Status StartTrace(const std::string& path) override;
  Status StopTrace() override;
  Status Check() override;
  Status Close() override;

  // Does not wait for the lock.
  Watchdog& watchdog() const { return *watchdog_; }

 private:
  // `communicator` is null if Borrow is to be called.
  NcclGroup(const Options& options, std::shared_ptr<Device> device,
            std::shared_ptr<Communicator> communicator);

  // Runs `enqueue` under the lock, unless the group has failed, and completes
  // the call.
  void Submit(const Call& call, const std::function<Status()>& enqueue)
      EP_EXCLUDES(mutex_);
  // Fails if XLA does not lend the communicator that this group has.
  Status CheckLent(const Call& call) const EP_REQUIRES(mutex_);
  Status EnqueuePrepare(const Call& call, const PrepareArgs& args)
      EP_REQUIRES(mutex_);
  // Enqueues `move`, a function of NCCL EP called `name`, and the completion of
  // the rows that it writes. `moved` has the weights that go with them.
  Status EnqueueMove(const Call& call, const Mem& mem, int64_t num_tokens,
                     const Rows& rows, Moved moved, const char* name,
                     const std::function<ncclResult_t(ncclEpHandle_t)>& move)
      EP_REQUIRES(mutex_);

  // Returns the routing in `mem` for the op that is enqueued next.
  Routing NextRouting(const Layer& layer, int64_t num_tokens, std::byte* mem)
      EP_REQUIRES(mutex_);
  // Notes that all of an op was enqueued. Its rows have `row_bytes` each.
  void NoteEnqueued(const Call& call, const Routing& routing, int64_t row_bytes)
      EP_REQUIRES(mutex_);

  Status SizeMem(const Layer& layer, int64_t num_tokens, int64_t* out) const
      EP_REQUIRES(mutex_);
  Status CheckMem(const Layer& layer, int64_t num_tokens, const Mem& mem) const
      EP_REQUIRES(mutex_);

  // Waits for the outcome of the oldest prepare. Gives up if that takes longer
  // than the timeout.
  Status TakeOutcome() EP_REQUIRES(mutex_);
  // Waits for the device, and returns the first fault not returned yet.
  Status Drain() EP_REQUIRES(mutex_);
  // Aborts. From now on every op fails with `status`, to which it adds what is
  // known of the other ranks. Returns that.
  Status GiveUp(const Status& status) EP_REQUIRES(mutex_);
  // Gives up if this rank has not enqueued a part of an op: its peers wait for
  // that part, and would take a part of a later op for it.
  Status GiveUpUnlessOk(const Status& enqueued) EP_REQUIRES(mutex_);

  const Options options_;
  const std::shared_ptr<Device> device_;
  const std::unique_ptr<Watchdog> watchdog_;  // stopped by Close

  mutable Mutex mutex_;
  std::shared_ptr<Communicator> communicator_ EP_GUARDED_BY(mutex_);
  Reports reports_ EP_GUARDED_BY(mutex_);
  Stamps stamps_ EP_GUARDED_BY(mutex_);
  Runs runs_ EP_GUARDED_BY(mutex_);
  int64_t step_ EP_GUARDED_BY(mutex_) = 0;  // of the run of the current op
  // Hash of the ops that were enqueued since the last prepare.
  uint64_t order_ EP_GUARDED_BY(mutex_) = kHashSeed;
  // All ops fail with it, until a communicator comes or from a failure on.
  Status failed_ EP_GUARDED_BY(mutex_);
};

// Makes a new id for a domain. One of its ranks calls it.
Status NewUniqueId(const std::string& nccl_path,
                   const std::string& nccl_ep_path, std::string* out);

}  // namespace ep::nccl

#endif  // EP_FFI_BACKENDS_NCCL_GROUP_H_
