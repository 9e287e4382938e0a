// SPDX-License-Identifier: Apache-2.0

// Tests what the tests of the backend rely on: that the fake finds violations
// of the contracts of the real libraries. That it accepts correct calls, and
// what these do, the conformance suite shows.

#include "ep_ffi/backends/nccl/fake/fake.h"

#include <cuda.h>
#include <gtest/gtest.h>
#include <nccl.h>
#include <nccl_ep.h>

#include <algorithm>
#include <future>
#include <sstream>
#include <thread>
#include <utility>

#include "ep_ffi/backends/nccl/kernels.h"

namespace ep::nccl::fake {
namespace {

constexpr int kRanks = 2;
constexpr size_t kTokens = 4, kTopK = 2, kSlots = 16, kWidth = 8;

void ExpectNoViolation() {
  EXPECT_EQ(std::vector<std::string>(), TakeViolations());
}

// Expects violations, and these words in the first of them.
void ExpectViolation(const std::string& words) {
  const std::vector<std::string> sentences = TakeViolations();
  const std::string first = sentences.empty() ? "nothing" : sentences[0];
  EXPECT_NE(std::string::npos, first.find(words))
      << "no \"" << words << "\" in: " << first;
}

// A descriptor that points to nothing yet. GCC warns of this in a template.
struct Undescribed {
  ncclEpTensor_t descriptor = NCCL_EP_TENSOR_INIT;
};

// A descriptor, and the data and sizes that it points to.
template <typename T>
struct Described : Undescribed {
  Described(ncclDataType_t type, std::vector<size_t> dims, T value)
      : sizes(std::move(dims)), data(1) {
    for (size_t size : sizes) data.resize(data.size() * size, value);
    data[0] = value;
    descriptor.ndim = sizes.size();
    descriptor.datatype = type;
    descriptor.data = data.data();
    descriptor.sizes = sizes.data();
  }
  Described(const Described&) = delete;

  std::vector<size_t> sizes;
  std::vector<T> data;
};

// A rank whose calls are all correct, unless a test changes their arguments.
struct Rank {
  explicit Rank(int rank) : rank(rank), owned_stream(NewStream(rank)) {
    dispatch_inputs.tokens = &tokens.descriptor;
    dispatch_inputs.topk_weights = &weights.descriptor;
    dispatch_outputs.tokens = &slots.descriptor;
    dispatch_outputs.topk_weights = &slot_weights.descriptor;
    combine_inputs.tokens = &slots.descriptor;
    combine_outputs.tokens = &tokens.descriptor;
    group_config.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
    group_config.num_experts = 4;
    group_config.max_dispatch_tokens_per_rank = kTokens;
    group_config.max_recv_tokens_per_rank = kSlots;
    group_config.max_token_bytes = kWidth * sizeof(float);
    handle_config.dispatch_output_per_expert_alignment = 2;
    for (size_t i = 0; i < topk_idx.data.size(); ++i) topk_idx.data[i] = i % 4;
  }

  void Connect(const ncclUniqueId& id) {
    ASSERT_EQ(CUDA_SUCCESS, cuInit(0));
    CUcontext context;
    ASSERT_EQ(CUDA_SUCCESS, cuDevicePrimaryCtxRetain(&context, rank));
    ASSERT_EQ(CUDA_SUCCESS, cuCtxPushCurrent(context));
    ASSERT_EQ(ncclSuccess, ncclCommInitRank(&comm, kRanks, id, rank));
  }
  ncclResult_t CreateGroup() {
    return ncclEpCreateGroup(&group, comm, &group_config);
  }
  ncclResult_t InitHandle() {
    return ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR,
                            &handle_config, kTopK, &mem.descriptor);
  }
  ncclResult_t Update() {
    return ncclEpUpdateHandle(handle, &topk_idx.descriptor,
                              /*layout_info=*/nullptr, stream);
  }
  ncclResult_t Dispatch() {
    return ncclEpDispatch(handle, &dispatch_inputs, &dispatch_outputs,
                          /*layout_info=*/nullptr, &dispatch_config, stream);
  }
  ncclResult_t Combine() {
    return ncclEpCombine(handle, &combine_inputs, &combine_outputs,
                         &combine_config, stream);
  }
  // Makes all calls in turn, until one fails.
  bool Run() {
    return CreateGroup() == ncclSuccess && InitHandle() == ncclSuccess &&
           Update() == ncclSuccess && Dispatch() == ncclSuccess &&
           Combine() == ncclSuccess;
  }
  void Close() {
    Synchronize(stream);
    if (handle) ncclEpHandleDestroy(handle);
    if (group) ncclEpGroupDestroy(group);
    if (comm) ncclCommDestroy(comm);
    cuCtxPopCurrent(nullptr);
    cuDevicePrimaryCtxRelease(rank);
  }

  const int rank;
  const std::shared_ptr<CUstream_st> owned_stream;
  const CUstream stream = owned_stream.get();
  ncclComm_t comm = nullptr;
  ncclEpGroup_t group = nullptr;
  ncclEpHandle_t handle = nullptr;
  Described<uint8_t> mem = {ncclUint8, {4096}, 0};
  Described<int64_t> topk_idx = {ncclInt64, {kTokens, kTopK}, 0};
  Described<float> tokens = {ncclFloat32, {kTokens, kWidth}, 1};
  Described<float> weights = {ncclFloat32, {kTokens, kTopK}, 0.5};
  Described<float> slots = {ncclFloat32, {kSlots, kWidth}, -1};
  Described<float> slot_weights = {ncclFloat32, {kSlots}, -1};
  ncclEpGroupConfig_t group_config = NCCL_EP_GROUP_CONFIG_INIT;
  ncclEpHandleConfig_t handle_config = NCCL_EP_HANDLE_CONFIG_INIT;
  ncclEpDispatchInputs_t dispatch_inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t dispatch_outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpCombineInputs_t combine_inputs = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t combine_outputs = NCCL_EP_COMBINE_OUTPUTS_INIT;
  ncclEpDispatchConfig_t dispatch_config = NCCL_EP_DISPATCH_CONFIG_INIT;
  ncclEpCombineConfig_t combine_config = NCCL_EP_COMBINE_CONFIG_INIT;
};

// A mistake, and the words of the violation that it is.
struct Mistake {
  const char* words;
  std::function<void(Rank&)> make;
};

class FakeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    TheMachine() = Machine();
    TheMachine().timeout_s = 2;
    ExpectNoViolation();
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
  // Runs `body` on ranks that have groups, open handles and a routing.
  void OnRoutedRanks(const std::function<void(Rank&)>& body) {
    OnRanks([&](Rank& rank) {
      ASSERT_EQ(ncclSuccess, rank.CreateGroup());
      ASSERT_EQ(ncclSuccess, rank.InitHandle());
      ASSERT_EQ(ncclSuccess, rank.Update());
      Synchronize(rank.stream);
      body(rank);
    });
  }
};

TEST_F(FakeTest, CorrectCallsAreNoViolations) {
  OnRanks([](Rank& rank) { EXPECT_TRUE(rank.Run()); });
  ExpectNoViolation();
}

// Each case makes one argument wrong and leaves all others right. There is one
// of each kind that the fake checks.
TEST_F(FakeTest, WrongArgumentsAreCaught) {
  const auto group = [](const char* words, auto change) {
    return Mistake{words, [=](Rank& r) { change(&r.group_config); }};
  };
  const Mistake mistakes[] = {
      group("config.size", [](auto* c) { --c->size; }),
      group("num_experts", [](auto* c) { c->num_experts = 5; }),
      group("max_token_bytes", [](auto* c) { c->max_token_bytes = 24; }),
      {"ranks have different configurations",
       [](Rank& r) { r.group_config.max_recv_tokens_per_rank += 4 * r.rank; }},
      {"alignment",
       [](Rank& r) {
         r.handle_config.dispatch_output_per_expert_alignment = 3;
       }},
      {".magic", [](Rank& r) { r.mem.descriptor.magic = NCCL_EP_MAGIC; }},
      {"bytes, expected", [](Rank& r) { r.mem.sizes[0] = 64; }},
      {"aligned", [](Rank& r) { r.mem.descriptor.data = &r.mem.data[8]; }},
      {"topk_idx[1, 1] = 4", [](Rank& r) { r.topk_idx.data[3] = 4; }},
      {"topk_idx[2, 1] = 0",
       [](Rank& r) { r.topk_idx.data[5] = r.topk_idx.data[4]; }},
      {"traps",
       [](Rank& r) {
         r.group_config.max_recv_tokens_per_rank = 4;
         r.slots.sizes[0] = r.slot_weights.sizes[0] = 4;
       }},
      {"inputs.tokens is missing",
       [](Rank& r) { r.dispatch_inputs.tokens = nullptr; }},
      {"rows of 16", [](Rank& r) { r.tokens.sizes[1] = 16; }},
      {"outputs.tokens is", [](Rank& r) { r.slots.sizes[0] = kSlots - 1; }},
      // This is how a backward pass looks whose direction is not set.
      {"inputs.topk_weights is missing",
       [](Rank& r) {
         r.dispatch_inputs.topk_weights = nullptr;
         r.dispatch_outputs.topk_weights = nullptr;
       }},
      {"the routing has 4",
       [](Rank& r) { r.tokens.sizes[0] = r.weights.sizes[0] = kTokens - 1; }},
      {"rank 0 calls",
       [](Rank& r) {
         if (r.rank == 0) return;
         r.tokens.descriptor.datatype = ncclBfloat16;
         r.slots.descriptor.datatype = ncclBfloat16;
       }},
      {"forward pass forbids",
       [](Rank& r) {
         r.combine_inputs.topk_weights = &r.slot_weights.descriptor;
       }},
  };
  for (const Mistake& mistake : mistakes) {
    SCOPED_TRACE(mistake.words);
    OnRanks([&](Rank& rank) {
      mistake.make(rank);
      rank.Run();
    });
    ExpectViolation(mistake.words);
  }
}

TEST_F(FakeTest, WrongCallsAreCaught) {
  void* memory;
  const auto launch = [](CUstream stream) {
    CUmodule own;
    CUfunction function;
    cuModuleLoadData(&own, "image");
    EXPECT_EQ(CUDA_SUCCESS,
              cuModuleGetFunction(&function, own, "EpSumChoices"));
    Routing routing = {};
    void* parameters[] = {&routing};
    cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, parameters, nullptr);
    cuModuleUnload(own);
  };
  const Mistake mistakes[] = {
      {"backward pass forbids",
       [](Rank& r) {
         r.dispatch_config.pass_direction = NCCL_EP_BWD_PASS;
         r.Dispatch();
       }},
      {"no routing",
       [](Rank& r) {
         ++r.mem.data[0];
         r.Dispatch();
       }},
      {"other attributes",
       [](Rank& r) {
         ncclEpHandleDestroy(r.handle);
         r.handle_config.dispatch_output_per_expert_alignment = 4;
         ASSERT_EQ(ncclSuccess, r.InitHandle());
         r.Dispatch();
       }},
      {"different updates",
       [](Rank& r) {
         const std::vector<uint8_t> old = r.mem.data;
         r.Update();
         Synchronize(r.stream);
         if (r.rank == 0) {
           std::copy(old.begin(), old.end(), r.mem.data.begin());
         }
         r.Dispatch();
       }},
      {"rank 0 calls",
       [](Rank& r) { r.rank == 0 ? r.Dispatch() : r.Combine(); }},
      {"timed out",
       [](Rank& r) {
         if (r.rank == 0) r.Dispatch();
       }},
      {"stale address",
       [](Rank& r) {
         const std::vector<std::byte> moved(4096);
         const InHandler handler(moved.data(), moved.size());
         r.Dispatch();
       }},
      {"a group of NCCL EP lives on it",
       [](Rank& r) { ncclCommDestroy(r.comm); }},
      {"handles are open", [](Rank& r) { ncclEpGroupDestroy(r.group); }},
      {"cuCtxSynchronize: waits or allocates",
       [](Rank&) {
         const InHandler handler(nullptr, 0);
         cuCtxSynchronize();
       }},
      {"is current, not that of",
       [&](Rank& r) { launch(NewStream(1 - r.rank).get()); }},
      {"no such stream", [&](Rank&) { launch(nullptr); }},
      {"no context is current",
       [&](Rank&) {
         CUcontext mine;
         cuCtxPopCurrent(&mine);
         cuMemHostAlloc(&memory, 8, 0);
         cuCtxPushCurrent(mine);
       }},
      {"did not make it", [](Rank& r) { cuMemFreeHost(&r); }},
  };
  TheMachine().timeout_s = 0.5;
  for (const Mistake& mistake : mistakes) {
    SCOPED_TRACE(mistake.words);
    OnRoutedRanks(mistake.make);
    ExpectViolation(mistake.words);
  }
}

TEST_F(FakeTest, TwoStreamsAtOnceAreCaught) {
  std::promise<void> seen;
  OnRoutedRanks([&](Rank& rank) {
    if (rank.rank == 1) seen.get_future().wait();
    rank.Dispatch();
    if (rank.rank == 1) return;
    const auto other = NewStream(rank.rank);
    EXPECT_NE(ncclSuccess, ncclEpCombine(rank.handle, &rank.combine_inputs,
                                         &rank.combine_outputs,
                                         &rank.combine_config, other.get()));
    seen.set_value();
  });
  ExpectViolation("two streams");
}

TEST_F(FakeTest, LiveObjectsAreCounted) {
  std::promise<void> counted;
  OnRoutedRanks([&](Rank& rank) {
    if (rank.rank == 1) return counted.get_future().wait();
    std::ostringstream counts;
    counts << CountResources();
    EXPECT_EQ(
        "2 contexts, 0 modules, 0 host allocations, 2 communicators, "
        "2 groups, 2 handles",
        counts.str());
    counted.set_value();
  });
  ExpectNoViolation();
}

}  // namespace
}  // namespace ep::nccl::fake
