// SPDX-License-Identifier: Apache-2.0

// std::mutex and std::condition_variable, with the attributes of
// thread_annotations.h, which the standard library does not give them.
//
// The analysis sees through a loop and not into a lambda. So one waits in a
// loop rather than with a predicate:
//
//   MutexLock lock(mutex_);
//   while (tasks_.empty()) changed_.Wait(mutex_);

#ifndef EP_FFI_CORE_MUTEX_H_
#define EP_FFI_CORE_MUTEX_H_

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "ep_ffi/core/thread_annotations.h"

namespace ep {

class EP_CAPABILITY("mutex") Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void Lock() EP_ACQUIRE() { mutex_.lock(); }
  void Unlock() EP_RELEASE() { mutex_.unlock(); }

 private:
  friend class CondVar;

  std::mutex mutex_;
};

// Holds a mutex for as long as this object lives. In between, the owner may
// unlock the mutex and lock it again.
class EP_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) EP_ACQUIRE(mutex) : mutex_(mutex) {
    mutex_.Lock();
  }
  ~MutexLock() EP_RELEASE() { mutex_.Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

// The caller of a wait holds the mutex before and after, not meanwhile. A wait
// may end without a notification.
class CondVar {
 public:
  CondVar() = default;
  CondVar(const CondVar&) = delete;
  CondVar& operator=(const CondVar&) = delete;

  void Wait(Mutex& mutex) EP_REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    changed_.wait(lock);
    lock.release();
  }

  // Returns false once the time has come.
  bool WaitUntil(Mutex& mutex, std::chrono::steady_clock::time_point time)
      EP_REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    const std::cv_status status = changed_.wait_until(lock, time);
    lock.release();
    return status == std::cv_status::no_timeout;
  }

  void NotifyOne() { changed_.notify_one(); }
  void NotifyAll() { changed_.notify_all(); }

 private:
  std::condition_variable changed_;
};

}  // namespace ep

#endif  // EP_FFI_CORE_MUTEX_H_
