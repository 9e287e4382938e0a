// SPDX-License-Identifier: Apache-2.0

// Tests that the fake NCCL EP catches invalid arguments. Each case makes one
// argument wrong and leaves all others right.

#include <gtest/gtest.h>
#include <nccl.h>
#include <nccl_ep.h>

#include <cstdint>
#include <functional>

#include "ep_ffi/backends/nccl/fake/fake.h"
#include "ep_ffi/backends/nccl/fake/test_ranks.h"

namespace ep::nccl::fake {
namespace {

using DescriptorsTest = FakeTest;

TEST_F(DescriptorsTest, CorrectCallsAreNoViolations) {
  OnRoutedRanks([](Rank& rank) {
    EXPECT_EQ(ncclSuccess, rank.Dispatch());
    EXPECT_EQ(ncclSuccess, rank.Combine());
    rank.dispatch_inputs.topk_weights = nullptr;
    rank.dispatch_outputs.topk_weights = nullptr;
    EXPECT_EQ(ncclSuccess, rank.Dispatch(&rank.backward_dispatch));
    rank.combine_inputs.topk_weights = &rank.slot_weights.descriptor;
    rank.combine_outputs.topk_weights = &rank.weights.descriptor;
    EXPECT_EQ(ncclSuccess, rank.Combine(&rank.backward_combine));
  });
  EXPECT_EQ("", Violations());
}

// Each rank has 8 choices of the experts 0, 1, 2, 3 in turn. So each of the 4
// experts gets 2 rows from each of the 2 ranks, a slab of 4 rows.
TEST_F(DescriptorsTest, CountersDescribeTheLayout) {
  OnOpenRanks([](Rank& rank) {
    int32_t sizes[2] = {-1, -1}, offsets[2] = {-1, -1}, total = -1;
    Described size_tensor = {ncclInt32, sizes, {2}};
    Described offset_tensor = {ncclInt32, offsets, {2}};
    Described total_tensor = {ncclInt32, &total, {1}};
    ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
    info.expert_counters = &size_tensor.descriptor;
    info.expert_offsets = &offset_tensor.descriptor;
    info.recv_total_counter = &total_tensor.descriptor;
    ncclEpUpdateHandle(rank.handle, &rank.topk_idx.descriptor, &info,
                       rank.stream());
    Synchronize(rank.stream());
    EXPECT_EQ(4, sizes[0]);
    EXPECT_EQ(4, sizes[1]);
    EXPECT_EQ(0, offsets[0]);
    EXPECT_EQ(4, offsets[1]);
    EXPECT_EQ(8, total);
  });
  EXPECT_EQ("", Violations());
}

TEST_F(DescriptorsTest, AWrongGroupIsCaught) {
  struct {
    const char* words;
    std::function<void(ncclEpGroupConfig_t*)> change;
  } cases[] = {
      {"config.size", [](auto* c) { --c->size; }},
      {"config.magic", [](auto* c) { c->magic = NCCL_EP_TENSOR_MAGIC; }},
      {"version", [](auto* c) { c->version = 1; }},
      {"algorithm", [](auto* c) { c->algorithm = NCCL_EP_ALGO_LOW_LATENCY; }},
      {"num_experts", [](auto* c) { c->num_experts = 5; }},
      {"num_experts", [](auto* c) { c->num_experts = 6; }},
      {"num_experts", [](auto* c) { c->num_experts = 516; }},
      {"max_dispatch", [](auto* c) { c->max_dispatch_tokens_per_rank = 6; }},
      {"max_dispatch", [](auto* c) { c->max_dispatch_tokens_per_rank = 0; }},
      {"max_recv", [](auto* c) { c->max_recv_tokens_per_rank = 3; }},
      {"max_token_bytes", [](auto* c) { c->max_token_bytes = 24; }},
      {"max_num_sms", [](auto* c) { c->max_num_sms = 17; }},
      {"zero copy", [](auto* c) { c->zero_copy = NCCL_EP_ZERO_COPY_ON; }},
      {"overflow", [](auto* c) { c->overflow_policy = NCCL_EP_OVERFLOW_DROP; }},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.words);
    OnRanks([&](Rank& rank) {
      c.change(&rank.group_config);
      EXPECT_NE(ncclSuccess, rank.CreateGroup());
    });
    ExpectViolation(c.words);
  }
}

TEST_F(DescriptorsTest, AnotherNcclIsCaught) {
  TheMachine().nccl_version = 23203;
  OnRanks([](Rank& rank) { EXPECT_NE(ncclSuccess, rank.CreateGroup()); });
  ExpectViolation("compiled for another NCCL");
}

TEST_F(DescriptorsTest, AWrongHandleIsCaught) {
  struct {
    const char* words;
    std::function<void(Rank&)> change;
  } cases[] = {
      {"config.size", [](Rank& r) { --r.handle_config.size; }},
      {"alignment",
       [](Rank& r) {
         r.handle_config.dispatch_output_per_expert_alignment = 3;
       }},
      {".magic", [](Rank& r) { r.mem.descriptor.magic = NCCL_EP_MAGIC; }},
      {".datatype", [](Rank& r) { r.mem.descriptor.datatype = ncclInt8; }},
      {".data is null", [](Rank& r) { r.mem.descriptor.data = nullptr; }},
      {"bytes, expected", [](Rank& r) { r.mem.sizes[0] = 64; }},
      {"aligned", [](Rank& r) { r.mem.descriptor.data = r.mem_data() + 8; }},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.words);
    OnRanks([&](Rank& rank) {
      ASSERT_EQ(ncclSuccess, rank.CreateGroup());
      c.change(rank);
      EXPECT_NE(ncclSuccess, rank.InitHandle());
    });
    ExpectViolation(c.words);
  }
}

TEST_F(DescriptorsTest, AWrongRoutingIsCaught) {
  struct {
    const char* words;
    std::function<void(Rank&)> change;
  } cases[] = {
      {"topk_idx.datatype",
       [](Rank& r) { r.topk_idx.descriptor.datatype = ncclInt32; }},
      {"topk_idx is", [](Rank& r) { r.topk_idx.sizes[0] = kTokens + 1; }},
      {"topk_idx is", [](Rank& r) { r.topk_idx.sizes[1] = 1; }},
      {"topk_idx[1, 1] = 4", [](Rank& r) { r.ids()[3] = 4; }},
      {"topk_idx[2, 1] = 0", [](Rank& r) { r.ids()[5] = r.ids()[4]; }},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.words);
    OnOpenRanks([&](Rank& rank) {
      c.change(rank);
      rank.Update();
    });
    ExpectViolation(c.words);
  }
}

TEST_F(DescriptorsTest, AWrongDispatchIsCaught) {
  struct {
    const char* words;
    std::function<void(Rank&)> change;
  } cases[] = {
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
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.words);
    OnRoutedRanks([&](Rank& rank) {
      c.change(rank);
      EXPECT_NE(ncclSuccess, rank.Dispatch());
    });
    ExpectViolation(c.words);
  }
}

TEST_F(DescriptorsTest, WeightsOfABackwardDispatchAreCaught) {
  OnRoutedRanks([](Rank& rank) { rank.Dispatch(&rank.backward_dispatch); });
  ExpectViolation("backward pass forbids");
}

TEST_F(DescriptorsTest, LayoutInfoOfADispatchIsCaught) {
  OnRoutedRanks([](Rank& rank) {
    const ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
    ncclEpDispatch(rank.handle, &rank.dispatch_inputs, &rank.dispatch_outputs,
                   &info, nullptr, rank.stream());
  });
  ExpectViolation("layout_info");
}

TEST_F(DescriptorsTest, WeightsOfAForwardCombineAreCaught) {
  OnRoutedRanks([](Rank& rank) {
    rank.combine_inputs.topk_weights = &rank.slot_weights.descriptor;
    rank.Combine();
  });
  ExpectViolation("forward pass forbids");
}

TEST_F(DescriptorsTest, ABackwardCombineWithoutWeightsIsCaught) {
  OnRoutedRanks([](Rank& rank) { rank.Combine(&rank.backward_combine); });
  ExpectViolation("inputs.topk_weights is missing");
}

}  // namespace
}  // namespace ep::nccl::fake
