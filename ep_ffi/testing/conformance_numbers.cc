// SPDX-License-Identifier: Apache-2.0

// Conformance: every op writes the rows and weights of the numeric contract.

#include <gtest/gtest.h>

#include <type_traits>

#include "ep_ffi/testing/conformance.h"

namespace ep::testing {
namespace {

TEST_P(GatherConformance, EveryOpMatchesTheOracle) {
  for (int i = 0; i < 12; ++i) {
    const int64_t ep_size = 1 + i % 4;
    if (ep_size < GetParam().min_ep_size) continue;
    SCOPED_TRACE(StrCat("case ", i));
    const PlanDims dims = RandomFittingDims(ep_size, /*drop=*/i % 3 == 0);
    const Domain domain = MakeDomain({dims});
    const Routed routed = PrepareRandom(domain, dims);
    const int64_t width = Uniform(random_, 1, 40);
    for (Op op : kMoves) {
      for (DType dtype : kDTypes) {
        ExpectWorks(domain, op, routed, Fit({width, dtype}));
      }
    }
  }
}

TEST_P(GatherConformance, MegabytesMatchTheOracle) {
  PlanDims dims = {
      /*num_experts=*/8, /*ep_size=*/4,  /*num_tokens=*/64,
      /*top_k=*/3,       /*capacity=*/0, /*alignment=*/16,
      /*drop=*/false};
  dims.capacity = WorstCaseCapacity(dims);
  const Domain domain = MakeDomain({dims});
  const Routed routed = PrepareRandom(domain, dims);
  for (Op op : kMoves) {
    ExpectWorks(domain, op, routed, Fit({700, DType::kFloat32}));
  }
}

TEST_P(Conformance, BothIndexTypesGiveTheSameHandle) {
  const Domain domain = MakeDomain(kWorld);
  const Choices topk_idx = RandomChoices(random_, kDims);
  const Routed wide = Prepare(domain, kDims, topk_idx);
  std::vector<RankInput> inputs = PrepareInputs(kDims, topk_idx);
  for (RankInput& input : inputs) input.index_is_int64 = false;
  const StepPtr narrow = NewStep(domain, Op::kPrepare, inputs);
  ExpectRuns(narrow);
  Routed same = {kDims, wide.layout, {}};
  for (int64_t rank = 0; rank < kDims.ep_size; ++rank) {
    ExpectCounts(wide.layout, rank, narrow->output(rank));
    same.mems.push_back(narrow->output(rank).mem);
    if (GetParam().repeatable_handles) {
      EXPECT_EQ(wide.mems[rank], same.mems[rank]);
    }
  }
  ExpectWorks(domain, Op::kDispatch, same, AnyType());
}

// This is what ep_prepare of Python does with a policy of drops, or with
// further candidates. It prepares with drops, whatever the layer does on
// overflow. If rows are short, it prepares again for the layer: the choices
// that get a row, some with another expert.
TEST_P(GatherConformance, WhatGetsARowIsPreparedAgain) {
  PlanDims layer = kDims;
  layer.capacity = 16;
  layer = GetParam().fit(layer);
  PlanDims dropping = layer;
  dropping.drop = true;
  const Domain domain = MakeDomain({layer});
  Choices few(layer.ep_size, std::vector<int64_t>(layer.num_choices(), -1));
  for (int64_t rank = 0; rank < layer.ep_size; ++rank) few[rank][0] = rank;
  Choices many = few, assigned = few;
  for (int64_t rank = 0; rank < layer.ep_size; ++rank) {
    for (int64_t i = 2; i < layer.num_choices(); i += 2) {
      many[rank][i] = 0, many[rank][i + 1] = 1;
      if (i < 6) assigned[rank][i] = i;
    }
  }
  Routed first = Prepare(domain, dropping, few);
  EXPECT_FALSE(first.layout.Overflows(layer));
  first.dims = layer;
  EXPECT_TRUE(Prepare(domain, dropping, many).layout.Overflows(layer));
  const Routed second = Prepare(domain, layer, assigned);
  for (Op op : kMoves) {
    ExpectWorks(domain, op, first, AnyType());
    ExpectWorks(domain, op, second, AnyType());
  }
}

TEST_P(Conformance, AnUnspecifiedTailLeavesTheSlabsAlone) {
  const RowType type = AnyType();
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareRandom(domain, kDims);
  std::vector<RankInput> inputs = RandomInputs(Op::kDispatch, routed, type);
  std::vector<RankData> data;
  for (RankInput& input : inputs) {
    input.tail = Tail::kUnspecified;
    data.push_back(input.data);
  }
  const StepPtr step = NewStep(domain, Op::kDispatch, inputs);
  ExpectRuns(step);
  std::vector<RankData> expected =
      Apply(Op::kDispatch, kDims, routed.layout, type, data);
  for (int64_t rank = 0; rank < kDims.ep_size; ++rank) {
    const int64_t used = routed.layout.total_recv_tokens[rank];
    ASSERT_LT(used, kDims.capacity);
    RankData actual = step->output(rank).data;
    for (RankData* slots : {&expected[rank], &actual}) {
      slots->rows.resize(used * type.bytes());
      slots->weights.resize(used);
    }
    EXPECT_EQ("", Difference(type, expected[rank], actual));
  }
}

TEST_P(GatherConformance, CombineWithoutWeightsSumsTheRows) {
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareRandom(domain, kDims);
  for (DType dtype : kDTypes) {
    ExpectWorks(domain, Op::kCombine, routed, Fit({9, dtype}),
                /*weighted=*/false);
  }
}

// The outputs of a global batch do not depend on the number of its ranks.
TEST_P(ExactSumConformance, EverySizeGivesTheSameBits) {
  const int64_t kTokens = 24;
  const RowType type = {33, DType::kBFloat16};
  PlanDims whole = {8, 1, kTokens, 3, 0, 4, false};
  const Choices topk_idx = RandomChoices(random_, whole);
  const RankData tokens =
      RandomData(random_, type, kTokens, whole.num_choices());

  std::vector<std::byte> alone;
  for (int64_t ep_size : {1, 2, 4}) {
    if (ep_size < GetParam().min_ep_size) continue;
    PlanDims dims = whole;
    dims.ep_size = ep_size;
    dims.num_tokens = kTokens / ep_size;
    dims.capacity = WorstCaseCapacity(dims);
    const auto shard = [&](const auto& array, int64_t rank) {
      const int64_t size = array.size() / ep_size;
      const auto begin = array.begin() + rank * size;
      return std::decay_t<decltype(array)>(begin, begin + size);
    };
    Choices choices;
    for (int64_t rank = 0; rank < ep_size; ++rank) {
      choices.push_back(shard(topk_idx[0], rank));
    }
    const Domain domain = MakeDomain({dims});
    const Routed routed = Prepare(domain, dims, choices);

    std::vector<RankInput> inputs = RandomInputs(Op::kDispatch, routed, type);
    for (int64_t rank = 0; rank < ep_size; ++rank) {
      inputs[rank].data = {shard(tokens.rows, rank),
                           shard(tokens.weights, rank)};
    }
    const StepPtr dispatch = NewStep(domain, Op::kDispatch, inputs);
    ExpectRuns(dispatch);
    for (int64_t rank = 0; rank < ep_size; ++rank) {
      inputs[rank].data = dispatch->output(rank).data;
    }
    const StepPtr combine = NewStep(domain, Op::kCombine, inputs);
    ExpectRuns(combine);
    std::vector<std::byte> together;
    for (int64_t rank = 0; rank < ep_size; ++rank) {
      const std::vector<std::byte>& rows = combine->output(rank).data.rows;
      together.insert(together.end(), rows.begin(), rows.end());
    }
    if (alone.empty()) alone = together;
    EXPECT_EQ(alone, together) << "EP size " << ep_size;
  }
}

}  // namespace
}  // namespace ep::testing
