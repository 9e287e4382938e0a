// SPDX-License-Identifier: Apache-2.0

// What the parts of the fake record: violations, and objects that live.

#ifndef EP_FFI_BACKENDS_NCCL_FAKE_LEDGER_H_
#define EP_FFI_BACKENDS_NCCL_FAKE_LEDGER_H_

#include <cstddef>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ep_ffi/core/status.h"

namespace ep::nccl::fake {

void RecordViolation(const std::string& sentence);

// The demands that a function has on its caller.
class Contract {
 public:
  explicit Contract(std::string function) : function_(std::move(function)) {}

  template <typename... Parts>
  bool Demand(bool met, const Parts&... parts) {
    if (!met) {
      kept_ = false;
      RecordViolation(StrCat(function_, ": ", parts...));
    }
    return met;
  }
  // Inside a handler, nothing may wait or allocate.
  void DemandNoHandler();

  const std::string& function() const { return function_; }
  bool kept() const { return kept_; }

 private:
  const std::string function_;
  bool kept_ = true;
};

// Whether this thread is inside a handler and if so, whether its routing holds
// these bytes.
bool IsInHandler();
bool HandlerMemHolds(const void* begin, size_t bytes);

// The objects of a type that live.
template <typename T>
class Living {
 public:
  static Living& Get() {
    static Living* living = new Living();  // outlives what is static
    return *living;
  }

  T* Add(T* object) {
    std::lock_guard<std::mutex> lock(mutex_);
    objects_.insert(object);
    return object;
  }
  bool Remove(const T* object) {
    std::lock_guard<std::mutex> lock(mutex_);
    return objects_.erase(const_cast<T*>(object)) > 0;
  }
  bool Has(const T* object) {
    std::lock_guard<std::mutex> lock(mutex_);
    return objects_.count(const_cast<T*>(object)) > 0;
  }
  std::vector<T*> All() {
    std::lock_guard<std::mutex> lock(mutex_);
    return {objects_.begin(), objects_.end()};
  }
  size_t size() {
    std::lock_guard<std::mutex> lock(mutex_);
    return objects_.size();
  }

 private:
  std::mutex mutex_;
  std::set<T*> objects_;
};

}  // namespace ep::nccl::fake

#endif  // EP_FFI_BACKENDS_NCCL_FAKE_LEDGER_H_
