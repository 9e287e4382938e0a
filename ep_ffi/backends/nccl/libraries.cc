// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/nccl/libraries.h"

#include <link.h>

#include <cstring>
#include <set>

#include "ep_ffi/backends/nccl/symbols.h"

namespace ep::nccl {
namespace {

// The only versions that work. Our structs and limits belong to this NCCL EP;
// in a later one, for example, rows have no fixed order unless
// NCCL_EP_HT_EM_AG_SCAN_MODE is 1. This NCCL EP works with this NCCL only: its
// host code passes ncclDevComm to its kernels by value, in the layout of the
// headers that it was built with, but it compiles the kernels with the headers
// that are installed. From NCCL 2.31 on the struct is larger, so that the
// arguments after it are in another place. With an NCCL before 2.30.7,
// ncclEpCreateGroup ends the process.
constexpr int kNccl = 23007;
constexpr int kNcclEp = 200;

std::string VersionText(int code) {
  return StrCat(code / 10000, ".", code / 100 % 100, ".", code % 100);
}

// Returns the files of all NCCLs that the process has loaded.
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
