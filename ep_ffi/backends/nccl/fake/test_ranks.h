// SPDX-License-Identifier: Apache-2.0

// Ranks that call NCCL EP directly, for tests of the fake.

#ifndef EP_FFI_BACKENDS_NCCL_FAKE_TEST_RANKS_H_
#define EP_FFI_BACKENDS_NCCL_FAKE_TEST_RANKS_H_

#include <cuda.h>
#include <gtest/gtest.h>
#include <nccl.h>
#include <nccl_ep.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ep_ffi/backends/nccl/fake/fake.h"

namespace ep::nccl::fake {

inline constexpr int kRanks = 2;
inline constexpr size_t kTokens = 4;
inline constexpr size_t kTopK = 2;
inline constexpr size_t kSlots = 16;
inline constexpr size_t kWidth = 8;

// Returns the violations, one per line, and forgets them.
inline std::string Violations() {
  std::string lines;
  for (const std::string& sentence : TakeViolations()) lines += sentence + "\n";
  return lines;
}

// Expects violations, and these words in the first of them.
inline void ExpectViolation(const std::string& words) {
  const std::vector<std::string> sentences = TakeViolations();
  if (sentences.empty()) {
    ADD_FAILURE() << "there is no violation with the words: " << words;
    return;
  }
  EXPECT_NE(std::string::npos, sentences[0].find(words))
      << "no \"" << words << "\" in: " << sentences[0];
}

// A descriptor and the sizes that it points to.
struct Described {
  Described(ncclDataType_t type, void* data, std::vector<size_t> dims)
      : sizes(std::move(dims)) {
    descriptor.ndim = sizes.size();
    descriptor.datatype = type;
    descriptor.data = data;
    descriptor.sizes = sizes.data();
  }
  Described(const Described&) = delete;

  std::vector<size_t> sizes;
  ncclEpTensor_t descriptor = NCCL_EP_TENSOR_INIT;
};

// A rank whose calls are all correct, unless a test changes their arguments.
class Rank {
 public:
  explicit Rank(int rank) : stream_(NewStream(rank)), rank_(rank) {
    dispatch_inputs.tokens = &tokens.descriptor;
    dispatch_inputs.topk_weights = &weights.descriptor;
    dispatch_outputs.tokens = &slots.descriptor;
    dispatch_outputs.topk_weights = &slot_weights.descriptor;
    combine_inputs.tokens = &slots.descriptor;
    combine_outputs.tokens = &tokens.descriptor;
    backward_dispatch.pass_direction = NCCL_EP_BWD_PASS;
    backward_combine.pass_direction = NCCL_EP_BWD_PASS;
    group_config.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
    group_config.num_experts = 4;
    group_config.max_dispatch_tokens_per_rank = kTokens;
    group_config.max_recv_tokens_per_rank = kSlots;
    group_config.max_token_bytes = kWidth * sizeof(float);
    handle_config.dispatch_output_per_expert_alignment = 2;
    for (size_t i = 0; i < ids_.size(); ++i) ids_[i] = i % 4;
  }

  void Connect(const ncclUniqueId& id) {
    ASSERT_EQ(CUDA_SUCCESS, cuInit(0));
    CUcontext context;
    ASSERT_EQ(CUDA_SUCCESS, cuDevicePrimaryCtxRetain(&context, rank_));
    ASSERT_EQ(CUDA_SUCCESS, cuCtxPushCurrent(context));
    ASSERT_EQ(ncclSuccess, ncclCommInitRank(&comm, kRanks, id, rank_));
  }
  ncclResult_t CreateGroup() {
    return ncclEpCreateGroup(&group, comm, &group_config);
  }
  ncclResult_t InitHandle() {
    return ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR,
                            &handle_config, kTopK, &mem.descriptor);
  }
  ncclResult_t Update() {
    return ncclEpUpdateHandle(handle, &topk_idx.descriptor, nullptr, stream());
  }
  ncclResult_t Dispatch(const ncclEpDispatchConfig_t* config = nullptr) {
    return ncclEpDispatch(handle, &dispatch_inputs, &dispatch_outputs, nullptr,
                          config, stream());
  }
  ncclResult_t Combine(const ncclEpCombineConfig_t* config = nullptr) {
    return ncclEpCombine(handle, &combine_inputs, &combine_outputs, config,
                         stream());
  }
  void Close() {
    Synchronize(stream());
    if (handle) ncclEpHandleDestroy(handle);
    if (group) ncclEpGroupDestroy(group);
    if (comm) ncclCommDestroy(comm);
    cuCtxPopCurrent(nullptr);
    cuDevicePrimaryCtxRelease(rank_);
  }

  int rank() const { return rank_; }
  CUstream stream() const { return stream_.get(); }
  int64_t* ids() { return ids_.data(); }
  std::byte* mem_data() { return mem_.data(); }

  ncclComm_t comm = nullptr;
  ncclEpGroup_t group = nullptr;
  ncclEpHandle_t handle = nullptr;
  ncclEpGroupConfig_t group_config = NCCL_EP_GROUP_CONFIG_INIT;
  ncclEpHandleConfig_t handle_config = NCCL_EP_HANDLE_CONFIG_INIT;
  ncclEpDispatchInputs_t dispatch_inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t dispatch_outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpCombineInputs_t combine_inputs = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t combine_outputs = NCCL_EP_COMBINE_OUTPUTS_INIT;
  ncclEpDispatchConfig_t backward_dispatch = NCCL_EP_DISPATCH_CONFIG_INIT;
  ncclEpCombineConfig_t backward_combine = NCCL_EP_COMBINE_CONFIG_INIT;

 private:
  std::vector<std::byte> mem_ = std::vector<std::byte>(4096);
  std::vector<int64_t> ids_ = std::vector<int64_t>(kTokens * kTopK);
  std::vector<float> tokens_ = std::vector<float>(kTokens * kWidth, 1);
  std::vector<float> weights_ = std::vector<float>(kTokens * kTopK, 0.5);
  std::vector<float> slots_ = std::vector<float>(kSlots * kWidth, -1);
  std::vector<float> slot_weights_ = std::vector<float>(kSlots, -1);
  const std::shared_ptr<CUstream_st> stream_;
  const int rank_;

 public:
  Described mem = {ncclUint8, mem_.data(), {mem_.size()}};
  Described topk_idx = {ncclInt64, ids_.data(), {kTokens, kTopK}};
  Described tokens = {ncclFloat32, tokens_.data(), {kTokens, kWidth}};
  Described weights = {ncclFloat32, weights_.data(), {kTokens, kTopK}};
  Described slots = {ncclFloat32, slots_.data(), {kSlots, kWidth}};
  Described slot_weights = {ncclFloat32, slot_weights_.data(), {kSlots}};
};

class FakeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    TheMachine() = Machine();
    TheMachine().timeout_s = 2;
    EXPECT_EQ("", Violations());
  }

  // Runs `body` on connected ranks, each on a thread of its own.
  void OnRanks(const std::function<void(Rank&)>& body) {
    ncclUniqueId id;
    ncclGetUniqueId(&id);
    std::vector<std::thread> threads;
    for (int i = 0; i < kRanks; ++i) {
      threads.emplace_back([&body, id, i] {
        Rank rank(i);
        rank.Connect(id);
        body(rank);
        rank.Close();
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(Resources(), CountResources());
  }
  // Runs `body` on ranks that have groups and open handles.
  void OnOpenRanks(const std::function<void(Rank&)>& body) {
    OnRanks([&](Rank& rank) {
      ASSERT_EQ(ncclSuccess, rank.CreateGroup());
      ASSERT_EQ(ncclSuccess, rank.InitHandle());
      body(rank);
    });
  }
  // Runs `body` on ranks that have a routing as well.
  void OnRoutedRanks(const std::function<void(Rank&)>& body) {
    OnOpenRanks([&](Rank& rank) {
      ASSERT_EQ(ncclSuccess, rank.Update());
      body(rank);
    });
  }
};

}  // namespace ep::nccl::fake

#endif  // EP_FFI_BACKENDS_NCCL_FAKE_TEST_RANKS_H_
