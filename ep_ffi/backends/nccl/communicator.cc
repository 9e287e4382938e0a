// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/nccl/communicator.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <utility>

#include "ep_ffi/backends/nccl/deadline.h"
#include "ep_ffi/backends/nccl/fabric.h"

namespace ep::nccl {
namespace {

// An NCCL EP descriptor of a dense array. The descriptor points to sizes in
// this object, so the object must outlive the descriptor.
class Tensor {
 public:
  Tensor(ncclDataType_t type, const void* data,
         std::initializer_list<int64_t> sizes) {
    for (int64_t size : sizes) sizes_[tensor_.ndim++] = size;
    tensor_.datatype = type;
    tensor_.data = const_cast<void*>(data);
    tensor_.sizes = sizes_;
  }
  template <typename Byte>
  Tensor(const RowsOf<Byte>& rows, int64_t count)
      : Tensor(ToNccl(rows.dtype), rows.data, {count, rows.width}) {}
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  ncclEpTensor_t* get() { return &tensor_; }

 private:
  static ncclDataType_t ToNccl(DType dtype) {
    switch (dtype) {
      case DType::kFloat32:
        return ncclFloat32;
      case DType::kBFloat16:
        return ncclBfloat16;
      case DType::kFloat16:
        return ncclFloat16;
    }
    return ncclNumTypes;
  }

  size_t sizes_[2];
  ncclEpTensor_t tensor_ = NCCL_EP_TENSOR_INIT;
};

ncclEpHandleConfig_t HandleConfig(const Layer& layer) {
  ncclEpHandleConfig_t config = NCCL_EP_HANDLE_CONFIG_INIT;
  config.dispatch_output_per_expert_alignment = layer.alignment;
  return config;
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

Status Communicator::Connect(std::shared_ptr<const Device> device,
                             const Sizes& sizes, int32_t rank,
                             const std::string& unique_id, ncclComm_t lent,
                             double timeout_s,
                             std::shared_ptr<Communicator>* out) {
  ncclUniqueId id = {};
  if (!lent && unique_id.size() != sizeof(id)) {
    return Status(Code::kInternal, "an NCCL unique id of the wrong size");
  }
  std::copy(unique_id.begin(), unique_id.end(), id.internal);
  std::shared_ptr<Communicator> made(
      new Communicator(std::move(device), sizes));
  EP_RETURN_IF_ERROR(
      RunWithin(timeout_s, "to connect the ranks of an EP domain",
                [made, rank, id, lent] { return made->Init(rank, id, lent); }));
  *out = std::move(made);
  return Status();
}

Status Communicator::Init(int32_t rank, const ncclUniqueId& id,
                          ncclComm_t lent) {
  const Libraries& nccl = device_->libraries();
  Device::Scope scope(*device_);
  owns_ = !lent;
  comm_ = lent;
  if (owns_) {
    EP_RETURN_IF_ERROR(
        nccl.Check(nccl.ncclCommInitRank(&comm_, sizes_.ep_size, id, rank),
                   "ncclCommInitRank"));
  }
  EP_RETURN_IF_ERROR(
      nccl.Check(nccl.ncclCommQueryProperties(comm_, &properties_),
                 "ncclCommQueryProperties"));
  if (properties_.rank != rank || properties_.nRanks != sizes_.ep_size) {
    return Status(Code::kInternal,
                  StrCat("XLA lends a communicator of ", properties_.nRanks,
                         " ranks whose rank ", properties_.rank, " is rank ",
                         rank, " of ", sizes_.ep_size,
                         " in the EP domain; unset EP_NCCL_COMMUNICATOR"));
  }
  return Status();
}

Status Communicator::CheckMachine(int64_t num_hosts) const {
  Device::Scope scope(*device_);
  const int64_t num_nvlinks = std::max(properties_.nLsaTeams, 1);
  // Without GIN, NCCL has no device API on several NVLink domains.
  EP_RETURN_IF_ERROR(CheckFabric(
      {sizes_.ep_size, num_nvlinks, num_hosts,
       properties_.railedGinType != NCCL_GIN_TYPE_NONE, device_->has_rdma()}));
  Machine machine = {};
  machine.device_api = properties_.deviceApiSupport;
  machine.nvlink_ranks = sizes_.ep_size / num_nvlinks;
  machine.shared_bytes = device_->shared_bytes();
  machine.nccl_version = device_->libraries().nccl_version;
  EP_RETURN_IF_ERROR(device_->CountFreeBytes(&machine.free_bytes));
  return nccl::CheckMachine(sizes_, machine);
}

Status Communicator::Open(std::shared_ptr<Communicator> communicator,
                          double timeout_s) {
  return RunWithin(timeout_s, "to connect the ranks of an EP domain",
                   [communicator] { return communicator->CreateGroup(); });
}

Status Communicator::CreateGroup() {
  const Libraries& nccl = device_->libraries();
  Device::Scope scope(*device_);
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
  config.num_experts = sizes_.ep_size * sizes_.nccl_ep_local();
  config.max_dispatch_tokens_per_rank = sizes_.max_dispatch_tokens();
  config.max_recv_tokens_per_rank = sizes_.capacity;
  config.max_token_bytes = sizes_.max_row_bytes;
  config.max_num_sms = sizes_.max_num_sms;
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

Status Communicator::WithHandle(
    const Layer& layer, const Mem& mem, const char* name,
    const std::function<ncclResult_t(ncclEpHandle_t)>& use) const {
  const Libraries& nccl = device_->libraries();
  const ncclEpHandleConfig_t config = HandleConfig(layer);
  Tensor bytes(ncclUint8, mem.data, {mem.bytes});
  ncclEpHandle_t handle = nullptr;
  EP_RETURN_IF_ERROR(CallNcclEp(nccl, "ncclEpInitHandle", [&] {
    return nccl.ncclEpInitHandle(&handle, group_, NCCL_EP_LAYOUT_EXPERT_MAJOR,
                                 &config, layer.top_k, bytes.get());
  }));
  const Status used = CallNcclEp(nccl, name, [&] { return use(handle); });
  const Status closed = CallNcclEp(nccl, "ncclEpHandleDestroy", [&] {
    return nccl.ncclEpHandleDestroy(handle);
  });
  return used.ok() ? closed : used;
}

Status Communicator::Update(const Layer& layer, const Mem& mem,
                            const int64_t* choices, int64_t num_tokens,
                            CUstream stream) const {
  Tensor topk_idx(ncclInt64, choices, {num_tokens, layer.top_k});
  return WithHandle(
      layer, mem, "ncclEpUpdateHandle", [&](ncclEpHandle_t handle) {
        return device_->libraries().ncclEpUpdateHandle(
            handle, topk_idx.get(), /*layout_info=*/nullptr, stream);
      });
}

Status Communicator::Scatter(const Layer& layer, const Mem& mem,
                             const ScatterArgs& args, CUstream stream) const {
  Tensor tokens(args.tokens, args.tokens.count);
  Tensor slots(args.slots, sizes_.capacity);
  Tensor topk_weights(ncclFloat32, args.topk_weights,
                      {args.tokens.count, layer.top_k});
  Tensor slot_weights(ncclFloat32, args.slot_weights, {sizes_.capacity});
  ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
  inputs.tokens = tokens.get();
  outputs.tokens = slots.get();
  // NCCL EP's forward dispatch takes weights; its backward dispatch takes none.
  config.pass_direction = NCCL_EP_BWD_PASS;
  if (args.topk_weights) {
    config.pass_direction = NCCL_EP_FWD_PASS;
    inputs.topk_weights = topk_weights.get();
    outputs.topk_weights = slot_weights.get();
  }
  return WithHandle(layer, mem, "ncclEpDispatch", [&](ncclEpHandle_t handle) {
    return device_->libraries().ncclEpDispatch(handle, &inputs, &outputs,
                                               /*layout_info=*/nullptr, &config,
                                               stream);
  });
}

Status Communicator::Gather(const Layer& layer, const Mem& mem,
                            const GatherArgs& args, CUstream stream) const {
  Tensor slots(args.slots, sizes_.capacity);
  Tensor tokens(args.tokens, args.tokens.count);
  Tensor slot_weights(ncclFloat32, args.slot_weights, {sizes_.capacity});
  Tensor topk_weights(ncclFloat32, args.topk_weights,
                      {args.tokens.count, layer.top_k});
  ncclEpCombineInputs_t inputs = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t outputs = NCCL_EP_COMBINE_OUTPUTS_INIT;
  ncclEpCombineConfig_t config = NCCL_EP_COMBINE_CONFIG_INIT;
  inputs.tokens = slots.get();
  outputs.tokens = tokens.get();
  // NCCL EP's backward combine takes weights; its forward combine takes none.
  config.pass_direction = NCCL_EP_FWD_PASS;
  if (args.topk_weights) {
    config.pass_direction = NCCL_EP_BWD_PASS;
    inputs.topk_weights = slot_weights.get();
    outputs.topk_weights = topk_weights.get();
  }
  return WithHandle(layer, mem, "ncclEpCombine", [&](ncclEpHandle_t handle) {
    return device_->libraries().ncclEpCombine(handle, &inputs, &outputs,
                                              &config, stream);
  });
}

}  // namespace ep::nccl
