// SPDX-License-Identifier: Apache-2.0

// Flushing of denormals. XLA:CPU's threads read denormal numbers as zero and
// write zero instead of a denormal result. Our threads must do the same, so
// that a sum has the same bits on every thread.

#ifndef EP_FFI_CORE_DENORMALS_H_
#define EP_FFI_CORE_DENORMALS_H_

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace ep {

// Flushes denormals on this thread while the object lives.
class ScopedFlushDenormals {
 public:
  ScopedFlushDenormals() : saved_(Get()) { Set(saved_ | kFlush); }
  ~ScopedFlushDenormals() { Set(saved_); }

  ScopedFlushDenormals(const ScopedFlushDenormals&) = delete;
  ScopedFlushDenormals& operator=(const ScopedFlushDenormals&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint64_t kFlush = 0x8040;  // MXCSR: FTZ, DAZ
  static uint64_t Get() { return _mm_getcsr(); }
  static void Set(uint64_t value) {
    _mm_setcsr(static_cast<unsigned int>(value));
  }
#elif defined(__aarch64__)
  // The FZ bit of FPCR flushes denormal inputs and results.
  static constexpr uint64_t kFlush = 1 << 24;
  static uint64_t Get() {
    uint64_t value;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void Set(uint64_t value) { asm volatile("msr fpcr, %0" ::"r"(value)); }
#else
#error "ep_ffi: tell this processor how to flush denormals, as XLA:CPU does"
#endif

  const uint64_t saved_;
};

}  // namespace ep

#endif  // EP_FFI_CORE_DENORMALS_H_
