// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/group.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

namespace ep::host {

Status HostGroup::Create(Options options, std::shared_ptr<Group>* out) {
  // Each tick checks for timeouts, so a timeout error may be `tick_s` late.
  const double tick_s = std::clamp(options.exchanges.timeout_s / 20, 0.01, 1.0);
  std::unique_ptr<Peers> peers;
  EP_RETURN_IF_ERROR(Peers::Create(options.topology, std::move(options.sockets),
                                   tick_s, &peers));
  auto exchanges = Exchanges::Create(options.exchanges, std::move(peers));
  out->reset(new HostGroup(std::move(options), std::move(exchanges)));
  return Status();
}

HostGroup::HostGroup(Options options, std::shared_ptr<Exchanges> exchanges)
    : num_experts_(options.num_experts),
      topology_(std::move(options.topology)),
      options_(std::move(options.exchanges)),
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

Status HostGroup::Locate(bool is_open, Job* job) const {
  if (!is_open && !IsForked()) return Closed(options_.group_name);
  if (!is_open) {
    return Status(Code::kFailedPrecondition,
                  StrCat("the group \"", options_.group_name,
                         "\" belongs to the process with the id ", process_,
                         ", of which this one is a forked child; run ops in "
                         "that process"));
  }
  const int32_t index = topology_.FindDevice(job->call.device);
  if (index < 0) {
    return Status(Code::kFailedPrecondition,
                  StrCat("device ", job->call.device,
                         " is not in the mesh of the group; run the op on "
                         "the mesh that was given to ep_bootstrap"));
  }
  job->domain = index / topology_.ep_size;
  job->rank = index % topology_.ep_size;
  return Status();
}

void HostGroup::Post(std::shared_ptr<Job> job) {
  const std::shared_ptr<Exchanges> open = exchanges();
  Status status = Locate(open != nullptr, job.get());
  if (status.ok()) status = job->Open();
  if (status.ok()) return open->Post(job);
  if (open) return open->FailCall(job->call, status);

  status = Status(status.code(),
                  StrCat(OpName(job->call.op, job->call.site->layer.name), ": ",
                         status.message()));
  if (options_.on_run_failed && !IsForked()) {
    options_.on_run_failed(job->call.run_id, status);
  }
  job->call.done(status);
}

std::shared_ptr<Job> HostGroup::MakeJob(Job::Kind kind, Call call,
                                        int64_t num_tokens) const {
  const PlanDims dims = Dims(call.site->layer, num_tokens);
  return std::make_shared<Job>(Job{kind, std::move(call), dims});
}

void HostGroup::Prepare(Call call, const PrepareArgs& args) {
  auto job = MakeJob(Job::kPrepare, std::move(call), args.num_tokens);
  job->prepare = args;
  Post(std::move(job));
}

void HostGroup::Scatter(Call call, const ScatterArgs& args) {
  auto job = MakeJob(Job::kScatter, std::move(call), args.tokens.count);
  job->mem = args.mem;
  job->in = args.tokens;
  job->in_weights = args.topk_weights;
  job->out = args.slots;
  job->out_weights = args.slot_weights;
  Post(std::move(job));
}

void HostGroup::Gather(Call call, const GatherArgs& args) {
  auto job = MakeJob(Job::kGather, std::move(call), args.tokens.count);
  job->mem = args.mem;
  job->in = args.slots;
  job->in_weights = args.slot_weights;
  job->out = args.tokens;
  job->out_weights = args.topk_weights;
  Post(std::move(job));
}

}  // namespace ep::host
