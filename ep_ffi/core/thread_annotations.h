// SPDX-License-Identifier: Apache-2.0

// Names for the attributes that Clang's thread safety analysis reads. They say
// which lock guards which member, and which lock a function needs; the test
// //ep_ffi/thread_safety:cpu_test fails where the code does not keep to them.
// They are empty for a compiler without the analysis. The locks of mutex.h
// carry them already; those of the standard library do not.
//
//   class Counter {
//    public:
//     void Increment() {
//       MutexLock lock(mutex_);
//       Add(1);
//     }
//
//    private:
//     void Add(int n) EP_REQUIRES(mutex_) { count_ += n; }
//
//     Mutex mutex_;
//     int count_ EP_GUARDED_BY(mutex_) = 0;
//   };

#ifndef EP_FFI_CORE_THREAD_ANNOTATIONS_H_
#define EP_FFI_CORE_THREAD_ANNOTATIONS_H_

#if defined(__clang__)
#define EP_THREAD_ANNOTATION(x) __attribute__((x))
#else
#define EP_THREAD_ANNOTATION(x)
#endif

// Declares a member that is read and written only under the lock.
#define EP_GUARDED_BY(mutex) EP_THREAD_ANNOTATION(guarded_by(mutex))

// Declares a pointer whose target is read and written only under the lock.
#define EP_PT_GUARDED_BY(mutex) EP_THREAD_ANNOTATION(pt_guarded_by(mutex))

// Declares a function whose caller holds the lock.
#define EP_REQUIRES(...) EP_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))

// Declares a function whose caller does not hold the lock, because the function
// takes it, or may run code that does.
#define EP_EXCLUDES(...) EP_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))

// Declares a function that takes the lock and returns with it.
#define EP_ACQUIRE(...) EP_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))

// Declares a function that releases the lock.
#define EP_RELEASE(...) EP_THREAD_ANNOTATION(release_capability(__VA_ARGS__))

// Declares a class whose objects are locks.
#define EP_CAPABILITY(name) EP_THREAD_ANNOTATION(capability(name))

// Declares a class that takes a lock in its constructor and releases it in its
// destructor.
#define EP_SCOPED_CAPABILITY EP_THREAD_ANNOTATION(scoped_lockable)

#endif  // EP_FFI_CORE_THREAD_ANNOTATIONS_H_
