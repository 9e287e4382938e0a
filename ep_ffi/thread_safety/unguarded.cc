// SPDX-License-Identifier: Apache-2.0

// This class reads a member without its lock, which
// //ep_ffi/thread_safety:failure_test expects the analysis to find.

#include "ep_ffi/core/mutex.h"
#include "ep_ffi/core/thread_annotations.h"

namespace ep {

class Unguarded {
 public:
  void Increment() {
    MutexLock lock(mutex_);
    ++count_;
  }
  int count() const { return count_; }

 private:
  Mutex mutex_;
  int count_ EP_GUARDED_BY(mutex_) = 0;
};

int CountOnce() {
  Unguarded unguarded;
  unguarded.Increment();
  return unguarded.count();
}

}  // namespace ep
