// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/group.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "ep_ffi/backends/host/movers.h"
#include "ep_ffi/backends/host/pages.h"
#include "ep_ffi/core/faults.h"

namespace ep::host {
namespace {

Signature SignatureOf(const PlanDims& dims, const Layer& layer) {
  Signature s;
  s[Signature::kExperts] = dims.num_experts;
  s[Signature::kTokens] = dims.num_tokens;
  s[Signature::kTopK] = dims.top_k;
  s[Signature::kCapacity] = dims.capacity;
  s[Signature::kAlignment] = dims.alignment;
  s[Signature::kDrop] = dims.drop;
  s[Signature::kTail] = static_cast<int64_t>(layer.tail);
  return s;
}

// A mover's signature and table: its rows, and their weights if any.
Contribution RowsContribution(const PlanDims& dims, const Layer& layer,
                              const Plan& plan, const ConstRows& rows,
                              const float* weights, int64_t num_weights) {
  Contribution c;
  c.signature = SignatureOf(dims, layer);
  c.signature[Signature::kWidth] = rows.width;
  c.signature[Signature::kDType] = static_cast<int64_t>(rows.dtype);
  c.signature[Signature::kWeighted] = weights != nullptr;
  c.signature[Signature::kRouting] = static_cast<int64_t>(plan.fingerprint());
  c.signature[Signature::kFirstBytes] = rows.count * rows.row_bytes();
  c.signature[Signature::kSecondBytes] =
      weights ? num_weights * int64_t{sizeof(float)} : 0;
  c.table = {rows.data, reinterpret_cast<const std::byte*>(weights)};
  return c;
}

void StageAll(const Contribution& c, std::byte* first, std::byte* second) {
  const int64_t first_bytes = c.signature[Signature::kFirstBytes];
  const int64_t second_bytes = c.signature[Signature::kSecondBytes];
  if (first_bytes > 0) std::memcpy(first, c.table.first, first_bytes);
  if (second_bytes > 0) std::memcpy(second, c.table.second, second_bytes);
}

ChoicesView Copy(const PlanDims& dims, const ChoicesView& choices,
                 SortedChoices* copy) {
  copy->starts.assign(choices.starts, choices.starts + dims.num_experts + 1);
  copy->order.assign(choices.order, choices.order + dims.num_choices());
  return {copy->starts.data(), copy->order.data()};
}

// The tables of a mover's ranks, with the types that the mover knows.
std::vector<RankRows> ToRankRows(const std::vector<Table>& tables,
                                 bool weighted) {
  std::vector<RankRows> ranks;
  ranks.reserve(tables.size());
  for (const Table& table : tables) {
    ranks.push_back(
        {table.first,
         weighted ? reinterpret_cast<const float*>(table.second) : nullptr});
  }
  return ranks;
}

}  // namespace

Status HostGroup::Create(Options options, std::shared_ptr<Group>* out) {
  Handshake::Options handshake;
  handshake.process = options.topology.process;
  handshake.num_processes = options.topology.num_processes;
  handshake.listener = options.listener;
  handshake.addresses = std::move(options.addresses);
  handshake.timeout_s = options.timeout_s;
  handshake.pids = std::move(options.pids);
  handshake.process_ids = options.topology.process_ids;
  // How late a timeout may be reported.
  const double tick_s = std::clamp(options.timeout_s / 20, 0.01, 1.0);
  std::unique_ptr<Peers> peers;
  Status connected = Peers::Connect(handshake, tick_s, &peers);
  if (!connected.ok()) return connected;
  auto exchanges = Exchanges::Create({options.name, options.topology,
                                      options.timeout_s, options.on_run_failed},
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
  // Its threads, which its end would wait for, are not in a forked child.
  if (IsForked()) {
    new std::shared_ptr<Exchanges>(std::move(exchanges_));
  } else {
    (void)Close();
  }
}

bool HostGroup::IsForked() const { return getpid() != process_; }

std::shared_ptr<Exchanges> HostGroup::exchanges() const {
  if (IsForked()) return nullptr;  // its lock may be held for ever
  std::lock_guard<std::mutex> lock(mutex_);
  return exchanges_;
}

HostMemory HostGroup::Memory() {
  const std::shared_ptr<Exchanges> open = exchanges();
  return open ? open->Memory() : HostMemory();
}

void HostGroup::FailRun(int64_t run_id, const Status& status) {
  const std::shared_ptr<Exchanges> open = exchanges();
  if (open) open->FailRun(run_id, status);
}

Status HostGroup::Close() {
  if (IsForked()) return Status();
  std::unique_lock<std::mutex> lock(mutex_);
  const std::shared_ptr<Exchanges> last = std::move(exchanges_);
  lock.unlock();
  return last ? last->Close() : Status();
}

PlanDims HostGroup::Dims(const Layer& layer, int64_t num_tokens) const {
  return {num_experts_,   ep_size(),       num_tokens, layer.top_k,
          layer.capacity, layer.alignment, layer.drop};
}

Status HostGroup::Locate(const Call& call, Place* place) const {
  place->exchanges = exchanges();
  if (!place->exchanges) {
    return Status(
        Code::kFailedPrecondition,
        StrCat("the group \"", name_, "\" ",
               IsForked()
                   ? StrCat("belongs to the process with the id ", process_,
                            ", of which this one is a forked child; run ops "
                            "in that process")
                   : "was finalized; run no op after ep_finalize"));
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
  if (place.exchanges) return place.exchanges->Fail(call, std::move(status));
  status = Status(status.code(),
                  StrCat(OpName(call.op), "(layer \"", call.site->layer.name,
                         "\"): ", status.message()));
  if (on_run_failed_ && !IsForked()) on_run_failed_(call.run_id, status);
  call.done(status);
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
  if (status.ok()) {
    status = args.index_is_int64
                 ? SortChoices(dims, static_cast<const int64_t*>(args.topk_idx),
                               mine.get())
                 : SortChoices(dims, static_cast<const int32_t*>(args.topk_idx),
                               mine.get());
  }
  if (!status.ok()) return Fail(call, place, std::move(status));

  Contribution c;
  c.signature = SignatureOf(dims, call.site->layer);
  c.signature[Signature::kConfig] = call.site->layer.config;
  c.signature[Signature::kFirstBytes] = mine->starts.size() * sizeof(int32_t);
  c.signature[Signature::kSecondBytes] = mine->order.size() * sizeof(int32_t);
  c.table = {reinterpret_cast<const std::byte*>(mine->starts.data()),
             reinterpret_cast<const std::byte*>(mine->order.data())};
  c.stage = [c](std::byte* first, std::byte* second) {
    StageAll(c, first, second);
  };
  c.num_chunks = 1;
  std::vector<bool> is_local;
  for (int32_t r = 0; r < dims.ep_size; ++r) {
    is_local.push_back(topology_.is_local(place.domain, r));
  }
  c.run = [dims, domain = args.place ? args.place[1] : 0, rank = place.rank,
           args, mine, is_local](const std::vector<Table>& tables, int64_t) {
    std::vector<ChoicesView> choices;
    std::deque<SortedChoices> copies;
    for (size_t r = 0; r < tables.size(); ++r) {
      ChoicesView view = {reinterpret_cast<const int32_t*>(tables[r].first),
                          reinterpret_cast<const int32_t*>(tables[r].second)};
      // Another process can write to its segment at any time, so that what is
      // found valid there need not be what is used.
      if (!is_local[r]) view = Copy(dims, view, &copies.emplace_back());
      choices.push_back(view);
    }
    return BuildPlan(dims, domain, rank, choices,
                     {args.mem, args.group_sizes, args.token_counts,
                      args.total_recv_tokens});
  };
  place.exchanges->Post(call, place.domain, place.rank, std::move(c));
}

void HostGroup::Scatter(Call call, const ScatterArgs& args) {
  const PlanDims dims = Dims(call.site->layer, args.tokens.count);
  Place place;
  Plan plan;
  Status status = Locate(call, &place);
  if (status.ok()) {
    status = Plan::Open(dims, place.rank, args.mem.data, args.mem.bytes, &plan);
  }
  if (!status.ok()) return Fail(call, place, std::move(status));

  Contribution c = RowsContribution(dims, call.site->layer, plan, args.tokens,
                                    args.topk_weights, dims.num_choices());
  c.stage = [c](std::byte* first, std::byte* second) {
    StageAll(c, first, second);
  };
  PreferHugePages(args.slots.data, plan.num_slots() * args.slots.row_bytes());
  auto mover = std::make_shared<const host::Scatter>(
      host::Scatter{dims, plan, call.site->layer.tail, args});
  c.num_chunks = mover->num_chunks();
  c.run = [mover](const std::vector<Table>& tables, int64_t chunk) {
    return mover->RunChunk(ToRankRows(tables, mover->args.topk_weights), chunk);
  };
  place.exchanges->Post(call, place.domain, place.rank, std::move(c));
}

void HostGroup::Gather(Call call, const GatherArgs& args) {
  const PlanDims dims = Dims(call.site->layer, args.tokens.count);
  Place place;
  Plan plan;
  Status status = Locate(call, &place);
  if (status.ok()) {
    status = Plan::Open(dims, place.rank, args.mem.data, args.mem.bytes, &plan);
  }
  if (!status.ok()) return Fail(call, place, std::move(status));

  Contribution c = RowsContribution(dims, call.site->layer, plan, args.slots,
                                    args.slot_weights, dims.capacity);
  // Only the slots that another process will read; the pages of the others
  // are never touched.
  c.stage = [this, domain = place.domain, plan, args](std::byte* first,
                                                      std::byte* second) {
    const int64_t row_bytes = args.slots.row_bytes();
    for (int64_t slot = 0; slot < plan.num_slots(); ++slot) {
      const int32_t source = plan.recv()[slot].rank;
      if (source < 0 || source >= topology_.ep_size ||
          topology_.is_local(domain, source)) {
        continue;
      }
      std::memcpy(first + slot * row_bytes, args.slots.data + slot * row_bytes,
                  row_bytes);
      if (!args.slot_weights) continue;
      std::memcpy(second + slot * sizeof(float), args.slot_weights + slot,
                  sizeof(float));
    }
  };
  PreferHugePages(args.tokens.data,
                  args.tokens.count * args.tokens.row_bytes());
  auto mover = std::make_shared<const GatherSum>(GatherSum{
      dims, plan, args, call.site->layer.checked && call.op == Op::kCombine});
  c.num_chunks = mover->num_chunks();
  c.run = [mover](const std::vector<Table>& tables, int64_t chunk) {
    return mover->RunChunk(ToRankRows(tables, mover->args.slot_weights), chunk);
  };
  place.exchanges->Post(call, place.domain, place.rank, std::move(c));
}

}  // namespace ep::host
