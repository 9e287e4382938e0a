// SPDX-License-Identifier: Apache-2.0

// Tells ThreadSanitizer (TSan) in which order XLA calls our functions.
//
// XLA is not instrumented. TSan does not see the locks and queues of XLA, and
// would report a race on all data that passes through them. Without TSan these
// classes do nothing.

#ifndef EP_FFI_HANDLERS_TSAN_H_
#define EP_FFI_HANDLERS_TSAN_H_

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

// A happens-before edge through XLA: code before a call of `Release` happens
// before code after a later call of `Acquire` on the same object. Thread-safe.
class TsanEdge {
 public:
  // The edge between ops of a device: XLA starts an op after the ops on which
  // it depends. Only a backend orders ops of different devices.
  static TsanEdge& DeviceOps(size_t device) {
    static TsanEdge devices[64];
    return devices[device % 64];
  }
  // The edge from the creation of an op's state to its first use.
  static TsanEdge& NewStates() {
    static TsanEdge states;
    return states;
  }
  // The edge from the last use of an op's state to its destruction.
  static TsanEdge& UsedStates() {
    static TsanEdge states;
    return states;
  }
  // The edge from scheduling a task on XLA's thread pool to running it.
  static TsanEdge& PoolTasks() {
    static TsanEdge tasks;
    return tasks;
  }

  void Release() { __tsan_release(this); }
  void Acquire() { __tsan_acquire(this); }
};

// A scope that hides this thread's writes from TSan: XLA's headers write
// between our `Release` and XLA's queue.
class ScopedIgnoreWrites {
 public:
  ScopedIgnoreWrites() { AnnotateIgnoreWritesBegin(__FILE__, __LINE__); }
  ~ScopedIgnoreWrites() { AnnotateIgnoreWritesEnd(__FILE__, __LINE__); }
};

}  // namespace ep

#endif  // EP_FFI_HANDLERS_TSAN_H_
