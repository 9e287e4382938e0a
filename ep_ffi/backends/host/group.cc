// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/group.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <new>
#include <utility>

#include "ep_ffi/backends/host/movers/movers.h"
#include "ep_ffi/core/faults.h"
#include "ep_ffi/core/pages.h"

namespace ep::host {
namespace {

Signature SignatureOf(const Call& call, const PlanDims& dims) {
  Signature s;
  s[Signature::kOp] = static_cast<int64_t>(call.op);
  s[Signature::kExperts] = dims.num_experts;
  s[Signature::kTokens] = dims.num_tokens;
  s[Signature::kTopK] = dims.top_k;
  s[Signature::kCapacity] = dims.capacity;
  s[Signature::kAlignment] = dims.alignment;
  s[Signature::kDrop] = dims.drop;
  s[Signature::kTail] = static_cast<int64_t>(call.site->layer.tail);
  s[Signature::kWire] = call.site->layer.wire;
  return s;
}

// Makes the contribution of a Scatter or Gather: signature, rows, and weights.
Contribution RowsContribution(const Call& call, const PlanDims& dims,
                              const Plan& plan, const ConstRows& rows,
                              const float* weights, int64_t num_weights) {
  Contribution c;
  c.signature = SignatureOf(call, dims);
  c.signature[Signature::kWidth] = rows.width;
  c.signature[Signature::kDType] = static_cast<int64_t>(rows.dtype);
  c.signature[Signature::kWeighted] = weights != nullptr;
  c.signature[Signature::kRouting] = static_cast<int64_t>(plan.fingerprint());
  c.signature[Signature::kFirstBytes] = rows.count * rows.row_bytes();
  c.signature[Signature::kSecondBytes] =
      weights ? num_weights * int64_t{sizeof(float)} : 0;
  c.arrays = {rows.data, weights};
  return c;
}

template <typename Place, typename Mover>
void Post(const Call& call, const Place& place, Mover mover, Contribution c) {
  const auto shared = std::make_shared<const Mover>(std::move(mover));
  c.num_chunks = shared->num_chunks();
  c.run = [shared](const std::vector<Arrays>& ranks, int64_t chunk) {
    std::vector<RankRows> rows;
    rows.reserve(ranks.size());
    for (const Arrays& rank : ranks) {
      rows.push_back({static_cast<const std::byte*>(rank.first),
                      static_cast<const float*>(rank.second)});
    }
    return shared->RunChunk(rows, chunk);
  };
  place.exchanges->Post(call, place.domain, place.rank, std::move(c));
}

Status Sort(const PlanDims& dims, const PrepareArgs& args, SortedChoices* out) {
  try {
    return args.index_is_int64
               ? SortChoices(dims, static_cast<const int64_t*>(args.topk_idx),
                             out)
               : SortChoices(dims, static_cast<const int32_t*>(args.topk_idx),
                             out);
  } catch (const std::bad_alloc& e) {  // the arrays may be large
    return NoMemory(e);
  }
}

// Copies the choices of a rank, and returns a view of the copy.
ChoicesView Copy(const PlanDims& dims, const ChoicesView& choices,
                 SortedChoices* copy) {
  copy->starts.assign(choices.starts,
                      choices.starts + dims.num_expert_slots() + 1);
  copy->order.assign(choices.order, choices.order + dims.num_choices());
  return {copy->starts.data(), copy->order.data()};
}

}  // namespace

Status HostGroup::Create(Options options, std::shared_ptr<Group>* out) {
  // Each tick checks for timeouts, so a timeout error may be `tick_s` late.
  const double tick_s = std::clamp(options.timeout_s / 20, 0.01, 1.0);
  std::unique_ptr<Peers> peers;
  EP_RETURN_IF_ERROR(Peers::Create(options.topology, std::move(options.sockets),
                                   tick_s, &peers));
  auto exchanges =
      Exchanges::Create({options.name, options.timeout_s, options.on_run_failed,
                         options.exit_after_s},
                        std::move(peers));
  out->reset(new HostGroup(std::move(options), std::move(exchanges)));
  return Status();
}

HostGroup::HostGroup(Options options, std::shared_ptr<Exchanges> exchanges)
    : name_(std::move(options.name)),
      num_experts_(options.num_experts),
      topology_(std::move(options.topology)),
      on_run_failed_(std::move(options.on_run_failed)),
      process_(getpid()),
      exchanges_(std::move(exchanges)) {}

HostGroup::~HostGroup() {
  if (!IsForked()) {
    (void)Close();
    return;
  }
  // Leaks the exchanges, since their destructor would join threads that a
  // forked child lacks. Takes no lock, since one of these threads may hold it.
  new std::shared_ptr<Exchanges>(std::move(exchanges_));
}

bool HostGroup::IsForked() const { return getpid() != process_; }

std::shared_ptr<Exchanges> HostGroup::exchanges() const {
  if (IsForked()) return nullptr;  // a parent's thread may hold the lock
  MutexLock lock(mutex_);
  return exchanges_;
}

void HostGroup::FailRun(int64_t run_id, const Status& status) {
  if (const auto open = exchanges()) {
    open->FailRunHere(run_id, status, /*is_of_other_group=*/true);
  }
}

Status HostGroup::Close() {
  if (IsForked()) return Status();
  std::shared_ptr<Exchanges> open;
  {
    MutexLock lock(mutex_);
    open = std::move(exchanges_);
  }
  return open ? open->Close() : Status();
}

PlanDims HostGroup::Dims(const Layer& layer, int64_t num_tokens) const {
  return {num_experts_,   ep_size(),       num_tokens, layer.top_k,
          layer.capacity, layer.alignment, layer.drop};
}

Status HostGroup::Locate(const Call& call, Place* place) const {
  place->exchanges = exchanges();
  if (!place->exchanges && !IsForked()) return Closed(name_);
  if (!place->exchanges) {
    return Status(Code::kFailedPrecondition,
                  StrCat("the group \"", name_,
                         "\" belongs to the process with the id ", process_,
                         ", of which this one is a forked child; run ops in "
                         "that process"));
  }
  const int32_t index = topology_.FindDevice(call.device);
  if (index < 0) {
    return Status(Code::kFailedPrecondition,
                  StrCat("device ", call.device,
                         " is not in the mesh of the group; run the op on "
                         "the mesh that was given to ep_bootstrap"));
  }
  place->domain = index / topology_.ep_size;
  place->rank = index % topology_.ep_size;
  return Status();
}

void HostGroup::Fail(const Call& call, const Place& place,
                     Status status) const {
  if (place.exchanges) return place.exchanges->FailCall(call, status);
  status = Status(status.code(), StrCat(OpName(call.op, call.site->layer.name),
                                        ": ", status.message()));
  if (on_run_failed_ && !IsForked()) on_run_failed_(call.run_id, status);
  call.done(status);
}

bool HostGroup::Open(const Call& call, const PlanDims& dims, const Mem& mem,
                     Place* place, Plan* plan) const {
  Status status = Locate(call, place);
  if (status.ok()) {
    status = Plan::Open(dims, place->rank, mem.data, mem.bytes, plan);
  }
  if (!status.ok()) Fail(call, *place, status);
  return status.ok();
}

void HostGroup::Prepare(Call call, const PrepareArgs& args) {
  const PlanDims dims = Dims(call.site->layer, args.num_tokens);
  Place place;
  Status status = Locate(call, &place);
  const int64_t index = place.domain * ep_size() + place.rank;
  if (status.ok() && args.place && args.place[0] != index) {
    status = OtherPlace(args.place[0], index, ep_size());
  }
  if (status.ok()) status = ValidateDims(dims);
  auto mine = std::make_shared<SortedChoices>();
  if (status.ok()) status = Sort(dims, args, mine.get());
  if (!status.ok()) return Fail(call, place, std::move(status));

  Contribution c;
  c.signature = SignatureOf(call, dims);
  c.signature[Signature::kFingerprint] = call.site->layer.fingerprint;
  c.signature[Signature::kFirstBytes] = mine->starts.size() * sizeof(int32_t);
  c.signature[Signature::kSecondBytes] = mine->order.size() * sizeof(int32_t);
  c.arrays = {mine->starts.data(), mine->order.data()};
  c.num_chunks = 1;
  std::vector<bool> is_local;
  for (int32_t r = 0; r < dims.ep_size; ++r) {
    is_local.push_back(topology_.is_local(place.domain, r));
  }
  c.run = [dims, domain = args.place ? args.place[1] : 0, rank = place.rank,
           args, mine, is_local](const std::vector<Arrays>& ranks, int64_t) {
    std::vector<ChoicesView> choices;
    std::deque<SortedChoices> copies;
    for (size_t r = 0; r < ranks.size(); ++r) {
      choices.push_back({static_cast<const int32_t*>(ranks[r].first),
                         static_cast<const int32_t*>(ranks[r].second)});
      // Another process can write to its segment at any time. So BuildPlan must
      // check and use a private copy of the choices.
      if (is_local[r]) continue;
      choices[r] = Copy(dims, choices[r], &copies.emplace_back());
    }
    return BuildPlan(
        dims, domain, rank, choices,
        {args.mem, args.group_sizes, args.token_counts, args.total_recv_tokens,
         args.dropped_counts, args.max_recv_tokens, args.kept});
  };
  place.exchanges->Post(call, place.domain, place.rank, std::move(c));
}

void HostGroup::Scatter(Call call, const ScatterArgs& args) {
  const PlanDims dims = Dims(call.site->layer, args.tokens.count);
  Place place;
  Plan plan;
  if (!Open(call, dims, args.mem, &place, &plan)) return;

  Contribution c = RowsContribution(call, dims, plan, args.tokens,
                                    args.topk_weights, dims.num_choices());
  PreferHugePages(args.slots.data, plan.num_slots() * args.slots.row_bytes());
  Post(call, place, host::Scatter{dims, plan, call.site->layer.tail, args},
       std::move(c));
}

void HostGroup::Gather(Call call, const GatherArgs& args) {
  const PlanDims dims = Dims(call.site->layer, args.tokens.count);
  Place place;
  Plan plan;
  if (!Open(call, dims, args.mem, &place, &plan)) return;

  Contribution c = RowsContribution(call, dims, plan, args.slots,
                                    args.slot_weights, dims.capacity);
  // Copies only the slots that another process reads. Pages without such slots
  // stay untouched.
  c.stage = [this, domain = place.domain, plan, args](std::byte* rows,
                                                      std::byte* weights) {
    const int64_t row_bytes = args.slots.row_bytes();
    for (int64_t slot = 0; slot < plan.num_slots(); ++slot) {
      const int32_t source = plan.recv()[slot].rank;
      if (source < 0 || source >= topology_.ep_size ||
          topology_.is_local(domain, source)) {
        continue;
      }
      std::memcpy(rows + slot * row_bytes, args.slots.data + slot * row_bytes,
                  row_bytes);
      if (!args.slot_weights) continue;
      std::memcpy(weights + slot * sizeof(float), args.slot_weights + slot,
                  sizeof(float));
    }
  };
  PreferHugePages(args.tokens.data,
                  args.tokens.count * args.tokens.row_bytes());
  const bool is_checked = call.site->layer.checked && call.op == Op::kCombine;
  Post(call, place, GatherSum{dims, plan, args, is_checked}, std::move(c));
}

}  // namespace ep::host
