// SPDX-License-Identifier: Apache-2.0

// The live groups of this process, by name.
//
// XLA gives an FFI handler attributes and buffers only, so a compiled program
// names its group by a string, which is the same on every rank. The registry
// finds the `Group` when XLA instantiates the program.

#ifndef EP_FFI_CORE_REGISTRY_H_
#define EP_FFI_CORE_REGISTRY_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/mutex.h"
#include "ep_ffi/core/status.h"

namespace ep {

// The use of a group by an op of an executable.
struct Binding {
  std::shared_ptr<Group> group;
  int64_t clone;       // see Site::clone
  std::string config;  // see Registry::Add
};

// Thread-safe. The registry calls a group without holding its lock, since the
// group may call the registry.
class Registry {
 public:
  static Registry& Get();

  // Returns the group of this name, or null.
  std::shared_ptr<Group> Find(const std::string& name);
  // Fails if a live group has this name. `config` describes the group, mainly
  // its sizes, since an exported program may find another group of the same
  // name.
  Status Add(const std::string& name, const std::string& config,
             std::shared_ptr<Group> group);
  // Removes and returns the group of this name, or null. Bound executables keep
  // the group alive.
  std::shared_ptr<Group> Remove(const std::string& name);

  // Removes a group that the user dropped without closing the group. The group
  // closes when the last bound executable is destroyed.
  void Release(const std::string& name);
  void CloseReleased();

  void FailRun(int64_t run_id, const Status& status);  // in all groups

  // Binds the op at `position` of the program that XLA instantiates. The group
  // is null if no live group has this name.
  //
  // If a program calls a function twice, XLA inlines the function twice, and
  // both copies of an op have the same position. `clone` numbers the copies in
  // the order in which XLA instantiates them. This order follows XLA's schedule
  // and is the same in every process.
  Binding Bind(const std::string& name, const std::string& program,
               int64_t position);

 private:
  struct Entry {
    std::shared_ptr<Group> group;
    std::string config;
    // The next clone index, by program and position.
    std::map<std::pair<std::string, int64_t>, int64_t> clones;
  };

  Mutex mutex_;
  std::map<std::string, Entry> entries_ EP_GUARDED_BY(mutex_);
  // Some released groups may be destroyed already.
  std::vector<std::weak_ptr<Group>> released_ EP_GUARDED_BY(mutex_);
};

}  // namespace ep

#endif  // EP_FFI_CORE_REGISTRY_H_
