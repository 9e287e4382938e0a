// SPDX-License-Identifier: Apache-2.0

// What passes through XLA from one thread to another, told to ThreadSanitizer.
//
// XLA orders what it calls, but it is not instrumented: TSan sees none of its
// locks and queues, and would call everything that passes through them a race.
// Without TSan this is nothing.

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

// All that happened before a `ToXla` happens before a later `FromXla` of the
// same handover.
class Handover {
 public:
  // Of the ops on a device: XLA starts one when those that it depends on are
  // done. Ops of different devices are ordered by us alone.
  static Handover& OfDevice(size_t device) {
    static Handover devices[64];
    return devices[device % 64];
  }
  // Of an op's state: from where it is made to where it is used, ...
  static Handover& OfNewStates() {
    static Handover states;
    return states;
  }
  // ... and from there to where it is destroyed.
  static Handover& OfUsedStates() {
    static Handover states;
    return states;
  }
  // Of tasks for XLA's pool of threads.
  static Handover& OfTasks() {
    static Handover tasks;
    return tasks;
  }

  void ToXla() { __tsan_release(this); }
  void FromXla() { __tsan_acquire(this); }
};

// While one lives, TSan does not see what this thread writes: what XLA's own
// headers do here, between our `ToXla` and what it hands over.
class Unseen {
 public:
  Unseen() { AnnotateIgnoreWritesBegin(__FILE__, __LINE__); }
  ~Unseen() { AnnotateIgnoreWritesEnd(__FILE__, __LINE__); }
};

}  // namespace ep

#endif  // EP_FFI_HANDLERS_HANDOVER_H_
