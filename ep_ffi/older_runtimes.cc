// SPDX-License-Identifier: Apache-2.0

// Definitions that let a library which is compiled with a newer GCC and glibc
// run with glibc 2.28 and the libstdc++ of GCC 8. This is what the tag
// manylinux_2_28 of our wheels promises, and //release:manylinux_test checks.
//
// Newer headers refer to functions that older runtimes do not export. A library
// does not ask the system for what it defines itself, and exports.lds keeps
// these definitions local to it.

#include <cxxabi.h>
#include <pthread.h>

#include <condition_variable>
#include <exception>
#include <ios>
#include <mutex>
#include <new>
#include <sstream>

#ifdef __GLIBC__
// glibc 2.32 has this variable. libstdc++ counts references with atomic
// operations unless it is true.
extern "C" char __libc_single_threaded;
char __libc_single_threaded = 0;
#endif

#ifdef _GLIBCXX_RELEASE
namespace std {

// GLIBCXX_3.4.29 has this function, which allocators call.
void __throw_bad_array_new_length() { throw bad_array_new_length(); }

#if _GLIBCXX_RELEASE >= 9
// GLIBCXX_3.4.26 has this constructor, and <sstream> does not instantiate it.
template basic_stringstream<char>::basic_stringstream();
#endif

#if _GLIBCXX_RELEASE >= 12
// GLIBCXX_3.4.30 has a version of this function in which a thread may be
// cancelled, as it may in this one.
void condition_variable::wait(unique_lock<mutex>& lock) {
  if (pthread_cond_wait(native_handle(), lock.mutex()->native_handle()) != 0) {
    terminate();
  }
}
#endif

#if _GLIBCXX_RELEASE >= 13
// GLIBCXX_3.4.32 initializes the standard streams, and <iostream> refers to
// this function for its sake. Older versions need an object of type Init.
void ios_base_library_init() {}
static ios_base::Init streams;
#endif

}  // namespace std

#if _GLIBCXX_RELEASE >= 14
// CXXABI_1.3.15 has this function. Code that must not throw calls it when it
// does.
extern "C" [[noreturn]] void __cxa_call_terminate(void* exception) noexcept {
  if (exception) abi::__cxa_begin_catch(exception);
  std::terminate();
}
#endif
#endif
