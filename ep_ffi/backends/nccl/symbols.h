// SPDX-License-Identifier: Apache-2.0

// Functions of a library that is found at run time.

#ifndef EP_FFI_BACKENDS_NCCL_SYMBOLS_H_
#define EP_FFI_BACKENDS_NCCL_SYMBOLS_H_

#include <string>

#include "ep_ffi/core/status.h"

// The name that a function has in its library: cuda.h renames some by macro.
#define EP_STRING(text) #text
#define EP_SYMBOL(function) EP_STRING(function)

namespace ep::nccl {

// One library and what it must have.
class Symbols {
 public:
  // `path` names the file to load where the process has no `soname` loaded;
  // empty: the system's.
  Symbols(const char* soname, const std::string& path)
      : soname_(soname), path_(path) {}

  template <typename Function>
  void Find(const char* name, Function* out) {
    *out = reinterpret_cast<Function>(Find(name));
  }

  // Not OK if anything was not found.
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
