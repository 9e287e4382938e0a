// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/exchange.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <optional>
#include <thread>

#include "ep_ffi/backends/host/clock.h"
#include "ep_ffi/backends/host/denormals.h"

namespace ep::host {
namespace {

// Runs that failed are remembered for ranks that are still to post to them.
constexpr size_t kRememberedRuns = 256;

// Below this, to wake another thread takes longer than the work.
constexpr int64_t kBytesPerHelper = 32 << 10;

}  // namespace

// The work of a ready exchange, shared by the threads that help.
struct Exchanges::Batch {
  ExchangePtr exchange;
  std::vector<Table> tables;                           // by rank
  std::vector<std::pair<Part*, int64_t>> first_chunk;  // of each local rank
  int64_t num_chunks = 0;
  int64_t num_bytes = 0;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> unfinished{0};
  std::mutex mutex;
  Status status;  // the first failure

  explicit Batch(ExchangePtr e) : exchange(std::move(e)) {
    for (Part& part : exchange->parts) {
      tables.push_back(part.contribution.table);
      num_bytes += part.contribution.signature.staged_bytes();
      if (!part.done) continue;
      first_chunk.emplace_back(&part, num_chunks);
      num_chunks += part.contribution.num_chunks;
    }
    unfinished = num_chunks;
  }

  // Works until no chunk is left; true for the caller that ended the last.
  bool Help() {
    const ScopedFlushDenormals flush;
    bool last = num_chunks == 0;
    for (int64_t i; (i = next.fetch_add(1)) < num_chunks;) {
      auto owner = std::upper_bound(
          first_chunk.begin(), first_chunk.end(), i,
          [](int64_t chunk, const auto& p) { return chunk < p.second; });
      --owner;
      Status s = owner->first->contribution.run(tables, i - owner->second);
      if (!s.ok()) {
        std::lock_guard<std::mutex> lock(mutex);
        if (status.ok()) {
          status = Status(s.code(), StrCat(exchange->what, ": ", s.message()));
        }
      }
      last = unfinished.fetch_sub(1) == 1;
    }
    return last;
  }
};

Exchanges::Exchanges(Options options, std::unique_ptr<Peers> peers)
    : options_(std::move(options)),
      last_posts_(topology().members.size()),
      peers_(std::move(peers)) {
  for (int32_t d = 0; d < topology().num_domains(); ++d) {
    peers_of_domain_.push_back(topology().Peers(d));
  }
}

std::shared_ptr<Exchanges> Exchanges::Create(Options options,
                                             std::unique_ptr<Peers> peers) {
  std::shared_ptr<Exchanges> self(
      new Exchanges(std::move(options), std::move(peers)), [](Exchanges* e) {
        // The last reference may be dropped on the progress thread, which the
        // destructor joins.
        if (!e->peers_->IsProgressThread()) return delete e;
        std::thread([e] { delete e; }).detach();
      });
  // The progress thread ends before `self` is destroyed.
  Exchanges* e = self.get();
  e->peers_->Start(
      {[e](int32_t process, const Message& m, const std::string& what,
           const Mapping* memory, const Status& mapped) {
         e->OnPost(process, m, what, memory, mapped);
       },
       [e](const Message& m, const std::string& text) {
         const Status status(static_cast<Code>(m.code), text);
         e->WithRunId(m.launch, [e, status](int64_t run_id) {
           e->FailRun(run_id, status);
         });
       },
       [e](int32_t process, bool orderly, const std::string& why) {
         e->OnGone(process, orderly, why);
       },
       [e] { e->OnTick(); }});
  return self;
}

Exchanges::Names Exchanges::Describe(const Call& call,
                                     const Launch& launch) const {
  const Layer& layer = call.site->layer;
  // Not StrCat: a stream takes longer than all else that a post needs.
  const std::string op =
      std::string(OpName(call.op)) + "(layer \"" + layer.name + "\")";
  const std::string step = ", step " + std::to_string(launch.number);
  return {layer.checked ? op + step : op,
          op + step + " of \"" + call.site->program + "\", op " +
              std::to_string(call.site->position)};
}

void Exchanges::Post(const Call& call, int32_t domain, int32_t rank,
                     Contribution contribution) {
  const Site& site = *call.site;
  const Key key = {domain, site.id, call.run_id, site.position, site.clone};
  const Launch launch = NameLaunch(site.id, call.run_id);
  Names names = Describe(call, launch);
  Note(domain, rank, {launch, names.text});
  contribution.signature[Signature::kOp] = static_cast<int64_t>(call.op);
  Status announced = Announce(key, launch, names.text, rank, contribution);
  if (!announced.ok()) return Fail(call, std::move(announced));

  Part part;
  part.posted = true;
  part.text = std::move(names.text);
  part.contribution = std::move(contribution);
  part.done = call.done;
  ExchangePtr ready;
  Status added = Add(key, names.what, std::move(part), rank, &ready);
  if (!added.ok()) return Refuse(call, added);
  if (ready) Run(std::move(ready), call.executor, rank);
}

void Exchanges::Note(int32_t domain, int32_t rank, Posted posted) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (topology().is_local(domain, rank)) launches_.Reach(posted.launch);
  last_posts_[domain * topology().ep_size + rank] = std::move(posted);
}

Status Exchanges::Announce(const Key& key, const Launch& launch,
                           const std::string& text, int32_t rank,
                           const Contribution& c) {
  const std::vector<int32_t>& readers = peers_of_domain_[key.domain];
  if (readers.empty()) return Status();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!closed_.ok()) return closed_;  // nothing follows a bye
  }
  const size_t bytes = c.signature.staged_bytes();
  Segment* segment;
  EP_RETURN_IF_ERROR(peers_->Acquire(bytes, readers.size(), &segment));
  std::byte* base = segment->memory.data();
  c.stage(base, base + c.signature.second_offset());

  Message message = {};
  message.domain = key.domain;
  message.launch = launch;
  message.position = key.position;
  message.clone = key.clone;
  message.rank = rank;
  message.segment = segment->id;
  static_assert(sizeof(message.signature) >= sizeof(c.signature));
  std::memcpy(message.signature, &c.signature, sizeof(c.signature));
  peers_->SendPost(readers, message, text);
  return Status();
}

Status Exchanges::Add(const Key& key, const std::string& what, Part part,
                      int32_t rank, ExchangePtr* ready) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [run_id, status] : failed_runs_) {
    if (run_id == key.run_id) return status;
  }
  std::list<ExchangePtr>& queue = pending_[key];
  auto open = std::find_if(queue.begin(), queue.end(), [&](const auto& e) {
    return !e->parts[rank].posted;
  });
  Status why_not =
      WhyNot(open == queue.end() ? nullptr : open->get(), key.domain, rank);
  if (!why_not.ok()) {
    if (queue.empty()) pending_.erase(key);
    return Blame(what, key.domain, rank, why_not);
  }
  if (open == queue.end()) {
    auto exchange = std::make_shared<Exchange>();
    exchange->key = key;
    exchange->deadline = Now() + options_.timeout_s;
    exchange->missing = topology().ep_size;
    exchange->parts.resize(topology().ep_size);
    open = queue.insert(queue.end(), std::move(exchange));
  }
  if (part.done) (*open)->what = what;
  (*open)->parts[rank] = std::move(part);
  if (--(*open)->missing == 0) {
    *ready = std::move(*open);
    queue.erase(open);
    if (queue.empty()) pending_.erase(key);
  }
  return Status();
}

Status Exchanges::WhyNot(const Exchange* exchange, int32_t domain,
                         int32_t rank) const {
  if (!closed_.ok()) return closed_;
  // What a peer has posted can be completed without it, but nothing new can
  // be begun in a group that lost one.
  if (!exchange && !died_.ok()) return died_;
  for (int32_t r = 0; r < topology().ep_size; ++r) {
    if (r == rank || (exchange && exchange->parts[r].posted)) continue;
    auto found = gone_.find(topology().member(domain, r).process);
    if (found != gone_.end()) return died_.ok() ? found->second : died_;
  }
  return Status();
}

void Exchanges::Run(ExchangePtr exchange, Executor* executor, int32_t own) {
  Status compared = CompareSignatures(*exchange);
  if (!compared.ok()) {
    FailEverywhere(exchange->key.program, exchange->key.run_id, compared);
    return Finish(*exchange, compared, own);
  }
  auto batch = std::make_shared<Batch>(std::move(exchange));
  auto help = [self = shared_from_this(), batch](int32_t own) {
    if (!batch->Help()) return;
    if (!batch->status.ok()) {
      const Key& key = batch->exchange->key;
      self->FailEverywhere(key.program, key.run_id, batch->status);
    }
    self->Finish(*batch->exchange, batch->status, own);
  };
  const int64_t threads = executor ? executor->num_threads() : 1;
  const int64_t helpers = std::min({threads, batch->num_chunks,
                                    1 + batch->num_bytes / kBytesPerHelper}) -
                          1;
  for (int64_t i = 0; i < helpers; ++i) {
    executor->Schedule([help] { help(kNoRank); });
  }
  help(own);
}

void Exchanges::Finish(Exchange& exchange, const Status& status, int32_t own) {
  for (size_t r = 0; r < exchange.parts.size(); ++r) {
    Part& part = exchange.parts[r];
    if (part.done && !status.ok()) told_ = true;
    if (part.process >= 0) peers_->SendRelease(part.process, part.segment);
    // Moved: what `done` keeps alive, this object perhaps, must not die with
    // the exchange on the progress thread.
    if (part.done && static_cast<int32_t>(r) != own) {
      workers_.Run([done = std::move(part.done), status] { done(status); });
    }
  }
  if (own != kNoRank) std::exchange(exchange.parts[own].done, nullptr)(status);
}

Status Exchanges::CompareSignatures(const Exchange& exchange) const {
  const Part& zero = exchange.parts[0];
  for (int32_t r = 1; r < topology().ep_size; ++r) {
    const Part& other = exchange.parts[r];
    const auto field = zero.contribution.signature.FirstDifference(
        other.contribution.signature);
    if (!field) continue;
    const auto value_on = [&](int32_t rank, const Part& part) {
      return StrCat(part.contribution.signature.ValueOf(*field), " on ",
                    topology().RankName(exchange.key.domain, rank),
                    zero.text == other.text ? "" : " in " + part.text);
    };
    return Status(Code::kFailedPrecondition,
                  StrCat(exchange.what, ": the ranks disagree on ",
                         Signature::Name(*field), ": ", value_on(0, zero), ", ",
                         value_on(r, other),
                         "; every rank must run the same program on the same "
                         "layer and handle"));
  }
  return Status();
}

Status Exchanges::Blame(const std::string& what, int32_t domain, int32_t rank,
                        const Status& cause) const {
  return Status(cause.code(),
                StrCat(what, ", ", topology().RankName(domain, rank), ": ",
                       cause.message()));
}

template <typename Match>
std::vector<Exchanges::ExchangePtr> Exchanges::Take(Match match) {
  std::vector<ExchangePtr> taken;
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto entry = pending_.begin(); entry != pending_.end();) {
    entry->second.remove_if([&](const ExchangePtr& e) {
      if (!match(*e)) return false;
      taken.push_back(e);
      return true;
    });
    entry = entry->second.empty() ? pending_.erase(entry) : ++entry;
  }
  return taken;
}

template <typename Match>
void Exchanges::Break(const Status& cause, Match match) {
  for (const ExchangePtr& e : Take(match)) {
    const Key& key = e->key;
    int32_t rank = 0;  // the first local one speaks for all
    while (rank < topology().ep_size && !e->parts[rank].done) ++rank;
    if (rank == topology().ep_size) {
      Finish(*e, cause);  // nobody here waits
      continue;
    }
    const Status status = Blame(e->what, key.domain, rank, cause);
    FailEverywhere(key.program, key.run_id, status);
    Finish(*e, status);
  }
}

void Exchanges::FailRun(int64_t run_id, const Status& status) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& failed : failed_runs_) {
      if (failed.first == run_id) return;
    }
    failed_runs_.emplace_back(run_id, status);
    if (status.code() == Code::kUnavailable) lost_ = status;
    if (failed_runs_.size() > kRememberedRuns) failed_runs_.pop_front();
  }
  if (topology().num_domains() > 1) {
    // Ranks of a domain that has done its part may wait for those that fail
    // in a collective of XLA, which ends the process before it raises this.
    std::fprintf(stderr, "ep_ffi: %s\n", status.message().c_str());
  }
  if (options_.on_run_failed) {
    // Not here: it may drop the last reference to another group, or to this.
    workers_.Run([tell = options_.on_run_failed, run_id, status] {
      tell(run_id, status);
    });
  }
  for (const ExchangePtr& e :
       Take([&](const Exchange& e) { return e.key.run_id == run_id; })) {
    Finish(*e, status);
  }
}

void Exchanges::FailEverywhere(uint64_t program, int64_t run_id,
                               const Status& status) {
  peers_->SendFail(NameLaunch(program, run_id), status);
  FailRun(run_id, status);
}

void Exchanges::WithRunId(const Launch& launch,
                          std::function<void(int64_t)> act) {
  std::optional<int64_t> run_id;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    run_id = launches_.RunId(launch);
    if (!run_id) {
      early_[launch.program].push_back(
          [this, launch, act] { WithRunId(launch, act); });
    }
  }
  if (run_id) act(*run_id);
}

Launch Exchanges::NameLaunch(uint64_t program, int64_t run_id) {
  std::vector<std::function<void()>> early;
  Launch launch;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    launch = launches_.Name(program, run_id);
    auto node = early_.extract(program);
    if (!node.empty()) early = std::move(node.mapped());
  }
  for (const auto& act : early) act();
  return launch;
}

void Exchanges::Fail(const Call& call, Status status) {
  const int32_t index = topology().FindDevice(call.device);
  const std::string rank =
      index < 0 ? StrCat("device ", call.device)
                : topology().RankName(index / topology().ep_size,
                                      index % topology().ep_size);
  const Launch launch = NameLaunch(call.site->id, call.run_id);
  status = Status(status.code(), StrCat(Describe(call, launch).what, ", ", rank,
                                        ": ", status.message()));
  Refuse(call, status);
}

void Exchanges::Refuse(const Call& call, const Status& status) {
  FailEverywhere(call.site->id, call.run_id, status);
  told_ = true;
  call.done(status);
}

void Exchanges::OnPost(int32_t process, const Message& m,
                       const std::string& text, const Mapping* memory,
                       const Status& mapped) {
  Part part;
  part.posted = true;
  part.text = text;
  part.process = process;
  part.segment = m.segment;
  Signature& signature = part.contribution.signature;
  std::memcpy(&signature, m.signature, sizeof(signature));
  const bool sane = m.domain >= 0 && m.domain < topology().num_domains() &&
                    topology().FindLocal(m.domain) >= 0 && m.rank >= 0 &&
                    m.rank < topology().ep_size &&
                    topology().member(m.domain, m.rank).process == process &&
                    memory && signature[Signature::kFirstBytes] >= 0 &&
                    signature[Signature::kSecondBytes] >= 0 &&
                    signature[Signature::kFirstBytes] <=
                        static_cast<int64_t>(memory->bytes()) &&
                    signature[Signature::kSecondBytes] <=
                        static_cast<int64_t>(memory->bytes()) &&
                    signature.staged_bytes() <= memory->bytes();
  if (!sane) {
    const int32_t me = topology().process_id(topology().process);
    const Status status =
        memory || mapped.ok()
            ? Status(Code::kInternal,
                     StrCat("process ", topology().process_id(process),
                            " sent a post that makes no sense"))
            : Status(mapped.code(),
                     StrCat(text, ", process ", me, ": ", mapped.message()));
    return WithRunId(m.launch, [this, m, status](int64_t run_id) {
      FailEverywhere(m.launch.program, run_id, status);
    });
  }
  part.contribution.table = {memory->data(),
                             memory->data() + signature.second_offset()};
  Note(m.domain, m.rank, {m.launch, text});
  WithRunId(m.launch, [this, m, part](int64_t run_id) {
    // Once the exchange is ready, another thread may close the group and drop
    // the last reference to this object. Null if that has happened already.
    const std::shared_ptr<Exchanges> self = weak_from_this().lock();
    if (!self) return;
    const Key key = {m.domain, m.launch.program, run_id, m.position, m.clone};
    ExchangePtr ready;
    if (!Add(key, part.text, part, m.rank, &ready).ok()) {
      peers_->SendRelease(part.process, part.segment);
    } else if (ready) {
      workers_.Run([self, ready = std::move(ready)] {
        self->Run(ready, nullptr,
                  self->topology().FindLocal(ready->key.domain));
      });
    }
  });
}

void Exchanges::OnGone(int32_t process, bool orderly, const std::string& why) {
  auto waits = [&](const Exchange& e) {
    for (int32_t r = 0; r < topology().ep_size; ++r) {
      if (!e.parts[r].posted &&
          topology().member(e.key.domain, r).process == process) {
        return true;
      }
    }
    return false;
  };
  std::string ranks;
  for (size_t i = 0; i < topology().members.size(); ++i) {
    if (topology().members[i].process != process) continue;
    ranks += StrCat(
        ranks.empty() ? "" : ", ",
        topology().RankName(i / topology().ep_size, i % topology().ep_size));
  }
  Status status(
      Code::kUnavailable,
      orderly ? StrCat(ranks, " finalized the group \"", options_.group_name,
                       "\", or its program ended; finalize it only after the "
                       "last op has completed on all ranks")
              : StrCat(ranks,
                       " died; restart the job, or bootstrap a new "
                       "group without it"));
  {
    std::lock_guard<std::mutex> lock(mutex_);
    gone_.emplace(process, status);
    if (died_.ok() && !orderly) died_ = status;
    // It may be the first to tell that another died.
    if (died_.ok() && !why.empty()) died_ = Status(Code::kUnavailable, why);
    if (!died_.ok()) status = died_;  // what came later may follow from it
  }
  Break(status, waits);
}

void Exchanges::OnTick() {
  const double now = Now();
  std::vector<std::pair<Key, Status>> late;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [key, queue] : pending_) {
      for (const ExchangePtr& e : queue) {
        if (e->deadline <= now) late.emplace_back(key, Late(*e));
      }
    }
  }
  for (const auto& [key, status] : late) {
    FailEverywhere(key.program, key.run_id, status);
  }
}

Status Exchanges::Late(const Exchange& exchange) const {
  const int32_t domain = exchange.key.domain;
  const std::string& text =
      std::find_if(exchange.parts.begin(), exchange.parts.end(),
                   [](const Part& part) { return part.posted; })
          ->text;
  std::string waiting, missing;
  bool same_op = false;
  for (int32_t r = 0; r < topology().ep_size; ++r) {
    const bool posted = exchange.parts[r].posted;
    std::string& list = posted ? waiting : missing;
    list += StrCat(list.empty() ? "" : ", ", topology().RankName(domain, r));
    if (posted) continue;
    const std::string& last = last_posts_[domain * topology().ep_size + r].text;
    list += last.empty() ? " that has run no op yet"
                         : StrCat(" whose last op was ", last);
    same_op |= last == text;
  }
  return Status(
      Code::kDeadlineExceeded,
      StrCat(text, ": ", waiting, " waited timeout_s = ", options_.timeout_s,
             " s for ", missing,
             same_op ? ", the same op: in another iteration of a loop, or in "
                       "another copy, if processes have compiled the program "
                       "unequally often or with other options "
                       "(jitted.lower(...).compile()); compile it alike on all"
                     : "",
             "; every rank must run the same program, equally often. If ranks "
             "are only slow, raise timeout_s; if many launches are in flight, "
             "wait for results now and then (jax.block_until_ready)"));
}

Status Exchanges::Missed() const {
  for (size_t i = 0; i < last_posts_.size(); ++i) {
    const auto& [launch, text] = last_posts_[i];
    if (text.empty() || launches_.HasReached(launch)) continue;
    const int32_t ep_size = topology().ep_size;
    return Status(
        Code::kFailedPrecondition,
        StrCat(topology().RankName(i / ep_size, i % ep_size), " ran ", text,
               ", which process ", topology().process_id(topology().process),
               " has not run; every rank must run the same program, "
               "equally often"));
  }
  return Status();
}

Status Exchanges::Close() {
  const Status status(Code::kFailedPrecondition,
                      StrCat("the group \"", options_.group_name,
                             "\" was finalized; run no op after "
                             "ep_finalize"));
  Status missed;
  std::string why;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_.ok() && !told_) missed = Missed();
    closed_ = status;
    why = died_.ok() ? lost_.message() : died_.message();
  }
  peers_->SendBye(why);  // before what is broken, which follows from it
  Break(status, [](const Exchange&) { return true; });
  return missed;
}

}  // namespace ep::host
