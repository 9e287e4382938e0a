// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/engine/exchanges.h"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <utility>

#include "ep_ffi/core/clock.h"

namespace ep::host {

Exchanges::Exchanges(Options options, std::unique_ptr<Peers> peers)
    : options_(std::move(options)),
      pending_(peers->topology()),
      last_posts_(peers->topology().members.size()),
      peers_(std::move(peers)) {
  for (int32_t d = 0; d < topology().num_domains(); ++d) {
    readers_of_domain_.push_back(topology().OtherProcesses(d));
    std::vector<bool>& is_local = is_local_.emplace_back();
    for (int32_t r = 0; r < topology().ep_size; ++r) {
      is_local.push_back(topology().is_local(d, r));
    }
  }
}

std::shared_ptr<Exchanges> Exchanges::Create(Options options,
                                             std::unique_ptr<Peers> peers) {
  std::shared_ptr<Exchanges> self(
      new Exchanges(std::move(options), std::move(peers)));
  // A raw pointer suffices: ~Exchanges joins the thread of the callbacks.
  Exchanges* e = self.get();
  e->peers_->Start(
      {[e](int32_t process, const Message& m, const std::string& names,
           const Mapping* memory, const Status& mapped) {
         e->OnPost(process, m, names, memory, mapped);
       },
       [e](const Message& m, const std::string& text) {
         const Status status(static_cast<Code>(m.code), text);
         e->WithRunId(m.launch, [e, status](int64_t run_id) {
           e->FailRunHere(run_id, status);
         });
       },
       [e](int32_t process, bool is_orderly, const std::string& its_reason) {
         e->OnLeave(process, is_orderly, its_reason);
       },
       [e] { e->OnTick(); }});
  return self;
}

// ---- A post

void Exchanges::Post(std::shared_ptr<const Job> job) {
  const Call& call = job->call;
  const int32_t rank = job->rank;
  Part part;
  part.signature = job->signature();
  part.arrays = job->arrays();
  part.job = job;
  Status announced = Begin(call, MemberOf(job->domain, rank), &part.op);
  if (announced.ok()) announced = Announce(part);
  if (!announced.ok()) return FailCall(call, announced);

  const Key key = {job->domain, call.site->id, call.run_id};
  ExchangePtr complete;
  Status added;
  {
    MutexLock lock(mutex_);
    added = Add(key, rank, std::move(part), &complete);
  }
  if (!added.ok()) return CompleteWithError(call, added);
  if (complete) Run(std::move(complete), call.executor, rank);
}

Status Exchanges::Announce(const Part& part) {
  const int32_t domain = part.job->domain;
  const std::vector<int32_t>& readers = readers_of_domain_[domain];
  if (readers.empty()) return Status();
  Segment* segment;
  EP_RETURN_IF_ERROR(
      peers_->Acquire(part.signature.staged_bytes(), readers, &segment));
  part.job->Stage(is_local_[domain], segment->memory.data());

  Message message = {};
  message.domain = domain;
  message.launch = part.op.launch;
  message.position = part.op.position;
  message.rank = part.job->rank;
  message.segment = segment->id;
  message.signature = part.signature;
  peers_->SendPost(readers, message, JoinNames(part.op.layer, part.op.program));
  return Status();
}

void Exchanges::OnPost(int32_t process, const Message& m,
                       const std::string& names, const Mapping* memory,
                       const Status& mapped) {
  Part part;
  part.op.op = static_cast<Op>(m.signature[Signature::kOp]);
  part.op.launch = m.launch;
  part.op.position = m.position;
  SplitNames(names, &part.op.layer, &part.op.program);
  part.process = process;
  part.segment = m.segment;
  part.signature = m.signature;
  const bool is_valid =
      m.domain >= 0 && m.domain < topology().num_domains() &&
      topology().has_local_rank(m.domain) && m.rank >= 0 &&
      m.rank < topology().ep_size &&
      topology().member(m.domain, m.rank).process == process && memory &&
      m.signature.FitsIn(memory->bytes());
  if (!is_valid) {
    const std::string me = topology().ProcessName(topology().process);
    const Status status = memory || mapped.ok()
                              ? InvalidPost(topology(), process)
                              : FailedOnRank(part.op.FullName(), me, mapped);
    return WithRunId(m.launch, [this, m, status](int64_t run_id) {
      FailRunEverywhere(m.launch.site_id, run_id, status);
    });
  }
  const std::byte* second = memory->data() + m.signature.second_offset();
  part.arrays = {memory->data(),
                 m.signature[Signature::kSecondBytes] > 0 ? second : nullptr,
                 /*is_shared=*/true};
  {
    MutexLock lock(mutex_);
    last_posts_[MemberOf(m.domain, m.rank)] = part.op;
  }
  AddPeers(m.domain, m.rank, std::move(part));
}

void Exchanges::AddPeers(int32_t domain, int32_t rank, Part part) {
  const Launch launch = part.op.launch;
  const int32_t process = part.process;
  const uint64_t segment = part.segment;
  ExchangePtr complete;
  Status added;
  {
    MutexLock lock(mutex_);
    const std::optional<int64_t> run_id = launches_.RunId(launch);
    if (!run_id) {
      return launches_.Defer(launch.site_id, [this, domain, rank, part] {
        AddPeers(domain, rank, part);
      });
    }
    added = Add({domain, launch.site_id, *run_id}, rank, std::move(part),
                &complete);
  }
  if (!added.ok()) return peers_->SendRelease(process, segment);
  if (!complete) return;
  // A worker runs the exchange and holds `self`, since the completed calls may
  // drop all other references. The progress thread must not drop the last one:
  // ~Exchanges joins the progress thread. If `self` is null, ~Exchanges waits
  // for the progress thread, which then runs the exchange.
  std::shared_ptr<Exchanges> self = weak_from_this().lock();
  if (!self) return Run(std::move(complete), /*executor=*/nullptr, kNoRank);
  workers_.Run([self = std::move(self), complete = std::move(complete)] {
    self->Run(complete, /*executor=*/nullptr, complete->FirstLocalRank());
  });
}

Status Exchanges::Add(const Key& key, int32_t rank, Part part,
                      ExchangePtr* complete) {
  EP_RETURN_IF_ERROR(pending_.Add(key, rank, std::move(part), complete));
  waiting_.erase(MemberOf(key.domain, rank));
  return Status();
}

// ---- A complete exchange

void Exchanges::Run(ExchangePtr exchange, Executor* executor, int32_t own) {
  const Status compared = Disagreement(topology(), *exchange);
  if (!compared.ok()) {
    FailRunEverywhere(exchange->key.site_id, exchange->key.run_id, compared);
    return Finish(exchange, compared, own);
  }
  const auto work = std::make_shared<Work>(std::move(exchange));
  // `self` keeps this object alive for the executor's threads. `self` is null
  // if the destructor waits for this thread; then there is no executor.
  const auto run = [this, self = weak_from_this().lock(), work](int32_t own) {
    if (!work->Run()) return;
    const Status status = work->status();
    if (!status.ok()) {
      const Key& key = work->exchange()->key;
      FailRunEverywhere(key.site_id, key.run_id, status);
    }
    Finish(work->exchange(), status, own);
  };
  const int64_t num_threads = executor ? executor->num_threads() : 1;
  for (int64_t i = 1; i < work->NumUsefulThreads(num_threads); ++i) {
    executor->Schedule([run] { run(kNoRank); });
  }
  run(own);
}

void Exchanges::Finish(const ExchangePtr& exchange, const Status& status,
                       int32_t own) {
  if (!status.ok() && exchange->FirstLocalRank() != kNoRank) {
    MutexLock lock(mutex_);
    is_error_reported_ = true;
  }
  // The worker takes the job from the exchange and destroys it: its `done` may
  // own this object, which the progress thread must not destroy.
  const auto complete = [exchange, status](size_t rank) {
    std::exchange(exchange->parts[rank].job, nullptr)->call.done(status);
  };
  for (size_t r = 0; r < exchange->parts.size(); ++r) {
    const Part& part = exchange->parts[r];
    if (part.process >= 0) peers_->SendRelease(part.process, part.segment);
    if (part.job && static_cast<int32_t>(r) != own) {
      workers_.Run([complete, r] { complete(r); });
    }
  }
  if (own != kNoRank) complete(own);
}

// ---- Names of launches

Status Exchanges::Begin(const Call& call, int32_t member, PostedOp* op) {
  const Site& site = *call.site;
  Status status;
  Launches::Actions due;
  {
    MutexLock lock(mutex_);
    *op = {call.op,         launches_.Name(site.id, call.run_id, &due),
           site.position,   site.layer.checked,
           site.layer.name, site.program};
    if (member != kNoRank) {
      launches_.Reach(op->launch);
      last_posts_[member] = *op;
    }
    status = pending_.closed();
  }
  for (const auto& act : due) act();
  return status;
}

void Exchanges::WithRunId(const Launch& launch,
                          std::function<void(int64_t)> act) {
  std::optional<int64_t> run_id;
  {
    MutexLock lock(mutex_);
    run_id = launches_.RunId(launch);
    if (!run_id) {
      launches_.Defer(launch.site_id,
                      [this, launch, act] { WithRunId(launch, act); });
    }
  }
  if (run_id) act(*run_id);
}

// ---- Failures

void Exchanges::FailCall(const Call& call, const Status& reason) {
  const int32_t index = topology().FindDevice(call.device);
  const std::string rank =
      index < 0 ? StrCat("device ", call.device) : topology().MemberName(index);
  PostedOp op;
  (void)Begin(call, kNoRank, &op);
  CompleteWithError(call, FailedOnRank(op.Name(), rank, reason));
}

void Exchanges::CompleteWithError(const Call& call, const Status& status) {
  FailRunEverywhere(call.site->id, call.run_id, status);
  {
    MutexLock lock(mutex_);
    is_error_reported_ = true;
  }
  call.done(status);
}

void Exchanges::FailRunEverywhere(uint64_t site_id, int64_t run_id,
                                  const Status& status) {
  Launch launch;
  Launches::Actions due;
  {
    MutexLock lock(mutex_);
    launch = launches_.Name(site_id, run_id, &due);
  }
  for (const auto& act : due) act();
  peers_->SendFail(launch, status);
  FailRunHere(run_id, status);
}

void Exchanges::FailRunHere(int64_t run_id, const Status& status,
                            bool is_of_other_group) {
  std::vector<ExchangePtr> failed;
  {
    MutexLock lock(mutex_);
    if (!pending_.FailRun(run_id, status, &failed)) return;
    if (waiting_.empty() && !is_of_other_group) {
      failure_ = status;
      exit_at_ = Now() + options_.exit_after_s;
      for (size_t i = 0; i < topology().members.size(); ++i) {
        if (topology().members[i].process == topology().process) {
          waiting_.insert(static_cast<int32_t>(i));
        }
      }
    }
  }
  if (topology().members.size() > 1 && !is_of_other_group) {
    // Ranks that have completed their calls may wait for the failed ranks in an
    // XLA collective, and would never raise this error.
    std::fprintf(stderr, "ep_ffi: %s\n", status.message().c_str());
  }
  if (options_.on_run_failed && !is_of_other_group) {
    // A worker calls `notify`, which may drop the last reference to a group.
    workers_.Run([notify = options_.on_run_failed, run_id, status] {
      notify(run_id, status);
    });
  }
  for (const ExchangePtr& e : failed) Finish(e, status);
}

void Exchanges::FailAll(const std::vector<ExchangePtr>& exchanges,
                        const Status& reason) {
  for (const ExchangePtr& e : exchanges) {
    const int32_t rank = e->FirstLocalRank();
    if (rank == kNoRank) {  // no call of this process waits
      Finish(e, reason);
      continue;
    }
    const Key& key = e->key;
    const Status status = FailedOnRank(
        e->OpName(), topology().RankName(key.domain, rank), reason);
    FailRunEverywhere(key.site_id, key.run_id, status);
    Finish(e, status);
  }
}

void Exchanges::OnLeave(int32_t process, bool is_orderly,
                        const std::string& its_reason) {
  Status reason = Left(topology(), process, is_orderly, options_.group_name);
  std::vector<ExchangePtr> failed;
  {
    MutexLock lock(mutex_);
    reason = pending_.Leave(process, is_orderly, reason, its_reason, &failed);
  }
  FailAll(failed, reason);
}

void Exchanges::OnTick() {
  std::vector<std::pair<Key, Status>> late;
  std::string warning;
  {
    MutexLock lock(mutex_);
    if (!waiting_.empty() && Now() > exit_at_ && pending_.closed().ok()) {
      const Status status = Stuck(topology(), failure_, options_.exit_after_s);
      std::fprintf(stderr, "ep_ffi: %s\n", status.message().c_str());
      std::_Exit(kExitCode);
    }
    const double now = Now();
    const double timeout_s = options_.timeout_s;
    for (const Exchange* e : pending_.FindBegunBy(now - timeout_s / 3)) {
      // Warn only in the process of the first rank that has posted.
      if (has_warned_ || !e->FirstPost().job) continue;
      has_warned_ = true;
      warning = Slow(topology(), *e, last_posts_, timeout_s);
    }
    for (const Exchange* e : pending_.FindBegunBy(now - timeout_s)) {
      late.emplace_back(e->key, Late(topology(), *e, last_posts_, timeout_s));
    }
  }
  if (!warning.empty()) {
    std::fprintf(stderr, "ep_ffi: %s\n", warning.c_str());
  }
  for (const auto& [key, status] : late) {
    FailRunEverywhere(key.site_id, key.run_id, status);
  }
}

Status Exchanges::Close() {
  const Status status = Closed(options_.group_name);
  Status missed;
  std::string reason;
  std::vector<ExchangePtr> failed;
  {
    MutexLock lock(mutex_);
    if (pending_.closed().ok() && !is_error_reported_) {
      missed = Missed(topology(), last_posts_, launches_);
    }
    failed = pending_.Close(status);
    reason = pending_.LeavingReason();
  }
  peers_->SendBye(reason);  // before the failures that the closing causes
  FailAll(failed, status);
  return missed;
}

}  // namespace ep::host
