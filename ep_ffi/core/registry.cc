// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/core/registry.h"

#include <algorithm>

namespace ep {

Registry& Registry::Get() {
  // Leaked: device threads may outlive static objects.
  static Registry* registry = new Registry();
  return *registry;
}

std::shared_ptr<Group> Registry::Find(const std::string& name) {
  MutexLock lock(mutex_);
  auto it = entries_.find(name);
  return it == entries_.end() ? nullptr : it->second.group;
}

Status Registry::Add(const std::string& name, const std::string& config,
                     std::shared_ptr<Group> group) {
  MutexLock lock(mutex_);
  if (entries_.try_emplace(name, Entry{std::move(group), config, {}}).second) {
    return Status();
  }
  return Status(Code::kFailedPrecondition,
                "a group of this name is live in this process");
}

std::shared_ptr<Group> Registry::Remove(const std::string& name) {
  MutexLock lock(mutex_);
  auto node = entries_.extract(name);
  return node.empty() ? nullptr : std::move(node.mapped().group);
}

void Registry::Release(const std::string& name) {
  const std::shared_ptr<Group> group = Remove(name);
  MutexLock lock(mutex_);
  released_.erase(
      std::remove_if(released_.begin(), released_.end(),
                     [](const auto& other) { return other.expired(); }),
      released_.end());
  released_.push_back(group);
}

void Registry::CloseReleased() {
  std::vector<std::weak_ptr<Group>> released;
  {
    MutexLock lock(mutex_);
    released.swap(released_);
  }
  for (const auto& entry : released) {
    if (const auto group = entry.lock()) (void)group->Close();
  }
}

void Registry::FailRun(int64_t run_id, const Status& status) {
  std::vector<std::shared_ptr<Group>> groups;
  {
    MutexLock lock(mutex_);
    for (const auto& [name, entry] : entries_) groups.push_back(entry.group);
    for (const auto& entry : released_) {
      if (auto group = entry.lock()) groups.push_back(std::move(group));
    }
  }
  for (const auto& group : groups) group->FailRun(run_id, status);
}

Binding Registry::Bind(const std::string& name, const std::string& program,
                       int64_t position) {
  MutexLock lock(mutex_);
  auto found = entries_.find(name);
  if (found == entries_.end()) return {nullptr, 0, ""};
  Entry& entry = found->second;
  return {entry.group, entry.clones[{program, position}]++, entry.config};
}

}  // namespace ep
