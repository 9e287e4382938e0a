// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/nccl/symbols.h"

#include <dlfcn.h>

namespace ep::nccl {
namespace {

// Opens the library `soname` if the process has loaded it, otherwise the file
// `path`, otherwise `soname` on the system's search path. It is never closed,
// because NCCL and NCCL EP leave threads and kernels behind.
Status Open(const char* soname, const std::string& path, void** out) {
  *out = dlopen(soname, RTLD_NOW | RTLD_NOLOAD);
  if (!*out && !path.empty()) *out = dlopen(path.c_str(), RTLD_NOW);
  if (!*out && path.empty()) *out = dlopen(soname, RTLD_NOW);
  if (*out) return Status();
  return Status(Code::kFailedPrecondition,
                StrCat("cannot load ", path.empty() ? soname : path.c_str(),
                       ": ", dlerror(),
                       "; install the packages that docs/gpu.md lists, or say "
                       "where they are"));
}

}  // namespace

void* Symbols::Find(const char* name) {
  // A test defines the functions in the program itself.
  void* symbol = dlsym(RTLD_DEFAULT, name);
  if (!symbol && status_.ok() && !library_) {
    status_ = Open(soname_, path_, &library_);
  }
  if (!symbol && library_) symbol = dlsym(library_, name);
  if (!symbol && status_.ok()) {
    status_ = Status(Code::kFailedPrecondition,
                     StrCat(soname_, " has no ", name,
                            "; it is too old, docs/gpu.md lists the "
                            "versions that work"));
  }
  return symbol;
}

}  // namespace ep::nccl
