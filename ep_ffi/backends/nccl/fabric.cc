// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/nccl/fabric.h"

#include <cstdlib>
#include <filesystem>

namespace ep::nccl {
namespace {

// NCCL EP's kernels address the other NVLink domains by the lanes of a warp.
// With more domains, NCCL EP cannot compile the kernels, and terminates.
constexpr int64_t kMaxNvlinks = 33;

// Returns the value of a variable, or "" if it is unset.
std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

bool IsOn(const std::string& value) { return !value.empty() && value != "0"; }

// Returns why this machine has no GIN, and the cure. The conditions are those
// of NCCL 2.30.7.
std::string WhyNoGin(const Fabric& fabric, const std::filesystem::path& root) {
  std::error_code ignored;
  const std::string type = Variable("NCCL_GIN_TYPE");
  if (IsOn(Variable("NCCL_IB_DISABLE"))) {
    return "NCCL_IB_DISABLE hides the RDMA network cards; unset it";
  }
  if (!std::filesystem::exists(root / "sys/class/infiniband", ignored) ||
      std::filesystem::is_empty(root / "sys/class/infiniband", ignored)) {
    return "this machine has no RDMA network card with a loaded driver "
           "(/sys/class/infiniband is empty), such as mlx5_ib; load the "
           "driver, and give the container the card's devices";
  }
  if (!fabric.gpu_has_rdma) {
    return "the CUDA driver of this machine supports no GPUDirect RDMA; "
           "install a driver that does";
  }
  if (!type.empty() && type != "-1") {
    return StrCat("NCCL_GIN_TYPE = ", type,
                  " excludes the other types of GIN (2: a thread of the CPU "
                  "sends; 3: the GPU drives a ConnectX card); unset it");
  }
  if (!std::filesystem::exists(root / "sys/module/nvidia_peermem", ignored)) {
    return "the kernel module nvidia_peermem is not loaded, which GIN needs "
           "unless the kernel exports GPU memory as DMA-BUF; load it";
  }
  return "this machine has an RDMA network card and its drivers, so look at "
         "the other ranks, or at NCCL's lines with NCCL_DEBUG=INFO";
}

}  // namespace

Status CheckFabric(const Fabric& f, const std::string& root) {
  if (f.num_nvlinks == 1) return Status();
  const auto refuse = [&](const std::string& why) {
    return Status(
        Code::kFailedPrecondition,
        StrCat("NVLink connects only ", f.num_ranks / f.num_nvlinks, " of the ",
               f.num_ranks, " ranks of an EP domain. ", why,
               ". Or choose an EP axis whose ranks NVLink connects; see "
               "docs/gpu.md"));
  };
  if (f.num_nvlinks > kMaxNvlinks) {
    return refuse(StrCat("NCCL EP connects at most ", kMaxNvlinks,
                         " NVLink domains, but there are ", f.num_nvlinks));
  }
  if (f.num_hosts == 1) {
    return refuse(
        "But all ranks have one host name, from which NCCL EP concludes that "
        "it needs no network, so its kernels would use a null pointer; give "
        "each host its own name, and unset NCCL_LSA_TEAM_SIZE. NCCL EP does "
        "not work on a host whose GPUs are in several NVLink domains");
  }
  if (Variable("NCCL_GIN_ENABLE") == "0") {
    return refuse(
        "NCCL EP connects the others by GIN, which NCCL_GIN_ENABLE = 0 "
        "forbids; unset it");
  }
  if (f.has_gin) return Status();
  return refuse(StrCat(
      "NCCL EP connects the others by GIN, which NCCL does not offer on all "
      "ranks: ",
      WhyNoGin(f, root)));
}

}  // namespace ep::nccl
