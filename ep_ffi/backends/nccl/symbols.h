// SPDX-License-Identifier: Apache-2.0

// Finds the functions of a shared library at run time.

#ifndef EP_FFI_BACKENDS_NCCL_SYMBOLS_H_
#define EP_FFI_BACKENDS_NCCL_SYMBOLS_H_

#include <string>

#include "ep_ffi/core/status.h"

// The name of a function in its library, as a string. It is not the name in the
// source, because cuda.h renames some functions by macros.
#define EP_STRING(text) #text
#define EP_SYMBOL(function) EP_STRING(function)

namespace ep::nccl {

// One library. It is loaded when the first function is looked for.
class Symbols {
 public:
  // `path` is the file to load if the process has not loaded `soname`. If it is
  // empty, the system's search path decides.
  Symbols(const char* soname, const std::string& path)
      : soname_(soname), path_(path) {}

  template <typename Function>
  void Find(const char* name, Function* out) {
    *out = reinterpret_cast<Function>(Find(name));
  }

  // Returns an error if a function was not found.
  const Status& status() const { return status_; }

 private:
  void* Find(const char* name);

  const char* const soname_;
  const std::string path_;
  void* library_ = nullptr;
  Status status_;
};

}  // namespace ep::nccl

#endif  // EP_FFI_BACKENDS_NCCL_SYMBOLS_H_
