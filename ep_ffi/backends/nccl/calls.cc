// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/nccl/calls.h"

#include <cstddef>
#include <initializer_list>

namespace ep::nccl {
namespace {

// NCCL EP's descriptor of a dense array. The descriptor points to the sizes in
// this object.
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

}  // namespace

ncclResult_t Update(const Libraries& nccl, ncclEpHandle_t handle,
                    const int64_t* choices, int64_t num_tokens, int64_t top_k,
                    CUstream stream) {
  Tensor topk_idx(ncclInt64, choices, {num_tokens, top_k});
  return nccl.ncclEpUpdateHandle(handle, topk_idx.get(),
                                 /*layout_info=*/nullptr, stream);
}

ncclResult_t Scatter(const Libraries& nccl, ncclEpHandle_t handle,
                     const ScatterArgs& args, int64_t top_k,
                     int64_t group_capacity, CUstream stream) {
  Tensor tokens(args.tokens, args.tokens.count);
  Tensor slots(args.slots, group_capacity);
  Tensor topk_weights(ncclFloat32, args.topk_weights,
                      {args.tokens.count, top_k});
  Tensor slot_weights(ncclFloat32, args.slot_weights, {group_capacity});
  ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
  inputs.tokens = tokens.get();
  outputs.tokens = slots.get();
  // NCCL EP's forward pass is the one with weights.
  config.pass_direction = NCCL_EP_BWD_PASS;
  if (args.topk_weights) {
    config.pass_direction = NCCL_EP_FWD_PASS;
    inputs.topk_weights = topk_weights.get();
    outputs.topk_weights = slot_weights.get();
  }
  return nccl.ncclEpDispatch(handle, &inputs, &outputs,
                             /*layout_info=*/nullptr, &config, stream);
}

ncclResult_t Gather(const Libraries& nccl, ncclEpHandle_t handle,
                    const GatherArgs& args, int64_t top_k,
                    int64_t group_capacity, CUstream stream) {
  Tensor slots(args.slots, group_capacity);
  Tensor tokens(args.tokens, args.tokens.count);
  Tensor slot_weights(ncclFloat32, args.slot_weights, {group_capacity});
  Tensor topk_weights(ncclFloat32, args.topk_weights,
                      {args.tokens.count, top_k});
  ncclEpCombineInputs_t inputs = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t outputs = NCCL_EP_COMBINE_OUTPUTS_INIT;
  ncclEpCombineConfig_t config = NCCL_EP_COMBINE_CONFIG_INIT;
  inputs.tokens = slots.get();
  outputs.tokens = tokens.get();
  // NCCL EP's backward pass is the one with weights.
  config.pass_direction = NCCL_EP_FWD_PASS;
  if (args.topk_weights) {
    config.pass_direction = NCCL_EP_BWD_PASS;
    inputs.topk_weights = slot_weights.get();
    outputs.topk_weights = topk_weights.get();
  }
  return nccl.ncclEpCombine(handle, &inputs, &outputs, &config, stream);
}

}  // namespace ep::nccl
