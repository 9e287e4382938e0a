// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/nccl/libraries.h"

#include <dlfcn.h>
#include <link.h>

#include <cstring>
#include <set>

namespace ep::nccl {
namespace {

// The supported versions of NCCL and NCCL EP.
//
// Our structs and limits match NCCL EP 0.2.0. In a later version, for example,
// the order of rows is fixed only if NCCL_EP_HT_EM_AG_SCAN_MODE is 1.
//
// NCCL EP 0.2.0 works with NCCL 2.30.7 only. NCCL EP passes ncclDevComm by
// value in the layout of the headers of its build, but compiles its kernels
// with the installed headers. From NCCL 2.31 on the struct is larger, which
// shifts the arguments after it. With an NCCL before 2.30.7, ncclEpCreateGroup
// terminates the process.
constexpr int kNccl = 23007;
constexpr int kNcclEp = 200;

std::string VersionText(int code) {
  return StrCat(code / 10000, ".", code / 100 % 100, ".", code % 100);
}

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

// Opens a library: the library `soname` that the process has loaded, otherwise
// the file `path`, otherwise `soname` on the system's search path. Never closes
// a library, because NCCL and NCCL EP leave threads and kernels behind.
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

// A lookup of functions in one library, which the first lookup loads.
class Symbols {
 public:
  Symbols(const char* soname, const std::string& path)
      : soname_(soname), path_(path) {}

  template <typename Function>
  void Find(const char* name, Function* out) {
    // In a test, the program itself defines the functions.
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
    *out = reinterpret_cast<Function>(symbol);
  }

  // Returns an error if Find has not found a function.
  const Status& status() const { return status_; }

 private:
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
    Symbols symbols("libnccl.so.2", nccl);
    EP_NCCL_FUNCTIONS(EP_FIND)
    if (!symbols.status().ok()) return symbols.status();
  }
  int version = 0;
  Status status = out->Check(out->ncclGetVersion(&version), "ncclGetVersion");
  if (!status.ok()) return status;
  if (version != kNccl) {
    return Status(
        Code::kFailedPrecondition,
        StrCat(
            "NCCL is ", VersionText(version), ", but NCCL EP ",
            VersionText(kNcclEp), " needs ", VersionText(kNccl),
            ", neither an older nor a newer one; install nvidia-nccl of this "
            "version where JAX finds it, see docs/gpu.md"));
  }
  {
    Symbols symbols("libnccl_ep.so", nccl_ep);
    EP_NCCL_EP_FUNCTIONS(EP_FIND)
    if (!symbols.status().ok()) return symbols.status();
  }
#undef EP_FIND
  status = out->Check(out->ncclEpGetVersion(&version), "ncclEpGetVersion");
  if (!status.ok()) return status;
  if (version != kNcclEp) {
    return Status(Code::kFailedPrecondition,
                  StrCat("NCCL EP is ", VersionText(version), ", but ",
                         VersionText(kNcclEp),
                         " is needed; install nccl-extensions==0.1.0"));
  }
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
