// SPDX-License-Identifier: Apache-2.0

// Mutexes with attributes for Clang's thread safety analysis, after
// https://clang.llvm.org/docs/ThreadSafetyAnalysis.html#mutex-h. A build with
// --config=clang fails where the code accesses a member without its mutex.
// Other compilers ignore the attributes.
//
// The analysis does not see into lambdas, so wait in a loop, not with a
// predicate:
//
//   MutexLock lock(mutex_);
//   while (tasks_.empty()) changed_.Wait(mutex_);

#ifndef EP_FFI_CORE_MUTEX_H_
#define EP_FFI_CORE_MUTEX_H_

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define EP_THREAD_ANNOTATION(x) __attribute__((x))
#else
#define EP_THREAD_ANNOTATION(x)
#endif

// Clang's documentation describes each attribute.
#define EP_GUARDED_BY(mutex) EP_THREAD_ANNOTATION(guarded_by(mutex))
#define EP_PT_GUARDED_BY(mutex) EP_THREAD_ANNOTATION(pt_guarded_by(mutex))
#define EP_REQUIRES(...) EP_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define EP_EXCLUDES(...) EP_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))
#define EP_ACQUIRE(...) EP_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define EP_RELEASE(...) EP_THREAD_ANNOTATION(release_capability(__VA_ARGS__))
#define EP_CAPABILITY(name) EP_THREAD_ANNOTATION(capability(name))
#define EP_SCOPED_CAPABILITY EP_THREAD_ANNOTATION(scoped_lockable)

namespace ep {

// A std::mutex with attributes for the thread safety analysis.
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

// Holds a mutex while the object lives. The owner may unlock and relock the
// mutex in between.
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

// A condition variable. The caller of a wait holds the mutex. The wait releases
// the mutex while it blocks, and may return without a notification.
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

  // Returns false if `time` has passed.
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
