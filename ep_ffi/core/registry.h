// SPDX-License-Identifier: Apache-2.0

// The live groups of this process, by name.
//
// XLA hands an FFI handler attributes and buffers, nothing else, so a
// compiled program can name its group only by a string that is the same on
// every rank. This table, which turns that name into a `Group` when a program
// is instantiated, is the only state of the process that the library keeps.

#ifndef EP_FFI_CORE_REGISTRY_H_
#define EP_FFI_CORE_REGISTRY_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/status.h"

namespace ep {

// One use of a group by one op of one executable.
struct Binding {
  std::shared_ptr<Group> group;
  int64_t clone;       // see Site::clone
  std::string config;  // see Registry::Add
};

class Registry {
 public:
  static Registry& Get();

  // Null if there is none of this name.
  std::shared_ptr<Group> Find(const std::string& name);
  // Fails if a live group has this name. `config` says what the programs of the
  // group rely on, its sizes above all. A program that was exported may come to
  // a group of the same name that has others.
  Status Add(const std::string& name, const std::string& config,
             std::shared_ptr<Group> group);
  // Removes and returns the group, null if there is none. Executables that
  // are bound to it keep it alive.
  std::shared_ptr<Group> Remove(const std::string& name);

  // Lets go of a group whose user has lost it. It is closed by its destructor,
  // when the executables that are bound to it have died.
  void Release(const std::string& name);
  // Closes the groups that were released and are still alive.
  void CloseReleased();

  void FailRun(int64_t run_id, const Status& status);  // in all groups

  // Binds the op at `position` of the program that is being instantiated.
  // Null group if there is none of this name.
  //
  // XLA inlines a function that a program calls twice, and both copies of an
  // op in it carry the same position. They are told apart by the order of
  // their instantiation, which follows the schedule of the program and is
  // therefore the same on every process.
  Binding Bind(const std::string& name, const std::string& program,
               int64_t position);

 private:
  struct Entry {
    std::shared_ptr<Group> group;
    std::string config;
    std::map<std::pair<std::string, int64_t>, int64_t> clones;
  };

  std::mutex mutex_;
  std::map<std::string, Entry> entries_;
  std::vector<std::weak_ptr<Group>> released_;
};

}  // namespace ep

#endif  // EP_FFI_CORE_REGISTRY_H_
