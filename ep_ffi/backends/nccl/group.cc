// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/nccl/group.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "ep_ffi/backends/nccl/calls.h"
#include "ep_ffi/backends/nccl/deadline.h"
#include "ep_ffi/backends/nccl/libraries.h"
#include "ep_ffi/backends/nccl/routing.h"
#include "ep_ffi/core/faults.h"
#include "ep_ffi/core/hash.h"

namespace ep::nccl {
namespace {

// Enough to clear some megabytes at once, which is for errors only.
constexpr int64_t kGuardThreads = 16384;

// Enough to write at the speed of the memory; they are launched even where
// there is nothing to write, which only the device knows.
constexpr int64_t kFinishBlocks = 512;

std::string Name(const Call& call) {
  return StrCat(OpName(call.op), "(layer \"", call.site->layer.name, "\")");
}

// The bits that are all ones in what is not finite.
uint32_t Exponent(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 0x7f800000;
    case DType::kBFloat16:
      return 0x7f80;
    case DType::kFloat16:
      return 0x7c00;
  }
  return 0;
}

// Hashes the op and all that the ranks of an exchange share. Which copy of it
// this is does not count: copies are numbered as they are instantiated, and a
// rank that loads an executable from a cache instantiates more often or less
// than one that compiles it.
uint64_t HashProgram(const Site& site, uint64_t sizes) {
  return Hash({static_cast<int64_t>(Hash(site.layer.name)), site.layer.config,
               static_cast<int64_t>(Hash(site.program)), site.position,
               static_cast<int64_t>(sizes)});
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

// ---- Life -------------------------------------------------------------------

Status NcclGroup::Create(const Options& options, std::shared_ptr<Group>* out) {
  EP_RETURN_IF_ERROR(CheckSizes(options.sizes));
  Libraries libraries;
  EP_RETURN_IF_ERROR(
      Libraries::Load(options.nccl_path, options.nccl_ep_path, &libraries));
  std::shared_ptr<NcclGroup> group(new NcclGroup(options));
  EP_RETURN_IF_ERROR(group->Connect(libraries));
  *out = std::move(group);
  return Status();
}

Status NcclGroup::Connect(const Libraries& libraries) {
  EP_RETURN_IF_ERROR(
      Device::Open(libraries, options_.device, kNumReports, &device_));
  return Communicator::Create(device_, options_.sizes, options_.rank,
                              options_.unique_id, options_.timeout_s,
                              &communicator_);
}

Status NcclGroup::Check() {
  std::lock_guard<std::mutex> lock(mutex_);
  EP_RETURN_IF_ERROR(failed_);
  return Drain();
}

Status NcclGroup::Close() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!communicator_) return Status();
  if (failed_.ok()) (void)Drain();
  if (failed_.ok()) {
    (void)RunWithin(options_.timeout_s, "to part", [c = communicator_] {
      c->Destroy();
      return Status();
    });
  }
  communicator_.reset();
  failed_ = Status(Code::kFailedPrecondition,
                   StrCat("the group \"", options_.name,
                          "\" was finalized; bootstrap a new one"));
  return Status();
}

Status NcclGroup::GiveUp(const Status& status) {
  failed_ = status;
  device_->Forsake();
  // It may wait for what cannot be aborted.
  (void)RunWithin(options_.timeout_s, "to abort", [c = communicator_] {
    c->Abort();
    return Status();
  });
  return status;
}

Status NcclGroup::KeepUp(const Status& enqueued) {
  return enqueued.ok() ? enqueued : GiveUp(enqueued);
}

// ---- Ops --------------------------------------------------------------------

void NcclGroup::Submit(const Call& call,
                       const std::function<Status()>& enqueue) {
  Status status;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    status = failed_;
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

void NcclGroup::Prepare(Call call, const PrepareArgs& args) {
  Submit(call, [&] {
    Status earlier;
    if (pending_.size() == kWindow) earlier = TakeVerdict();
    EP_RETURN_IF_ERROR(failed_);
    // This one's peers wait for it, whatever an earlier one had.
    const Status status = EnqueuePrepare(call, args);
    return earlier.ok() ? status : earlier;
  });
}

Status NcclGroup::EnqueuePrepare(const Call& call, const PrepareArgs& args) {
  const Layer& layer = call.site->layer;
  EP_RETURN_IF_ERROR(
      CheckMem(layer, args.num_tokens, {args.mem, args.mem_bytes}));
  const uint64_t ticket = ++last_ticket_;
  const CUstream stream = static_cast<CUstream>(call.stream);
  Routing routing = RoutingIn(options_.sizes, layer, args.num_tokens,
                              options_.rank, args.mem);
  routing.topk_idx = args.topk_idx;
  routing.index_is_int64 = args.index_is_int64;
  routing.place = args.place;
  routing.index = Index(options_.rank);
  routing.group_sizes = args.group_sizes;
  routing.token_counts = args.token_counts;
  routing.total_recv_tokens = args.total_recv_tokens;
  routing.program = HashProgram(*call.site, routing.sizes);
  routing.ticket = ticket;
  routing.report = device_->device_report(ticket % kWindow);
  EP_RETURN_IF_ERROR(
      KeepUp(EnqueueRouting(*device_, *communicator_, stream, routing)));
  const int64_t ours = RoutingBytes(options_.sizes, layer, args.num_tokens);
  EP_RETURN_IF_ERROR(KeepUp(communicator_->WithHandle(
      layer, args.mem + ours, args.mem_bytes - ours, "ncclEpUpdateHandle",
      [&](ncclEpHandle_t handle) {
        return Update(device_->libraries(), handle, routing.choices,
                      args.num_tokens, args.top_k, stream);
      })));
  pending_.push_back({ticket, Name(call), args.top_k});
  return Status();
}

void NcclGroup::Scatter(Call call, const ScatterArgs& args) {
  Moved moved = {};
  moved.weights = reinterpret_cast<uint32_t*>(args.slot_weights);
  moved.weights_per_row = 1;
  moved.fill_tail = call.site->layer.tail != Tail::kUnspecified;
  moved.tail = call.site->layer.tail == Tail::kNan ? kNan : 0;
  Submit(call, [&] {
    return EnqueueMove(call, args.mem, args.tokens.count, args.slots, moved,
                       "ncclEpDispatch", [&](ncclEpHandle_t handle) {
                         return nccl::Scatter(
                             device_->libraries(), handle, args,
                             call.site->layer.top_k,
                             static_cast<CUstream>(call.stream));
                       });
  });
}

void NcclGroup::Gather(Call call, const GatherArgs& args) {
  Moved moved = {};
  moved.weights = reinterpret_cast<uint32_t*>(args.topk_weights);
  moved.weights_per_row = call.site->layer.top_k;
  Submit(call, [&] {
    if (args.slot_weights && !args.topk_weights) {
      return Status(Code::kInvalidArgument,
                    "NCCL EP cannot scale rows by weights; multiply first");
    }
    return EnqueueMove(call, args.mem, args.tokens.count, args.tokens, moved,
                       "ncclEpCombine", [&](ncclEpHandle_t handle) {
                         return nccl::Gather(
                             device_->libraries(), handle, args,
                             call.site->layer.top_k,
                             static_cast<CUstream>(call.stream));
                       });
  });
}

Status NcclGroup::EnqueueMove(
    const Call& call, const Mem& mem, int64_t num_tokens, const Rows& rows,
    Moved moved, const char* what,
    const std::function<ncclResult_t(ncclEpHandle_t)>& move) {
  const Layer& layer = call.site->layer;
  EP_RETURN_IF_ERROR(CheckMem(layer, num_tokens, mem));
  EP_RETURN_IF_ERROR(CheckRows(options_.sizes, rows.width, rows.dtype));
  // NCCL EP calculates there, although XLA takes these bytes for constant. It
  // leaves nothing that a later op reads, nor do we read what it leaves.
  std::byte* bytes = const_cast<std::byte*>(mem.data);
  const CUstream stream = static_cast<CUstream>(call.stream);
  const int64_t ours = RoutingBytes(options_.sizes, layer, num_tokens);
  Routing routing =
      RoutingIn(options_.sizes, layer, num_tokens, options_.rank, bytes);
  routing.theirs = reinterpret_cast<uint32_t*>(bytes + ours);
  routing.num_theirs = (mem.bytes - ours) / sizeof(uint32_t);
  EP_RETURN_IF_ERROR(KeepUp(
      device_->LaunchThreads(Device::kGuard, kGuardThreads, stream, &routing)));
  EP_RETURN_IF_ERROR(KeepUp(communicator_->WithHandle(
      layer, bytes + ours, mem.bytes - ours, what, move)));
  moved.rows = reinterpret_cast<uint32_t*>(rows.data);
  moved.num_rows = rows.count;
  moved.row_words = rows.row_bytes() / sizeof(uint32_t);
  moved.report = device_->device_report(kMoverReport);
  EP_RETURN_IF_ERROR(KeepUp(device_->LaunchBlocks(
      Device::kFinish, std::min(rows.count, kFinishBlocks), stream, &routing,
      &moved)));
  if (!layer.checked || call.op != Op::kCombine) return Status();
  return KeepUp(EnqueueFiniteCheck(call, rows, routing, moved));
}

Status NcclGroup::EnqueueFiniteCheck(const Call& call, const Rows& rows,
                                     Routing routing, Moved moved) {
  moved.row_elements = rows.width;
  moved.exponent = Exponent(rows.dtype);
  moved.op = NumberOf(Name(call));
  const Libraries& cuda = device_->libraries();
  const CUstream stream = static_cast<CUstream>(call.stream);
  uint64_t* found = &routing.header->not_finite;
  EP_RETURN_IF_ERROR(cuda.Check(
      cuda.cuMemsetD32Async(reinterpret_cast<CUdeviceptr>(found), 0,
                            sizeof(*found) / sizeof(uint32_t), stream),
      "cuMemsetD32Async"));
  EP_RETURN_IF_ERROR(device_->LaunchBlocks(Device::kFindNotFinite, rows.count,
                                           stream, &routing, &moved));
  return device_->LaunchBlocks(Device::kReportNotFinite, 1, stream, &routing,
                               &moved);
}

// ---- EpHandle.mem -----------------------------------------------------------

Status NcclGroup::MemBytes(const Layer& layer, int64_t num_tokens,
                           int64_t* out) const {
  std::lock_guard<std::mutex> lock(mutex_);
  EP_RETURN_IF_ERROR(failed_);
  Device::Scope scope(*device_);
  return SizeMem(layer, num_tokens, out);
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

// ---- Faults -----------------------------------------------------------------

Status NcclGroup::Drain() {
  Status first =
      RunWithin(options_.timeout_s, "the work on the device",
                [device = device_] { return device->Synchronize(); });
  if (!first.ok()) return GiveUp(first);
  while (failed_.ok() && !pending_.empty()) {
    const Status status = TakeVerdict();
    if (first.ok()) first = status;
  }
  Verdict verdict;
  if (device_->TakeReport(kMoverReport, /*ticket=*/1, &verdict) && first.ok()) {
    first = ToStatus(verdict, Pending());
  }
  return first;
}

int32_t NcclGroup::NumberOf(const std::string& op) {
  const size_t number =
      std::find(checked_ops_.begin(), checked_ops_.end(), op) -
      checked_ops_.begin();
  if (number == checked_ops_.size()) checked_ops_.push_back(op);
  return number;
}

Status NcclGroup::TakeVerdict() {
  const Pending oldest = std::move(pending_.front());
  pending_.pop_front();
  const auto deadline = std::chrono::steady_clock::now() +
                        std::chrono::duration<double>(options_.timeout_s);
  Verdict verdict;
  while (
      !device_->TakeReport(oldest.ticket % kWindow, oldest.ticket, &verdict)) {
    if (std::chrono::steady_clock::now() > deadline) {
      return GiveUp(Status(
          Code::kDeadlineExceeded,
          StrCat(oldest.op,
                 " did not run within timeout_s = ", options_.timeout_s,
                 "; look for a rank that failed or runs another program")));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  return ToStatus(verdict, oldest);
}

Status NcclGroup::ToStatus(const Verdict& verdict,
                           const Pending& pending) const {
  const int64_t token = verdict.choice / std::max(pending.top_k, int64_t{1});
  const int64_t k = verdict.choice - token * pending.top_k;
  const auto on_rank = [&](const Status& status) {
    return Status(status.code(), StrCat(pending.op, ", rank ", verdict.rank,
                                        ": ", status.message()));
  };
  switch (verdict.fault) {
    case Fault::kNone:
      return Status();
    case Fault::kIdOutOfRange:
      return on_rank(
          IdOutOfRange(token, k, verdict.value, options_.sizes.num_experts));
    case Fault::kRepeatedId:
      return on_rank(RepeatedId(token, k, verdict.value));
    case Fault::kOtherPlace:
      return on_rank(OtherPlace(verdict.value, Index(verdict.rank), ep_size()));
    case Fault::kOverflow: {
      const Status status =  // names the rank itself
          Overflow(verdict.rank, verdict.value, options_.sizes.capacity);
      return Status(status.code(), StrCat(pending.op, ": ", status.message()));
    }
    case Fault::kDisagreement:
      return Status(Code::kFailedPrecondition,
                    StrCat(pending.op, ": rank 0 and rank ", verdict.rank,
                           " disagree on the op, its layer or its sizes; run "
                           "the same program on all ranks"));
    case Fault::kForeignHandle:
      return Status(Code::kInvalidArgument,
                    StrCat("rank ", verdict.rank,
                           ": handle.mem is not what ep_prepare returned for "
                           "this layer on this rank; pass handles on as they "
                           "are"));
    case Fault::kNotFinite:
      return Status(
          Code::kInvalidArgument,
          StrCat(checked_ops_[verdict.op], ", rank ", verdict.rank, ": out[",
                 verdict.choice, ", ", verdict.value, "] is not finite"));
  }
  return Status(Code::kInternal, "an unknown fault");
}

}  // namespace ep::nccl
