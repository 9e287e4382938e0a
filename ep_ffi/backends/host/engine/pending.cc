// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/engine/pending.h"

#include <algorithm>
#include <cstddef>

#include "ep_ffi/core/clock.h"

namespace ep::host {

int32_t Exchange::FirstLocalRank() const {
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    if (parts[rank].done) return static_cast<int32_t>(rank);
  }
  return kNoRank;
}

std::string Exchange::OpName() const {
  const int32_t rank = FirstLocalRank();
  return rank == kNoRank ? "" : parts[rank].op.Name();
}

const Part& Exchange::FirstPost() const {
  return *std::find_if(parts.begin(), parts.end(),
                       [](const Part& part) { return part.is_posted; });
}

Pending::Entries::const_iterator Pending::FindEntry(const Key& key,
                                                    int32_t rank) const {
  auto [entry, end] = exchanges_.equal_range(key);
  while (entry != end && entry->second->parts[rank].is_posted) ++entry;
  return entry == end ? exchanges_.end() : entry;
}

const Exchange* Pending::Find(const Key& key, int32_t rank) const {
  const auto found = FindEntry(key, rank);
  return found == exchanges_.end() ? nullptr : found->second.get();
}

std::vector<const Exchange*> Pending::FindBegunBy(double time) const {
  std::vector<const Exchange*> found;
  for (const auto& [key, exchange] : exchanges_) {
    if (exchange->began_at <= time) found.push_back(exchange.get());
  }
  return found;
}

ExchangePtr Pending::Add(const Key& key, int32_t rank, Part part) {
  auto entry = FindEntry(key, rank);
  if (entry == exchanges_.end()) {
    auto exchange = std::make_shared<Exchange>();
    exchange->key = key;
    exchange->began_at = Now();
    exchange->num_missing = ep_size_;
    exchange->parts.resize(ep_size_);
    entry = exchanges_.emplace(key, std::move(exchange));
  }
  Exchange& exchange = *entry->second;
  exchange.parts[rank] = std::move(part);
  if (--exchange.num_missing > 0) return nullptr;
  ExchangePtr complete = entry->second;
  exchanges_.erase(entry);
  return complete;
}

}  // namespace ep::host
