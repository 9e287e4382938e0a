// SPDX-License-Identifier: Apache-2.0

// Lets a library that a newer GCC and glibc compiled run with glibc 2.28 and
// the libstdc++ of GCC 8, as the tag manylinux_2_28 of our wheels promises.
// //release:manylinux_test checks the library.
//
// Newer headers use functions that older runtimes do not export. This file
// defines these functions, and exports.lds keeps the definitions local.

#include <cxxabi.h>
#include <pthread.h>

#include <condition_variable>
#include <exception>
#include <ios>
#include <mutex>
#include <new>
#include <sstream>

#ifdef __GLIBC__
// New in glibc 2.32. If true, libstdc++ counts references without atomics.
extern "C" char __libc_single_threaded;
char __libc_single_threaded = 0;
#endif

#ifdef _GLIBCXX_RELEASE
namespace std {

// New in GLIBCXX_3.4.29. Allocators call this function.
void __throw_bad_array_new_length() { throw bad_array_new_length(); }

#if _GLIBCXX_RELEASE >= 9
// New in GLIBCXX_3.4.26. <sstream> does not instantiate this constructor.
template basic_stringstream<char>::basic_stringstream();
#endif

#if _GLIBCXX_RELEASE >= 12
// New in GLIBCXX_3.4.30 with support for thread cancellation, as here.
void condition_variable::wait(unique_lock<mutex>& lock) {
  if (pthread_cond_wait(native_handle(), lock.mutex()->native_handle()) != 0) {
    terminate();
  }
}
#endif

#if _GLIBCXX_RELEASE >= 13
// New in GLIBCXX_3.4.32, where <iostream> calls it to initialize the standard
// streams. Older versions need an ios_base::Init object.
void ios_base_library_init() {}
static ios_base::Init streams;
#endif

}  // namespace std

#if _GLIBCXX_RELEASE >= 14
// New in CXXABI_1.3.15. A noexcept function that throws calls this function.
extern "C" [[noreturn]] void __cxa_call_terminate(void* exception) noexcept {
  if (exception) abi::__cxa_begin_catch(exception);
  std::terminate();
}
#endif
#endif
