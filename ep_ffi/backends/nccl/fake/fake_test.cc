// SPDX-License-Identifier: Apache-2.0

// Tests what the tests of the backend rely on: that the fake accepts correct
// calls, and finds each violation of the contracts of the real libraries.

#include "ep_ffi/backends/nccl/fake/fake.h"

#include <cuda.h>
#include <gtest/gtest.h>
#include <nccl.h>
#include <nccl_ep.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <future>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

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
    backward_dispatch.pass_direction = NCCL_EP_BWD_PASS;
    backward_combine.pass_direction = NCCL_EP_BWD_PASS;
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
  ncclResult_t Update(const ncclEpLayoutInfo_t* info = nullptr) {
    return ncclEpUpdateHandle(handle, &topk_idx.descriptor, info, stream);
  }
  ncclResult_t Dispatch(const ncclEpDispatchConfig_t* config = nullptr,
                        const ncclEpLayoutInfo_t* info = nullptr) {
    return ncclEpDispatch(handle, &dispatch_inputs, &dispatch_outputs, info,
                          config, stream);
  }
  ncclResult_t Combine(const ncclEpCombineConfig_t* config = nullptr) {
    return ncclEpCombine(handle, &combine_inputs, &combine_outputs, config,
                         stream);
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
  ncclEpDispatchConfig_t backward_dispatch = NCCL_EP_DISPATCH_CONFIG_INIT;
  ncclEpCombineConfig_t backward_combine = NCCL_EP_COMBINE_CONFIG_INIT;
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
      Synchronize(rank.stream);
      body(rank);
    });
  }
};

// Each rank has 8 choices of the experts 0, 1, 2, 3 in turn. So each of the 4
// experts gets 2 rows from each of the 2 ranks, a slab of 4 rows.
TEST_F(FakeTest, CorrectCallsAreNoViolations) {
  OnOpenRanks([](Rank& rank) {
    Described<int32_t> sizes = {ncclInt32, {2}, -1};
    Described<int32_t> offsets = {ncclInt32, {2}, -1};
    Described<int32_t> total = {ncclInt32, {1}, -1};
    ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
    info.expert_counters = &sizes.descriptor;
    info.expert_offsets = &offsets.descriptor;
    info.recv_total_counter = &total.descriptor;
    EXPECT_EQ(ncclSuccess, rank.Update(&info));
    EXPECT_EQ(ncclSuccess, rank.Dispatch());
    EXPECT_EQ(ncclSuccess, rank.Combine());
    rank.dispatch_inputs.topk_weights = nullptr;
    rank.dispatch_outputs.topk_weights = nullptr;
    EXPECT_EQ(ncclSuccess, rank.Dispatch(&rank.backward_dispatch));
    rank.combine_inputs.topk_weights = &rank.slot_weights.descriptor;
    rank.combine_outputs.topk_weights = &rank.weights.descriptor;
    EXPECT_EQ(ncclSuccess, rank.Combine(&rank.backward_combine));
    Synchronize(rank.stream);
    EXPECT_EQ((std::vector<int32_t>{4, 4}), sizes.data);
    EXPECT_EQ((std::vector<int32_t>{0, 4}), offsets.data);
    EXPECT_EQ(8, total.data[0]);
  });
  ExpectNoViolation();
}

TEST_F(FakeTest, AHandleOfZerosMovesNothing) {
  OnOpenRanks([](Rank& rank) {
    EXPECT_EQ(ncclSuccess, rank.Dispatch());
    Synchronize(rank.stream);
    EXPECT_EQ(-1, rank.slots.data[0]);
  });
  ExpectNoViolation();
}

// Each case makes one argument wrong and leaves all others right.
TEST_F(FakeTest, WrongArgumentsAreCaught) {
  const auto group = [](const char* words, auto change) {
    return Mistake{words, [=](Rank& r) { change(&r.group_config); }};
  };
  const Mistake mistakes[] = {
      group("config.size", [](auto* c) { --c->size; }),
      group("config.magic", [](auto* c) { c->magic = NCCL_EP_TENSOR_MAGIC; }),
      group("version", [](auto* c) { c->version = 1; }),
      group("algorithm",
            [](auto* c) { c->algorithm = NCCL_EP_ALGO_LOW_LATENCY; }),
      group("num_experts", [](auto* c) { c->num_experts = 5; }),
      group("num_experts", [](auto* c) { c->num_experts = 6; }),
      group("num_experts", [](auto* c) { c->num_experts = 516; }),
      group("max_dispatch",
            [](auto* c) { c->max_dispatch_tokens_per_rank = 6; }),
      group("max_dispatch",
            [](auto* c) { c->max_dispatch_tokens_per_rank = 0; }),
      group("max_recv", [](auto* c) { c->max_recv_tokens_per_rank = 3; }),
      group("max_token_bytes", [](auto* c) { c->max_token_bytes = 24; }),
      group("max_num_sms", [](auto* c) { c->max_num_sms = 17; }),
      group("zero copy", [](auto* c) { c->zero_copy = NCCL_EP_ZERO_COPY_ON; }),
      group("overflow",
            [](auto* c) { c->overflow_policy = NCCL_EP_OVERFLOW_DROP; }),
      {"ranks have different configurations",
       [](Rank& r) { r.group_config.max_recv_tokens_per_rank += 4 * r.rank; }},
      {"config.size", [](Rank& r) { --r.handle_config.size; }},
      {"alignment",
       [](Rank& r) {
         r.handle_config.dispatch_output_per_expert_alignment = 3;
       }},
      {".magic", [](Rank& r) { r.mem.descriptor.magic = NCCL_EP_MAGIC; }},
      {".datatype", [](Rank& r) { r.mem.descriptor.datatype = ncclInt8; }},
      {".data is null", [](Rank& r) { r.mem.descriptor.data = nullptr; }},
      {"bytes, expected", [](Rank& r) { r.mem.sizes[0] = 64; }},
      {"aligned", [](Rank& r) { r.mem.descriptor.data = &r.mem.data[8]; }},
      {"topk_idx.datatype",
       [](Rank& r) { r.topk_idx.descriptor.datatype = ncclInt32; }},
      {"topk_idx is", [](Rank& r) { r.topk_idx.sizes[0] = kTokens + 1; }},
      {"topk_idx is", [](Rank& r) { r.topk_idx.sizes[1] = 1; }},
      {"topk_idx[1, 1] = 4", [](Rank& r) { r.topk_idx.data[3] = 4; }},
      {"topk_idx[2, 1] = 0",
       [](Rank& r) { r.topk_idx.data[5] = r.topk_idx.data[4]; }},
      {"traps",
       [](Rank& r) {
         r.group_config.max_recv_tokens_per_rank = 4;
         r.slots.sizes[0] = r.slot_weights.sizes[0] = 4;
       }},
      {"inputs.size", [](Rank& r) { r.dispatch_inputs.size += 8; }},
      {"outputs.magic", [](Rank& r) { r.dispatch_outputs.magic = 0; }},
      {"inputs.tokens is missing",
       [](Rank& r) { r.dispatch_inputs.tokens = nullptr; }},
      {"inputs.tokens has 1 dim",
       [](Rank& r) { r.tokens.descriptor.ndim = 1; }},
      {"inputs.tokens.datatype",
       [](Rank& r) { r.tokens.descriptor.datatype = ncclInt32; }},
      {"rows of 4", [](Rank& r) { r.tokens.sizes[1] = 4; }},
      {"rows of 16", [](Rank& r) { r.tokens.sizes[1] = 16; }},
      {"outputs.tokens is", [](Rank& r) { r.slots.sizes[0] = kSlots - 1; }},
      // This is how a backward pass looks whose direction is not set.
      {"inputs.topk_weights is missing",
       [](Rank& r) {
         r.dispatch_inputs.topk_weights = nullptr;
         r.dispatch_outputs.topk_weights = nullptr;
       }},
      {"outputs.topk_weights has 2 dim",
       [](Rank& r) {
         r.dispatch_outputs.topk_weights = &r.weights.descriptor;
       }},
      {"topk_idx has no meaning",
       [](Rank& r) { r.dispatch_outputs.topk_idx = &r.topk_idx.descriptor; }},
      {"scales",
       [](Rank& r) { r.dispatch_inputs.scales = &r.tokens.descriptor; }},
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
  const ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
  const Mistake mistakes[] = {
      {"backward pass forbids",
       [](Rank& r) { r.Dispatch(&r.backward_dispatch); }},
      {"layout_info", [&](Rank& r) { r.Dispatch(nullptr, &info); }},
      {"inputs.topk_weights is missing",
       [](Rank& r) { r.Combine(&r.backward_combine); }},
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
    EXPECT_NE(ncclSuccess,
              ncclEpCombine(rank.handle, &rank.combine_inputs,
                            &rank.combine_outputs, nullptr, other.get()));
    seen.set_value();
  });
  ExpectViolation("two streams");
}

TEST_F(FakeTest, AnAbortEndsTheWait) {
  OnRanks([](Rank& rank) {
    int32_t mine = 0, all[kRanks];
    if (rank.rank == 0) {
      ncclAllGather(&mine, all, 1, ncclInt32, rank.comm, rank.stream);
    }
    ncclCommAbort(rank.comm);
    Synchronize(rank.stream);
    rank.comm = nullptr;
  });
  ExpectNoViolation();
}

TEST_F(FakeTest, AnotherLibraryOrLayoutIsCaught) {
  setenv("NCCL_EP_HT_EM_LOCAL_DUP", "1", /*overwrite=*/1);
  OnRanks([](Rank& rank) { rank.CreateGroup(); });
  unsetenv("NCCL_EP_HT_EM_LOCAL_DUP");
  ExpectViolation("LOCAL_DUP");
  TheMachine().nccl_version = 23203;
  OnRanks([](Rank& rank) { rank.CreateGroup(); });
  ExpectViolation("compiled for another NCCL");
}

TEST_F(FakeTest, LiveObjectsAreCounted) {
  std::atomic<int> num_ready{0}, num_counted{0};
  const auto await_all = [](std::atomic<int>* count) {
    for (++*count; *count < kRanks;) std::this_thread::yield();
  };
  OnOpenRanks([&](Rank& rank) {
    CUmodule module;
    cuModuleLoadData(&module, "image");
    void* memory;
    cuMemHostAlloc(&memory, 8, 0);
    await_all(&num_ready);
    if (rank.rank == 0) {
      std::ostringstream counts;
      counts << CountResources();
      EXPECT_EQ(
          "2 contexts, 2 modules, 2 host allocations, 2 communicators, "
          "2 groups, 2 handles",
          counts.str());
    }
    await_all(&num_counted);
    cuModuleUnload(module);
    cuMemFreeHost(memory);
  });
  ExpectNoViolation();
}

// Connects `num_ranks` ranks on one device, and expects a result of each.
void ConnectOnOneDevice(int num_ranks, ncclResult_t expected) {
  cuInit(0);
  ncclUniqueId id;
  ncclGetUniqueId(&id);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([=] {
      CUcontext context;
      cuDevicePrimaryCtxRetain(&context, 0);
      cuCtxPushCurrent(context);
      ncclComm_t comm = nullptr;
      EXPECT_EQ(expected, ncclCommInitRank(&comm, num_ranks, id, rank));
      if (comm) ncclCommDestroy(comm);
      cuCtxPopCurrent(nullptr);
      cuDevicePrimaryCtxRelease(0);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(FakeTest, RanksOnOneDeviceNeedPermission) {
  ConnectOnOneDevice(2, ncclInvalidUsage);
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", /*overwrite=*/1);
  ConnectOnOneDevice(2, ncclSuccess);
  ExpectNoViolation();
  ConnectOnOneDevice(3, ncclInvalidUsage);
  ExpectViolation("3 ranks share a device and NCCL_MAX_CTAS");
  setenv("NCCL_MAX_CTAS", "4", /*overwrite=*/1);
  ConnectOnOneDevice(4, ncclSuccess);
  unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
  unsetenv("NCCL_MAX_CTAS");
  ExpectNoViolation();
}

TEST_F(FakeTest, WrongCallsOfTheDriverAreCaught) {
  const auto launch = [](CUstream stream, unsigned blocks, unsigned threads) {
    CUmodule module;
    CUfunction function;
    cuModuleLoadData(&module, "image");
    EXPECT_EQ(CUDA_SUCCESS,
              cuModuleGetFunction(&function, module, "EpSumChoices"));
    Routing routing = {};
    void* parameters[] = {&routing};
    const CUresult result = cuLaunchKernel(function, blocks, 1, 1, threads, 1,
                                           1, 0, stream, parameters, nullptr);
    cuModuleUnload(module);
    return result;
  };
  const auto in_handler = [](auto call) {
    return [call](Rank&) {
      const InHandler handler(nullptr, 0);
      call();
    };
  };
  void* memory;
  CUmodule module;
  CUcontext context;
  const Mistake mistakes[] = {
      {"cuCtxSynchronize: waits or allocates",
       in_handler([] { cuCtxSynchronize(); })},
      {"cuMemHostAlloc: waits or allocates",
       in_handler([&] { cuMemHostAlloc(&memory, 8, 0); })},
      {"cuModuleLoadData: waits or allocates",
       in_handler([&] { cuModuleLoadData(&module, "image"); })},
      {"cuDevicePrimaryCtxRetain: waits or allocates",
       in_handler([&] { cuDevicePrimaryCtxRetain(&context, 0); })},
      {"cuDevicePrimaryCtxRelease: waits or allocates",
       in_handler([] { cuDevicePrimaryCtxRelease(0); })},
      {"is current, not that of",
       [&](Rank& r) { launch(NewStream(1 - r.rank).get(), 1, 1); }},
      {"no such stream", [&](Rank&) { launch(nullptr, 1, 1); }},
      {"no context is current",
       [&](Rank&) {
         CUcontext mine;
         cuCtxPopCurrent(&mine);
         cuMemHostAlloc(&memory, 8, 0);
         cuCtxPushCurrent(mine);
       }},
      {"did not make it", [](Rank& r) { cuMemFreeHost(&r); }},
  };
  for (const Mistake& mistake : mistakes) {
    SCOPED_TRACE(mistake.words);
    OnRanks(mistake.make);
    ExpectViolation(mistake.words);
  }
  OnRanks([&](Rank& r) {
    EXPECT_EQ(CUDA_SUCCESS, launch(r.stream, 1, 1024));
    EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, launch(r.stream, 0, 256));
    EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, launch(r.stream, 1, 1025));
  });
  ExpectNoViolation();
}

TEST_F(FakeTest, OnlyMappedMemoryHasADeviceAddress) {
  OnRanks([](Rank&) {
    for (unsigned flags : {0, CU_MEMHOSTALLOC_DEVICEMAP}) {
      void* memory;
      ASSERT_EQ(CUDA_SUCCESS, cuMemHostAlloc(&memory, 8, flags));
      CUdeviceptr address;
      EXPECT_EQ(flags ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE,
                cuMemHostGetDevicePointer(&address, memory, 0));
      cuMemFreeHost(memory);
    }
  });
  ExpectNoViolation();
}

}  // namespace
}  // namespace ep::nccl::fake
