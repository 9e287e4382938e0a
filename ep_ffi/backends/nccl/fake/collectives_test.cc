// SPDX-License-Identifier: Apache-2.0

// Tests that the fake catches invalid collectives, and invalid uses of the
// objects that ranks have created.

#include <cuda.h>
#include <gtest/gtest.h>
#include <nccl.h>
#include <nccl_ep.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <future>
#include <sstream>
#include <thread>
#include <vector>

#include "ep_ffi/backends/nccl/fake/fake.h"
#include "ep_ffi/backends/nccl/fake/test_ranks.h"

namespace ep::nccl::fake {
namespace {

using CollectivesTest = FakeTest;

TEST_F(CollectivesTest, RanksWithDifferentGroupsAreCaught) {
  OnRanks([](Rank& rank) {
    rank.group_config.max_recv_tokens_per_rank += 4 * rank.rank();
    EXPECT_NE(ncclSuccess, rank.CreateGroup());
  });
  ExpectViolation("ranks have different configurations");
}

TEST_F(CollectivesTest, AnotherLayoutOfRowsIsCaught) {
  setenv("NCCL_EP_HT_EM_LOCAL_DUP", "1", /*overwrite=*/1);
  OnRanks([](Rank& rank) { rank.CreateGroup(); });
  unsetenv("NCCL_EP_HT_EM_LOCAL_DUP");
  ExpectViolation("LOCAL_DUP");
}

TEST_F(CollectivesTest, AnOverflowIsCaught) {
  OnRanks([](Rank& rank) {
    rank.group_config.max_recv_tokens_per_rank = 4;
    ASSERT_EQ(ncclSuccess, rank.CreateGroup());
    ASSERT_EQ(ncclSuccess, rank.InitHandle());
    rank.Update();
  });
  ExpectViolation("traps");
}

TEST_F(CollectivesTest, TokensOfAnotherNumberThanRoutedAreCaught) {
  OnRoutedRanks([](Rank& rank) {
    rank.tokens.sizes[0] = rank.weights.sizes[0] = kTokens - 1;
    rank.Dispatch();
  });
  ExpectViolation("the routing has 4");
}

TEST_F(CollectivesTest, AHandleThatWasNeverUpdatedIsCaught) {
  OnOpenRanks([](Rank& rank) {
    rank.mem_data()[1] = std::byte{1};
    rank.Dispatch();
  });
  ExpectViolation("no routing");
}

TEST_F(CollectivesTest, AHandleOfZerosMovesNothing) {
  OnOpenRanks([](Rank& rank) {
    EXPECT_EQ(ncclSuccess, rank.Dispatch());
    Synchronize(rank.stream());
    EXPECT_EQ(-1, *static_cast<float*>(rank.slots.descriptor.data));
  });
  EXPECT_EQ("", Violations());
}

TEST_F(CollectivesTest, OtherAttributesThanTheRoutingsAreCaught) {
  OnRoutedRanks([](Rank& rank) {
    ncclEpHandleDestroy(rank.handle);
    rank.handle_config.dispatch_output_per_expert_alignment = 4;
    ASSERT_EQ(ncclSuccess, rank.InitHandle());
    rank.Dispatch();
  });
  ExpectViolation("other attributes");
}

TEST_F(CollectivesTest, RoutingsThatWereNotMadeTogetherAreCaught) {
  OnRoutedRanks([](Rank& rank) {
    Synchronize(rank.stream());
    std::vector<std::byte> old(rank.mem_data(), rank.mem_data() + 4096);
    rank.Update();
    Synchronize(rank.stream());
    if (rank.rank() == 0) std::copy(old.begin(), old.end(), rank.mem_data());
    rank.Dispatch();
  });
  ExpectViolation("different updates");
}

TEST_F(CollectivesTest, RowsThatDifferBetweenRanksAreCaught) {
  OnRoutedRanks([](Rank& rank) {
    if (rank.rank() == 1) {
      rank.tokens.descriptor.datatype = ncclBfloat16;
      rank.slots.descriptor.datatype = ncclBfloat16;
    }
    rank.Dispatch();
  });
  ExpectViolation("rank 0 calls");
}

TEST_F(CollectivesTest, OpsInDifferentOrdersAreCaught) {
  OnRoutedRanks(
      [](Rank& rank) { rank.rank() == 0 ? rank.Dispatch() : rank.Combine(); });
  ExpectViolation("rank 0 calls");
}

TEST_F(CollectivesTest, ARankThatDoesNotJoinIsCaught) {
  TheMachine().timeout_s = 0.1;
  OnRoutedRanks([](Rank& rank) {
    if (rank.rank() == 0) rank.Dispatch();
  });
  ExpectViolation("timed out");
}

TEST_F(CollectivesTest, AnAbortEndsTheWait) {
  OnRanks([](Rank& rank) {
    int32_t mine = 0, all[kRanks];
    if (rank.rank() == 0) {
      ncclAllGather(&mine, all, 1, ncclInt32, rank.comm, rank.stream());
    }
    ncclCommAbort(rank.comm);
    Synchronize(rank.stream());
    rank.comm = nullptr;
  });
  EXPECT_EQ("", Violations());
}

TEST_F(CollectivesTest, TwoStreamsAtOnceAreCaught) {
  std::promise<void> seen;
  OnRoutedRanks([&](Rank& rank) {
    if (rank.rank() == 1) seen.get_future().wait();
    rank.Dispatch();
    if (rank.rank() == 1) return;
    const auto other = NewStream(rank.rank());
    EXPECT_NE(ncclSuccess,
              ncclEpCombine(rank.handle, &rank.combine_inputs,
                            &rank.combine_outputs, nullptr, other.get()));
    seen.set_value();
  });
  ExpectViolation("two streams");
}

TEST_F(CollectivesTest, CapturedTasksRunWhenTheyAreReplayed) {
  OnRoutedRanks([](Rank& rank) {
    ASSERT_EQ(ncclSuccess, rank.Dispatch());  // loads the kernels
    Synchronize(rank.stream());
    float* slots = static_cast<float*>(rank.slots.descriptor.data);
    slots[0] = -1;
    Capture capture(rank.stream());
    EXPECT_EQ(ncclSuccess, rank.Dispatch());
    capture.End();
    Synchronize(rank.stream());
    EXPECT_EQ(-1, slots[0]);
    for (int i = 0; i < 2; ++i) {
      slots[0] = -1;
      capture.Replay(rank.stream());
      Synchronize(rank.stream());
      EXPECT_EQ(1, slots[0]);
    }
  });
  EXPECT_EQ("", Violations());
}

// The first launch loads a module and may even fork a compiler.
TEST_F(CollectivesTest, TheFirstLaunchUnderCaptureIsCaught) {
  OnRoutedRanks([](Rank& rank) {
    for (Described* rows : {&rank.tokens, &rank.slots}) {
      rows->descriptor.datatype = ncclFloat16;  // no other test loads these
    }
    const Capture capture(rank.stream());
    EXPECT_NE(ncclSuccess, rank.Dispatch());
  });
  ExpectViolation("loads kernels while the stream is captured");
}

// XLA orders ops by their stream, and a command buffer does not keep this
// order.
TEST_F(CollectivesTest, AReplayBesideAnotherStreamIsCaught) {
  std::promise<void> seen;
  OnRoutedRanks([&](Rank& rank) {
    rank.Combine();
    Synchronize(rank.stream());
    if (rank.rank() == 1) seen.get_future().wait();
    rank.Combine();
    if (rank.rank() == 1) return;
    const auto other = NewStream(rank.rank());
    Capture capture(other.get());
    EXPECT_EQ(ncclSuccess,
              ncclEpCombine(rank.handle, &rank.combine_inputs,
                            &rank.combine_outputs, nullptr, other.get()));
    capture.End();
    capture.Replay(other.get());
    seen.set_value();
  });
  ExpectViolation("two streams");
}

TEST_F(CollectivesTest, AStaleAddressIsCaught) {
  OnRoutedRanks([](Rank& rank) {
    const std::vector<std::byte> moved(4096);
    const InHandler handler(moved.data(), moved.size());
    rank.Dispatch();
  });
  ExpectViolation("stale address");
}

TEST_F(CollectivesTest, AGroupThatOutlivesItsCommunicatorIsCaught) {
  OnOpenRanks([](Rank& rank) { ncclCommDestroy(rank.comm); });
  ExpectViolation("a group of NCCL EP lives on it");
}

TEST_F(CollectivesTest, AHandleThatOutlivesItsGroupIsCaught) {
  OnOpenRanks([](Rank& rank) { ncclEpGroupDestroy(rank.group); });
  ExpectViolation("handles are open");
}

TEST_F(CollectivesTest, LiveObjectsAreCounted) {
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
    if (rank.rank() == 0) {
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
  EXPECT_EQ("", Violations());
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

TEST_F(CollectivesTest, RanksOnOneDeviceNeedPermission) {
  ConnectOnOneDevice(2, ncclInvalidUsage);
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", /*overwrite=*/1);
  ConnectOnOneDevice(2, ncclSuccess);
  EXPECT_EQ("", Violations());
  ConnectOnOneDevice(3, ncclInvalidUsage);
  ExpectViolation("3 ranks share a device and NCCL_MAX_CTAS");
  setenv("NCCL_MAX_CTAS", "4", /*overwrite=*/1);
  ConnectOnOneDevice(4, ncclSuccess);
  unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
  unsetenv("NCCL_MAX_CTAS");
  EXPECT_EQ("", Violations());
}

}  // namespace
}  // namespace ep::nccl::fake
