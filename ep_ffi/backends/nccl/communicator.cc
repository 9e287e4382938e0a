// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/nccl/communicator.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <utility>

#include "ep_ffi/backends/nccl/deadline.h"

namespace ep::nccl {
namespace {

ncclEpHandleConfig_t HandleConfig(const Layer& layer) {
  ncclEpHandleConfig_t config = NCCL_EP_HANDLE_CONFIG_INIT;
  config.dispatch_output_per_expert_alignment = layer.alignment;
  return config;
}

// RunWithin says that this took too long if a rank does not come.
constexpr char kConnect[] = "to connect the ranks of an EP domain";

Status CheckEnvironment() {
  for (const char* variable :
       {"NCCL_EP_HT_EM_LOCAL_DUP", "NCCL_EP_HT_EM_NVLINK_DUP"}) {
    const char* value = std::getenv(variable);
    if (!value || !*value || std::string(value) == "0") continue;
    return Status(Code::kFailedPrecondition,
                  StrCat(variable, " = ", value,
                         " makes NCCL EP lay out rows in another way, whose "
                         "limits are not checked; unset it"));
  }
  return Status();
}

Status QueryProperties(const Libraries& nccl, ncclComm_t comm,
                       ncclCommProperties_t* out) {
  *out = NCCL_COMM_PROPERTIES_INITIALIZER;
  return nccl.Check(nccl.ncclCommQueryProperties(comm, out),
                    "ncclCommQueryProperties");
}

}  // namespace

Status CallNcclEp(const Libraries& libraries, const char* name,
                  const std::function<ncclResult_t()>& call) {
  try {
    return libraries.Check(call(), name);
  } catch (const std::exception& e) {
    return Status(Code::kInternal, StrCat(name, " failed: ", e.what()));
  } catch (...) {
    return Status(Code::kInternal, StrCat(name, " failed"));
  }
}

Status Communicator::Create(std::shared_ptr<const Device> device,
                            const Sizes& sizes, int32_t rank,
                            const std::string& unique_id, double timeout_s,
                            std::shared_ptr<Communicator>* out) {
  ncclUniqueId id;
  if (unique_id.size() != sizeof(id)) {
    return Status(Code::kInternal, "an NCCL unique id of the wrong size");
  }
  std::memcpy(&id, unique_id.data(), sizeof(id));
  std::shared_ptr<Communicator> made(new Communicator(std::move(device)));
  EP_RETURN_IF_ERROR(RunWithin(timeout_s, kConnect, [made, sizes, rank, id] {
    return made->Init(sizes, rank, id);
  }));
  *out = std::move(made);
  return Status();
}

Status Communicator::Borrow(std::shared_ptr<const Device> device,
                            const Sizes& sizes, int32_t rank, ncclComm_t lent,
                            double timeout_s,
                            std::shared_ptr<Communicator>* out) {
  std::shared_ptr<Communicator> made(new Communicator(std::move(device)));
  EP_RETURN_IF_ERROR(RunWithin(timeout_s, kConnect, [made, sizes, rank, lent] {
    return made->InitLent(sizes, rank, lent);
  }));
  *out = std::move(made);
  return Status();
}

Status Communicator::Init(const Sizes& sizes, int32_t rank,
                          const ncclUniqueId& id) {
  const Libraries& nccl = device_->libraries();
  Device::Scope scope(*device_);
  EP_RETURN_IF_ERROR(CheckEnvironment());
  EP_RETURN_IF_ERROR(
      nccl.Check(nccl.ncclCommInitRank(&comm_, sizes.ep_size, id, rank),
                 "ncclCommInitRank"));
  ncclCommProperties_t properties;
  EP_RETURN_IF_ERROR(QueryProperties(nccl, comm_, &properties));
  return InitGroup(sizes, properties);
}

Status Communicator::InitLent(const Sizes& sizes, int32_t rank,
                              ncclComm_t lent) {
  Device::Scope scope(*device_);
  EP_RETURN_IF_ERROR(CheckEnvironment());
  owns_ = false;
  comm_ = lent;
  ncclCommProperties_t properties;
  EP_RETURN_IF_ERROR(QueryProperties(device_->libraries(), comm_, &properties));
  if (properties.rank != rank || properties.nRanks != sizes.ep_size) {
    return Status(
        Code::kInternal,
        StrCat("XLA lends a communicator of ", properties.nRanks,
               " ranks whose rank ", properties.rank, " is rank ", rank, " of ",
               sizes.ep_size, " in the EP domain; unset EP_NCCL_COMMUNICATOR"));
  }
  return InitGroup(sizes, properties);
}

Status Communicator::InitGroup(const Sizes& sizes,
                               const ncclCommProperties_t& properties) {
  const Libraries& nccl = device_->libraries();
  Machine machine = {};
  machine.device_api = properties.deviceApiSupport;
  machine.nvlink_ranks = sizes.ep_size / std::max(properties.nLsaTeams, 1);
  machine.shared_bytes = device_->shared_bytes();
  EP_RETURN_IF_ERROR(device_->CountFreeBytes(&machine.free_bytes));
  EP_RETURN_IF_ERROR(CheckMachine(sizes, machine));
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
  config.num_experts = sizes.num_experts;
  config.max_dispatch_tokens_per_rank = sizes.max_dispatch_tokens();
  config.max_recv_tokens_per_rank = sizes.capacity;
  config.max_token_bytes = sizes.max_row_bytes;
  config.max_num_sms = sizes.max_num_sms;
  return CallNcclEp(nccl, "ncclEpCreateGroup", [&] {
    return nccl.ncclEpCreateGroup(&group_, comm_, &config);
  });
}

void Communicator::Destroy() {
  const Libraries& nccl = device_->libraries();
  Device::Scope scope(*device_);
  if (group_) {
    (void)CallNcclEp(nccl, "ncclEpGroupDestroy", [&] {
      return nccl.ncclEpGroupDestroy(std::exchange(group_, nullptr));
    });
  }
  if (comm_ && owns_) nccl.ncclCommDestroy(comm_);
  comm_ = nullptr;
}

void Communicator::Abort() {
  group_ = nullptr;
  ncclComm_t comm = std::exchange(comm_, nullptr);
  if (!comm || !owns_) return;
  Device::Scope scope(*device_);
  device_->libraries().ncclCommAbort(comm);
}

Status Communicator::AllGather(const int32_t* mine, int32_t* all, int64_t count,
                               CUstream stream) const {
  const Libraries& nccl = device_->libraries();
  return nccl.Check(
      nccl.ncclAllGather(mine, all, count, ncclInt32, comm_, stream),
      "ncclAllGather");
}

Status Communicator::HandleBytes(const Layer& layer, int64_t* out) const {
  const Libraries& nccl = device_->libraries();
  const ncclEpHandleConfig_t config = HandleConfig(layer);
  size_t bytes = 0;
  EP_RETURN_IF_ERROR(CallNcclEp(nccl, "ncclEpHandleMemSize", [&] {
    return nccl.ncclEpHandleMemSize(group_, NCCL_EP_LAYOUT_EXPERT_MAJOR,
                                    &config, &bytes, layer.top_k);
  }));
  *out = bytes;
  return Status();
}

Status Communicator::OpenHandle(const Layer& layer, std::byte* mem,
                                int64_t bytes, ncclEpHandle_t* out) const {
  const Libraries& nccl = device_->libraries();
  const ncclEpHandleConfig_t config = HandleConfig(layer);
  size_t size = bytes;
  ncclEpTensor_t tensor = NCCL_EP_TENSOR_INIT;
  tensor.ndim = 1;
  tensor.datatype = ncclUint8;
  tensor.data = mem;
  tensor.sizes = &size;
  return CallNcclEp(nccl, "ncclEpInitHandle", [&] {
    return nccl.ncclEpInitHandle(out, group_, NCCL_EP_LAYOUT_EXPERT_MAJOR,
                                 &config, layer.top_k, &tensor);
  });
}

Status Communicator::CloseHandle(ncclEpHandle_t handle) const {
  const Libraries& nccl = device_->libraries();
  return CallNcclEp(nccl, "ncclEpHandleDestroy",
                    [&] { return nccl.ncclEpHandleDestroy(handle); });
}

Status Communicator::WithHandle(
    const Layer& layer, std::byte* mem, int64_t bytes, const char* name,
    const std::function<ncclResult_t(ncclEpHandle_t)>& use) const {
  ncclEpHandle_t handle = nullptr;
  EP_RETURN_IF_ERROR(OpenHandle(layer, mem, bytes, &handle));
  const Status used =
      CallNcclEp(device_->libraries(), name, [&] { return use(handle); });
  const Status closed = CloseHandle(handle);
  return used.ok() ? closed : used;
}

}  // namespace ep::nccl
