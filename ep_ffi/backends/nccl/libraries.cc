// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/nccl/libraries.h"

#include <dlfcn.h>
#include <link.h>

#include <cstring>
#include <set>

#include "ep_ffi/backends/nccl/limits.h"

namespace ep::nccl {
namespace {

// The SONAME of the NCCL EP that matches our structs and limits. The module
// installation.py checks the version of the API. ncclEpGetVersion is no proof,
// because API 3 also has the version 0.2.0. In a later API, for example,
// the order of rows is fixed only if NCCL_EP_HT_EM_AG_SCAN_MODE is 1.
constexpr char kNcclEp[] = "libnccl_ep.so.0";

// Returns the paths of all NCCL libraries in the process.
std::set<std::string> LoadedNccls() {
  std::set<std::string> files;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        const char* slash = std::strrchr(info->dlpi_name, '/');
        const char* name = slash ? slash + 1 : info->dlpi_name;
        if (std::strncmp(name, "libnccl.so", 10) == 0) {
          static_cast<std::set<std::string>*>(data)->insert(info->dlpi_name);
        }
        return 0;
      },
      &files);
  return files;
}

// Expands to the name that a function has in its library. cuda.h renames some
// functions by macros, so this name may differ from the name in the source.
#define EP_STRING(text) #text
#define EP_SYMBOL(function) EP_STRING(function)

// Returns the SONAME of an open library.
std::string SonameOf(void* library) {
  const link_map* map = nullptr;
  if (dlinfo(library, RTLD_DI_LINKMAP, &map) != 0) return "";
  const char* strings = "";
  size_t offset = 0;
  for (const ElfW(Dyn)* entry = map->l_ld; entry->d_tag != DT_NULL; ++entry) {
    if (entry->d_tag == DT_STRTAB) {
      strings = reinterpret_cast<const char*>(entry->d_un.d_ptr);
    }
    if (entry->d_tag == DT_SONAME) offset = entry->d_un.d_val;
  }
  return strings + offset;
}

// A lookup of functions in one library, which the first lookup opens. Never
// closes a library, because NCCL and NCCL EP leave threads and kernels behind.
//
// The functions of a library with a path come only from this library. NCCL EP
// itself, from its first instruction on, calls the functions of NCCL and NCCL
// EP that are first in the process's global scope. So no other library there
// may define them.
class Symbols {
 public:
  // If `path` is empty, looks in the global scope, then opens `soname`.
  Symbols(const char* soname, const std::string& path)
      : soname_(soname), path_(path) {}

  template <typename Function>
  void Find(const char* name, Function* out) {
    void* const global = dlsym(RTLD_DEFAULT, name);
    void* symbol = global;
    if (!path_.empty() || !global) {
      if (!library_) Open(/*must_be_loaded=*/global);
      symbol = library_ ? dlsym(library_, name) : nullptr;
    }
    *out = reinterpret_cast<Function>(symbol);
    if (!status_.ok()) return;
    if (global && global != symbol) {
      Dl_info info = {};
      dladdr(global, &info);
      Fail("this process has ", name, " of ", info.dli_fname,
           " in its global scope, which hides ", path_,
           "; load the first library without RTLD_GLOBAL and LD_PRELOAD, or in "
           "another process");
    } else if (!symbol) {
      Fail(soname_, " has no ", name,
           "; it is too old, docs/gpu.md lists the versions that work");
    }
  }

  // Returns an error if Find has not found a function.
  const Status& status() const { return status_; }
  // Returns the library, or null if the global scope defines all functions.
  void* library() const { return library_; }

 private:
  template <typename... Parts>
  void Fail(const Parts&... parts) {
    status_ = Status(Code::kFailedPrecondition, StrCat(parts...));
  }

  void Open(bool must_be_loaded) {
    const char* const file = path_.empty() ? soname_ : path_.c_str();
    library_ = dlopen(file, RTLD_NOW | (must_be_loaded ? RTLD_NOLOAD : 0));
    if (!library_ && !must_be_loaded && status_.ok()) {
      Fail("cannot load ", file, ": ", dlerror(),
           "; install the packages that docs/gpu.md lists, or say where they "
           "are");
    }
  }

  const char* const soname_;
  const std::string path_;
  void* library_ = nullptr;
  Status status_;
};

}  // namespace

Status Libraries::Load(const std::string& nccl, const std::string& nccl_ep,
                       Libraries* out) {
#define EP_FIND(function) symbols.Find(EP_SYMBOL(function), &out->function);
  {
    Symbols symbols("libcuda.so.1", "");
    EP_CUDA_FUNCTIONS(EP_FIND)
    if (!symbols.status().ok()) return symbols.status();
  }
  {
    constexpr char kNccl[] = "libnccl.so.2";
    const bool is_loaded = dlopen(kNccl, RTLD_NOW | RTLD_NOLOAD);
    Symbols symbols(kNccl, is_loaded ? kNccl : nccl);
    EP_NCCL_FUNCTIONS(EP_FIND)
    if (!symbols.status().ok()) return symbols.status();
  }
  EP_RETURN_IF_ERROR(
      out->Check(out->ncclGetVersion(&out->nccl_version), "ncclGetVersion"));
  EP_RETURN_IF_ERROR(CheckNccl(out->nccl_version));
  {
    Symbols symbols(kNcclEp, nccl_ep);
    EP_NCCL_EP_FUNCTIONS(EP_FIND)
    if (!symbols.status().ok()) return symbols.status();
    void* const library = symbols.library();
    if (library && SonameOf(library) != kNcclEp) {
      return Status(
          Code::kFailedPrecondition,
          StrCat(nccl_ep, " is ", SonameOf(library), ", but ", kNcclEp,
                 " is needed; install nccl-extensions==0.1.0"));
    }
  }
#undef EP_FIND
  const std::set<std::string> nccls = LoadedNccls();
  if (nccls.size() > 1) {
    std::string files;
    for (const std::string& file : nccls) files += " " + file;
    return Status(Code::kFailedPrecondition,
                  StrCat("this process has ", nccls.size(), " NCCLs:", files,
                         "; NCCL EP and JAX must share one, remove the others "
                         "from LD_LIBRARY_PATH or the environment"));
  }
  return Status();
}

Status Libraries::Check(CUresult result, const char* what) const {
  if (result == CUDA_SUCCESS) return Status();
  const char* text = nullptr;
  cuGetErrorString(result, &text);
  return Status(Code::kInternal,
                StrCat(what, " failed: ", text ? text : "unknown CUDA error",
                       " (", static_cast<int>(result), ")"));
}

Status Libraries::Check(ncclResult_t result, const char* what) const {
  if (result == ncclSuccess) return Status();
  const char* detail = ncclGetLastError(nullptr);
  return Status(Code::kInternal,
                StrCat(what, " failed: ", ncclGetErrorString(result),
                       detail && *detail ? StrCat(" (", detail, ")") : "",
                       "; NCCL_DEBUG=INFO tells more"));
}

}  // namespace ep::nccl
