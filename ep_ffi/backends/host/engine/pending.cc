// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/engine/pending.h"

#include <algorithm>
#include <cstddef>

#include "ep_ffi/backends/host/engine/report.h"
#include "ep_ffi/core/clock.h"

namespace ep::host {
namespace {

constexpr size_t kRememberedRuns = 256;

}  // namespace

Status Pending::Add(const Key& key, int32_t rank, Part part,
                    ExchangePtr* complete) {
  EP_RETURN_IF_ERROR(OfRun(key.run_id));
  auto [entry, end] = exchanges_.equal_range(key);
  while (entry != end && entry->second->parts[rank].is_posted) ++entry;
  const Status why_not = WhyNotComplete(
      entry == end ? nullptr : entry->second.get(), key.domain, rank);
  if (!why_not.ok()) {
    return FailedOnRank(part.op.Name(), topology_.RankName(key.domain, rank),
                        why_not);
  }
  if (entry == end) {
    auto exchange = std::make_shared<Exchange>();
    exchange->key = key;
    exchange->began_at = Now();
    exchange->num_missing = topology_.ep_size;
    exchange->parts.resize(topology_.ep_size);
    entry = exchanges_.emplace(key, std::move(exchange));
  }
  Exchange& exchange = *entry->second;
  exchange.parts[rank] = std::move(part);
  exchange.parts[rank].is_posted = true;
  if (--exchange.num_missing > 0) return Status();
  *complete = entry->second;
  exchanges_.erase(entry);
  return Status();
}

Status Pending::WhyNotComplete(const Exchange* exchange, int32_t domain,
                               int32_t rank) const {
  EP_RETURN_IF_ERROR(closed_);
  // After the death of a process, an exchange with a post of the process can
  // still complete, but no new exchange can begin.
  if (!exchange) EP_RETURN_IF_ERROR(first_death_);
  for (int32_t r = 0; r < topology_.ep_size; ++r) {
    if (r == rank || (exchange && exchange->parts[r].is_posted)) continue;
    EP_RETURN_IF_ERROR(OfProcess(topology_.member(domain, r).process));
  }
  return Status();
}

Status Pending::OfRun(int64_t run_id) const {
  for (const auto& [failed, status] : failed_runs_) {
    if (failed == run_id) return status;
  }
  return Status();
}

Status Pending::OfProcess(int32_t process) const {
  const auto found = left_.find(process);
  if (found == left_.end()) return Status();
  return first_death_.ok() ? found->second : first_death_;
}

std::vector<const Exchange*> Pending::FindBegunBy(double time) const {
  std::vector<const Exchange*> found;
  for (const auto& [key, exchange] : exchanges_) {
    if (exchange->began_at <= time) found.push_back(exchange.get());
  }
  return found;
}

template <typename Match>
std::vector<ExchangePtr> Pending::Take(Match match) {
  std::vector<ExchangePtr> taken;
  for (auto entry = exchanges_.begin(); entry != exchanges_.end();) {
    if (!match(std::as_const(*entry->second))) {
      ++entry;
      continue;
    }
    taken.push_back(std::move(entry->second));
    entry = exchanges_.erase(entry);
  }
  return taken;
}

bool Pending::FailRun(int64_t run_id, const Status& status,
                      std::vector<ExchangePtr>* failed) {
  if (!OfRun(run_id).ok()) return false;
  failed_runs_.emplace_back(run_id, status);
  if (failed_runs_.size() > kRememberedRuns) failed_runs_.pop_front();
  if (status.code() == Code::kUnavailable) last_unavailable_ = status;
  *failed = Take([&](const Exchange& e) { return e.key.run_id == run_id; });
  return true;
}

Status Pending::Leave(int32_t process, bool is_orderly, const Status& status,
                      const std::string& its_reason,
                      std::vector<ExchangePtr>* failed) {
  left_.emplace(process, status);
  if (first_death_.ok() && !is_orderly) first_death_ = status;
  if (first_death_.ok() && !its_reason.empty()) {
    first_death_ = Status(Code::kUnavailable, its_reason);
  }
  *failed = Take([&](const Exchange& e) {
    for (int32_t r = 0; r < topology_.ep_size; ++r) {
      if (!e.parts[r].is_posted &&
          topology_.member(e.key.domain, r).process == process) {
        return true;
      }
    }
    return false;
  });
  return OfProcess(process);
}

std::vector<ExchangePtr> Pending::Close(const Status& status) {
  closed_ = status;
  return Take([](const Exchange&) { return true; });
}

}  // namespace ep::host
