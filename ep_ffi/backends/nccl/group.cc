// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/nccl/group.h"

#include <algorithm>
#include <utility>

#include "ep_ffi/backends/nccl/deadline.h"
#include "ep_ffi/backends/nccl/libraries.h"
#include "ep_ffi/backends/nccl/routing.h"
#include "ep_ffi/core/float_types.h"

namespace ep::nccl {
namespace {

// Number of threads that clear a foreign handle, which has some megabytes. Only
// an error path needs these threads.
constexpr int64_t kClearThreads = 16384;

// Thread blocks of EpFinish, enough for full memory bandwidth. Usually there is
// nothing to write, which only the device knows, and more blocks would cost
// time.
constexpr int64_t kFinishBlocks = 512;

// Time limit of an abort, in seconds. An abort may wait for NCCL EP's kernels,
// which cannot be aborted.
constexpr double kAbortS = 5;

std::string Name(const Call& call) {
  return OpName(call.op, call.site->layer.name);
}

// Hashes the properties of an op that must be equal on all ranks. Leaves out
// XLA's number of a copy of the op: a rank that loads an executable from a
// cache instantiates more or fewer copies than a rank that compiles it.
uint64_t HashProgram(const Site& site, uint64_t sizes) {
  return Hash({static_cast<int64_t>(Hash(site.layer.name)),
               site.layer.fingerprint, static_cast<int64_t>(Hash(site.program)),
               site.position, static_cast<int64_t>(sizes), site.layer.drop});
}

}  // namespace

Status NewUniqueId(const std::string& nccl_path,
                   const std::string& nccl_ep_path, std::string* out) {
  Libraries nccl;
  EP_RETURN_IF_ERROR(Libraries::Load(nccl_path, nccl_ep_path, &nccl));
  ncclUniqueId id;
  EP_RETURN_IF_ERROR(nccl.Check(nccl.ncclGetUniqueId(&id), "ncclGetUniqueId"));
  out->assign(id.internal, sizeof(id.internal));
  return Status();
}

Status NcclGroup::Create(const Options& options,
                         std::shared_ptr<NcclGroup>* out) {
  EP_RETURN_IF_ERROR(CheckSizes(options.sizes));
  Libraries libraries;
  EP_RETURN_IF_ERROR(
      Libraries::Load(options.nccl_path, options.nccl_ep_path, &libraries));
  std::shared_ptr<Device> device;
  EP_RETURN_IF_ERROR(
      Device::Open(libraries, options.device, Reports::kNumReports, &device));
  out->reset(new NcclGroup(options, std::move(device)));
  return Status();
}

NcclGroup::NcclGroup(const Options& options, std::shared_ptr<Device> device)
    : options_(options),
      device_(std::move(device)),
      watchdog_(std::make_unique<Watchdog>(
          device_,
          StrCat("rank ", options.rank, " of EP domain ", options.domain),
          options.timeout_s, options.exit_after_s)),
      reports_(device_, options.sizes, options.domain),
      failed_(Code::kFailedPrecondition, "the group is not connected yet") {}

Status NcclGroup::Join(const std::string& unique_id, ncclComm_t lent) {
  MutexLock lock(mutex_);
  if (communicator_) {
    return Status(Code::kFailedPrecondition,
                  "the group has a communicator already");
  }
  return Communicator::Connect(device_, options_.sizes, options_.rank,
                               unique_id, lent, options_.timeout_s,
                               &communicator_);
}

Status NcclGroup::CheckMachine(int64_t num_hosts) {
  MutexLock lock(mutex_);
  return communicator_ ? communicator_->CheckMachine(num_hosts) : failed_;
}

Status NcclGroup::Open() {
  MutexLock lock(mutex_);
  if (!communicator_) return failed_;
  EP_RETURN_IF_ERROR(Communicator::Open(communicator_, options_.timeout_s));
  failed_ = Status();
  return Status();
}

Status NcclGroup::Check() {
  MutexLock lock(mutex_);
  EP_RETURN_IF_ERROR(failed_);
  return Drain();
}

Status NcclGroup::Close() {
  MutexLock lock(mutex_);
  if (!communicator_) return Status();
  if (failed_.ok()) (void)Drain();
  if (failed_.ok()) {
    (void)RunWithin(options_.timeout_s, "to disconnect", [c = communicator_] {
      c->Destroy();
      return Status();
    });
  }
  communicator_.reset();
  watchdog_->Stop();
  failed_ = Status(Code::kFailedPrecondition,
                   StrCat("the group \"", options_.name,
                          "\" was finalized; bootstrap a new one"));
  return Status();
}

Status NcclGroup::GiveUp(const Status& status) {
  const std::string others = watchdog_->heard();
  failed_ = others.empty()
                ? status
                : Status(status.code(), StrCat(status.message(), ". ", others));
  device_->Leak();
  (void)RunWithin(kAbortS, "to abort", [c = communicator_] {
    c->Abort();
    return Status();
  });
  return failed_;
}

Status NcclGroup::GiveUpUnlessOk(const Status& enqueued) {
  return enqueued.ok() ? enqueued : GiveUp(enqueued);
}

void NcclGroup::Submit(const Call& call,
                       const std::function<Status()>& enqueue) {
  Status status;
  {
    MutexLock lock(mutex_);
    status = failed_;
    if (status.ok()) status = GiveUpUnlessOk(CheckLent(call));
    if (status.ok()) status = GiveUpUnlessOk(runs_.Enter(call, &step_));
    if (status.ok()) {
      Device::Scope scope(*device_);
      status = enqueue();
    }
  }
  if (!status.ok()) {
    status = Status(status.code(), StrCat(Name(call), ", rank ", options_.rank,
                                          ": ", status.message()));
  }
  call.done(status);
}

Status NcclGroup::CheckLent(const Call& call) const {
  if (call.communicator == communicator_->lent()) return Status();
  return Status(Code::kFailedPrecondition,
                "XLA lends another communicator than it did when the group was "
                "bootstrapped, as after a failure; bootstrap a new group");
}

void NcclGroup::Prepare(Call call, const PrepareArgs& args) {
  Submit(call, [&]() EP_REQUIRES(mutex_) {
    Status earlier;
    if (reports_.full()) earlier = TakeOutcome();
    EP_RETURN_IF_ERROR(failed_);
    // The peers wait for this prepare even if an earlier prepare had a fault.
    const Status status = EnqueuePrepare(call, args);
    return earlier.ok() ? status : earlier;
  });
}

Status NcclGroup::EnqueuePrepare(const Call& call, const PrepareArgs& args) {
  const Layer& layer = call.site->layer;
  EP_RETURN_IF_ERROR(
      CheckMem(layer, args.num_tokens, {args.mem, args.mem_bytes}));
  const CUstream stream = static_cast<CUstream>(call.stream);
  Routing routing = NextRouting(layer, args.num_tokens, args.mem);
  routing.topk_idx = args.topk_idx;
  routing.index_is_int64 = args.index_is_int64;
  routing.place = args.place;
  routing.index = PlaceIndex(options_.sizes, options_.domain, options_.rank);
  routing.group_sizes = args.group_sizes;
  routing.token_counts = args.token_counts;
  routing.total_recv_tokens = args.total_recv_tokens;
  routing.dropped_counts = args.dropped_counts;
  routing.max_recv_tokens = args.max_recv_tokens;
  routing.kept = args.kept;
  routing.program = Hash(order_, HashProgram(*call.site, routing.sizes));
  order_ = kHashSeed;
  reports_.Begin(&routing);
  EP_RETURN_IF_ERROR(GiveUpUnlessOk(
      EnqueueRouting(*device_, *communicator_, stream, routing)));
  const int64_t routing_bytes =
      RoutingBytes(options_.sizes, layer, args.num_tokens);
  const Mem handle = {args.mem + routing_bytes, args.mem_bytes - routing_bytes};
  EP_RETURN_IF_ERROR(GiveUpUnlessOk(communicator_->Update(
      layer, handle, routing.choices, args.num_tokens, stream)));
  reports_.Add(Name(call), layer, stream);
  NoteEnqueued(call);
  return Status();
}

void NcclGroup::Scatter(Call call, const ScatterArgs& args) {
  Moved moved = {};
  moved.weights = reinterpret_cast<uint32_t*>(args.slot_weights);
  moved.weights_per_row = 1;
  moved.fill_tail = call.site->layer.tail != Tail::kUnspecified;
  moved.tail = call.site->layer.tail == Tail::kNan ? kNan : 0;
  Submit(call, [&]() EP_REQUIRES(mutex_) {
    return EnqueueMove(call, args.mem, args.tokens.count, args.slots, moved,
                       [&](const Mem& handle) EP_REQUIRES(mutex_) {
                         return communicator_->Scatter(
                             call.site->layer, handle, args,
                             static_cast<CUstream>(call.stream));
                       });
  });
}

void NcclGroup::Gather(Call call, const GatherArgs& args) {
  Moved moved = {};
  moved.weights = reinterpret_cast<uint32_t*>(args.topk_weights);
  moved.weights_per_row = call.site->layer.top_k;
  Submit(call, [&]() EP_REQUIRES(mutex_) {
    if (args.slot_weights && !args.topk_weights) {
      return Status(Code::kInvalidArgument,
                    "NCCL EP cannot scale rows by weights; multiply first");
    }
    return EnqueueMove(call, args.mem, args.tokens.count, args.tokens, moved,
                       [&](const Mem& handle) EP_REQUIRES(mutex_) {
                         return communicator_->Gather(
                             call.site->layer, handle, args,
                             static_cast<CUstream>(call.stream));
                       });
  });
}

Status NcclGroup::EnqueueMove(const Call& call, const Mem& mem,
                              int64_t num_tokens, const Rows& rows, Moved moved,
                              const std::function<Status(const Mem&)>& move) {
  const Layer& layer = call.site->layer;
  EP_RETURN_IF_ERROR(CheckMem(layer, num_tokens, mem));
  EP_RETURN_IF_ERROR(CheckRows(options_.sizes, rows.width, rows.dtype));
  // NCCL EP uses some bytes of EpHandle.mem as scratch memory, although XLA
  // treats the handle as constant. Neither we nor later ops read the scratch
  // bytes.
  std::byte* bytes = const_cast<std::byte*>(mem.data);
  const CUstream stream = static_cast<CUstream>(call.stream);
  const int64_t routing_bytes = RoutingBytes(options_.sizes, layer, num_tokens);
  Routing routing = NextRouting(layer, num_tokens, bytes);
  order_ = Hash(order_, HashProgram(*call.site, routing.sizes));
  routing.nccl_ep_words = reinterpret_cast<uint32_t*>(bytes + routing_bytes);
  routing.num_nccl_ep_words = (mem.bytes - routing_bytes) / sizeof(uint32_t);
  EP_RETURN_IF_ERROR(GiveUpUnlessOk(device_->LaunchThreads(
      Device::kClearForeign, kClearThreads, stream, &routing)));
  EP_RETURN_IF_ERROR(
      GiveUpUnlessOk(move({bytes + routing_bytes, mem.bytes - routing_bytes})));
  moved.rows = reinterpret_cast<uint32_t*>(rows.data);
  moved.num_rows = rows.count;
  moved.row_words = rows.row_bytes() / sizeof(uint32_t);
  moved.report = reports_.shared();
  const bool is_checked = layer.checked && call.op == Op::kCombine;
  if (is_checked) {
    moved.row_elements = rows.width;
    moved.exponent = ExponentBits(rows.dtype);
    moved.op = reports_.NumberOf(Name(call));
  }
  EP_RETURN_IF_ERROR(GiveUpUnlessOk(device_->LaunchBlocks(
      Device::kFinish, std::clamp(rows.count, int64_t{1}, kFinishBlocks),
      stream, &routing, &moved)));
  NoteEnqueued(call);
  if (!is_checked) return Status();
  EP_RETURN_IF_ERROR(GiveUpUnlessOk(device_->LaunchBlocks(
      Device::kFindNotFinite, rows.count, stream, &routing, &moved)));
  return GiveUpUnlessOk(device_->LaunchBlocks(Device::kReportNotFinite, 1,
                                              stream, &routing, &moved));
}

void NcclGroup::NoteEnqueued(const Call& call) {
  watchdog_->Add(StrCat(Name(call), ", step ", step_, " of \"",
                        call.site->program, "\", op ", call.site->position));
}

Status NcclGroup::MemBytes(const Layer& layer, int64_t num_tokens,
                           int64_t* out) const {
  MutexLock lock(mutex_);
  EP_RETURN_IF_ERROR(failed_);
  Device::Scope scope(*device_);
  return SizeMem(layer, num_tokens, out);
}

Routing NcclGroup::NextRouting(const Layer& layer, int64_t num_tokens,
                               std::byte* mem) {
  Routing routing =
      RoutingIn(options_.sizes, layer, num_tokens, options_.rank, mem);
  watchdog_->Number(&routing);
  return routing;
}

Status NcclGroup::SizeMem(const Layer& layer, int64_t num_tokens,
                          int64_t* out) const {
  EP_RETURN_IF_ERROR(CheckLayer(options_.sizes, layer, num_tokens));
  EP_RETURN_IF_ERROR(communicator_->HandleBytes(layer, out));
  *out += RoutingBytes(options_.sizes, layer, num_tokens);
  return Status();
}

Status NcclGroup::CheckMem(const Layer& layer, int64_t num_tokens,
                           const Mem& mem) const {
  int64_t bytes = 0;
  EP_RETURN_IF_ERROR(SizeMem(layer, num_tokens, &bytes));
  if (mem.bytes == bytes) return Status();
  return Status(Code::kInvalidArgument,
                StrCat("handle.mem has ", mem.bytes, " bytes, but ", bytes,
                       " are expected; use the handle that ep_prepare made "
                       "for this layer, in this process"));
}

Status NcclGroup::TakeOutcome() {
  Status status;
  return reports_.TakeOldest(*watchdog_, &status) ? status : GiveUp(status);
}

Status NcclGroup::Drain() {
  Status first = RunWithin(
      options_.timeout_s, "the work on the device",
      [device = device_] { return device->Synchronize(); },
      [this] {
        const Progress progress = device_->ReadProgress();
        return progress.begun + progress.ended;
      });
  if (!first.ok()) return GiveUp(first);
  while (failed_.ok() && !reports_.empty()) {
    const Status status = TakeOutcome();
    if (first.ok()) first = status;
  }
  const Status shared = reports_.TakeShared();
  return first.ok() ? shared : first;
}

}  // namespace ep::nccl
