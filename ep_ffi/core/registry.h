// SPDX-License-Identifier: Apache-2.0

// The live groups of this process, by name.
//
// XLA hands an FFI handler attributes and buffers, nothing else, so a
// compiled program can name its group only by a string that is the same on
// every rank. This table, which turns the name into a `Group` when a program is
// instantiated, is the only state that the library keeps for the process.

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

// One use of a group by one op of one executable.
struct Binding {
  std::shared_ptr<Group> group;
  int64_t clone;       // see Site::clone
  std::string config;  // see Registry::Add
};

// Thread-safe. Functions of a group are called without the lock, since they may
// come back here.
class Registry {
 public:
  static Registry& Get();

  // Returns null if there is none of this name.
  std::shared_ptr<Group> Find(const std::string& name);
  // Fails if a live group has this name. `config` is a text of what programs of
  // the group rely on, above all its sizes. An exported program may find a
  // group of the same name with other sizes.
  Status Add(const std::string& name, const std::string& config,
             std::shared_ptr<Group> group);
  // Removes and returns the group, null if there is none. Executables that
  // are bound to it keep it alive.
  std::shared_ptr<Group> Remove(const std::string& name);

  // Removes a group that its user has dropped without closing it. Its
  // destructor closes it, when the last executable that is bound to it is
  // destroyed.
  void Release(const std::string& name);
  // Closes the groups that were released and are still alive.
  void CloseReleased();

  void FailRun(int64_t run_id, const Status& status);  // in all groups

  // Binds the op at `position` of the program that is being instantiated. The
  // group is null if there is none of this name.
  //
  // XLA inlines a function that a program calls twice, and both copies of an
  // op in it have the same position. Their numbers tell them apart: the order
  // of their instantiation, which follows the schedule of the program and is
  // therefore the same in every process.
  Binding Bind(const std::string& name, const std::string& program,
               int64_t position);

 private:
  struct Entry {
    std::shared_ptr<Group> group;
    std::string config;
    // The next clone of each program and position.
    std::map<std::pair<std::string, int64_t>, int64_t> clones;
  };

  Mutex mutex_;
  // The live groups by name.
  std::map<std::string, Entry> entries_ EP_GUARDED_BY(mutex_);
  // The released groups; some may have been destroyed.
  std::vector<std::weak_ptr<Group>> released_ EP_GUARDED_BY(mutex_);
};

}  // namespace ep

#endif  // EP_FFI_CORE_REGISTRY_H_
