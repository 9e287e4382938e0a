// SPDX-License-Identifier: Apache-2.0

// Tells ThreadSanitizer what passes through XLA from one thread to another.
//
// XLA orders the functions that it calls, but it is not instrumented. TSan does
// not see its locks and queues, and would report a race on everything that
// passes through them. Without TSan these classes do nothing.

#ifndef EP_FFI_HANDLERS_HANDOVER_H_
#define EP_FFI_HANDLERS_HANDOVER_H_

#include <cstddef>

#ifdef __SANITIZE_THREAD__
extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);
extern "C" void AnnotateIgnoreWritesBegin(const char* file, int line);
extern "C" void AnnotateIgnoreWritesEnd(const char* file, int line);
#else
inline void __tsan_acquire(void*) {}
inline void __tsan_release(void*) {}
inline void AnnotateIgnoreWritesBegin(const char*, int) {}
inline void AnnotateIgnoreWritesEnd(const char*, int) {}
#endif

namespace ep {

// Everything before a call of `ToXla` happens before a later call of `FromXla`
// of the same object. Thread-safe.
class Handover {
 public:
  // The ops of a device: XLA starts an op when the ops that it depends on are
  // done. Only a backend orders ops of different devices.
  static Handover& OfDevice(size_t device) {
    static Handover devices[64];
    return devices[device % 64];
  }
  // The state of an op, from where it is made to where it is used.
  static Handover& OfNewStates() {
    static Handover states;
    return states;
  }
  // The state of an op, from where it is used to where it is destroyed.
  static Handover& OfUsedStates() {
    static Handover states;
    return states;
  }
  // Tasks for XLA's pool of threads.
  static Handover& OfTasks() {
    static Handover tasks;
    return tasks;
  }

  void ToXla() { __tsan_release(this); }
  void FromXla() { __tsan_acquire(this); }
};

// Hides from TSan what this thread writes while an object of this class exists:
// the writes of XLA's headers between our `ToXla` and XLA's queue.
class ScopedIgnoreWrites {
 public:
  ScopedIgnoreWrites() { AnnotateIgnoreWritesBegin(__FILE__, __LINE__); }
  ~ScopedIgnoreWrites() { AnnotateIgnoreWritesEnd(__FILE__, __LINE__); }
};

}  // namespace ep

#endif  // EP_FFI_HANDLERS_HANDOVER_H_
