// SPDX-License-Identifier: Apache-2.0

#ifndef EP_FFI_BACKENDS_NCCL_FAKE_CHECKS_H_
#define EP_FFI_BACKENDS_NCCL_FAKE_CHECKS_H_

#include <cstddef>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ep_ffi/core/mutex.h"
#include "ep_ffi/core/status.h"

namespace ep::nccl::fake {

void RecordViolation(const std::string& sentence);

// A check that one call of a function meets the contract of the real library.
// Records each unmet requirement as a violation.
class Contract {
 public:
  explicit Contract(std::string function) : function_(std::move(function)) {}

  template <typename... Parts>
  bool Require(bool met, const Parts&... parts) {
    if (!met) {
      kept_ = false;
      RecordViolation(StrCat(function_, ": ", parts...));
    }
    return met;
  }
  // Requires that this thread is not inside an FFI handler, because the
  // function waits or allocates.
  void RequireNoHandler();

  const std::string& function() const { return function_; }
  // Returns whether all requirements so far were met.
  bool kept() const { return kept_; }

 private:
  const std::string function_;
  bool kept_ = true;
};

bool IsInHandler();
// Returns whether these bytes are in the handler's EpHandle.mem.
bool HandlerMemHolds(const void* begin, size_t bytes);

// All existing objects of one type.
//
// Thread-safe.
template <typename T>
class LiveObjects {
 public:
  static LiveObjects& Get() {
    // Leaked, because threads may outlive the destructors of static objects.
    static LiveObjects* objects = new LiveObjects();
    return *objects;
  }

  T* Add(T* object) {
    MutexLock lock(mutex_);
    objects_.insert(object);
    return object;
  }
  bool Remove(const T* object) {
    MutexLock lock(mutex_);
    return objects_.erase(const_cast<T*>(object)) > 0;
  }
  bool Has(const T* object) {
    MutexLock lock(mutex_);
    return objects_.count(const_cast<T*>(object)) > 0;
  }
  std::vector<T*> All() {
    MutexLock lock(mutex_);
    return {objects_.begin(), objects_.end()};
  }
  size_t size() {
    MutexLock lock(mutex_);
    return objects_.size();
  }

 private:
  Mutex mutex_;
  std::set<T*> objects_ EP_GUARDED_BY(mutex_);
};

}  // namespace ep::nccl::fake

#endif  // EP_FFI_BACKENDS_NCCL_FAKE_CHECKS_H_
