// SPDX-License-Identifier: Apache-2.0

// Tests how movers divide work into chunks and read corrupt plans, without an
// engine. The conformance suite tests the results; see group_test.cc.

#include "ep_ffi/backends/host/movers/movers.h"

#include <gtest/gtest.h>

#include <cstring>
#include <type_traits>

#include "ep_ffi/testing/expect.h"
#include "ep_ffi/testing/plans.h"
#include "ep_ffi/testing/samples.h"

namespace ep::host {
namespace {

using testing::BuiltPlan;
using testing::Choices;
using testing::ExpectFailure;
using testing::ExpectOk;
using testing::Layout;
using testing::LayOut;
using testing::Random;
using testing::RandomChoices;
using testing::RankData;
using testing::RowType;
using testing::SortAll;

// Returns the ranks' arrays, as movers read them.
std::vector<RankRows> RowsOf(const std::vector<RankData>& data) {
  std::vector<RankRows> ranks;
  for (const RankData& d : data) {
    ranks.push_back({d.rows.data(), d.weights.data()});
  }
  return ranks;
}

// A plan of rank 0, and the inputs of all ranks for both movers.
struct Exchange {
  Exchange(Random& random, const PlanDims& dims, const RowType& type)
      : dims(dims), type(type) {
    const Choices topk_idx = RandomChoices(random, dims);
    layout = LayOut(dims, topk_idx);
    for (int64_t r = 0; r < dims.ep_size; ++r) {
      tokens.push_back(RandomInput(random, Op::kDispatch, dims, type));
      slots.push_back(RandomInput(random, Op::kDispatchBwd, dims, type));
    }
    mem = BuiltPlan(dims, 0, SortAll(dims, topk_idx)).mem;
  }

  PlanDims dims;
  RowType type;
  Layout layout;
  std::vector<std::byte> mem;
  std::vector<RankData> tokens, slots;  // by rank
};

// Runs a mover on rank 0 with the plan in `mem`.
template <typename Mover>
Status RunMover(const Exchange& e, const std::vector<std::byte>& mem,
                const std::vector<RankData>& inputs, RankData* out) {
  constexpr bool kScatters = std::is_same_v<Mover, Scatter>;
  const int64_t num_rows = kScatters ? e.dims.capacity : e.dims.num_tokens;
  const int64_t num_weights =
      kScatters ? e.dims.capacity : e.dims.num_choices();
  out->rows.resize(num_rows * e.type.bytes());
  out->weights.resize(num_weights);
  const Rows outputs = {out->rows.data(), num_rows, e.type.width, e.type.dtype};
  Mover mover = {};
  mover.dims = e.dims;
  if constexpr (kScatters) {
    mover.tail = Tail::kZero;
    mover.args.slots = outputs;
    mover.args.slot_weights = out->weights.data();
  } else {
    mover.args.tokens = outputs;
    mover.args.topk_weights = out->weights.data();
  }
  EP_RETURN_IF_ERROR(
      Plan::Open(e.dims, 0, mem.data(), mem.size(), &mover.plan));
  for (int64_t chunk = mover.num_chunks() - 1; chunk >= 0; --chunk) {
    EP_RETURN_IF_ERROR(mover.RunChunk(RowsOf(inputs), chunk));
  }
  return Status();
}

constexpr PlanDims kDims = {/*num_experts=*/6, /*ep_size=*/3,
                            /*num_tokens=*/50, /*top_k=*/2,
                            /*capacity=*/200,  /*alignment=*/4,
                            /*drop=*/true};

// Tests row sizes below and above a chunk, and row sizes that do not divide it.
TEST(MoversTest, ChunksCoverEveryRowOnce) {
  Random random(7);
  for (int64_t width : {1, 3000, 100000}) {
    PlanDims dims = kDims;
    if (width > 3000) dims.num_tokens = 5, dims.capacity = 30;
    const Exchange e(random, dims, {width, DType::kFloat32});
    const auto expected = [&](Op op, const std::vector<RankData>& inputs) {
      return ApplyOn(/*rank=*/0, op, e.dims, e.layout, e.type, inputs);
    };
    RankData out;
    ExpectOk(RunMover<Scatter>(e, e.mem, e.tokens, &out));
    EXPECT_EQ("", Difference(e.type, expected(Op::kDispatch, e.tokens), out));
    ExpectOk(RunMover<GatherSum>(e, e.mem, e.slots, &out));
    EXPECT_EQ("", Difference(e.type, expected(Op::kDispatchBwd, e.slots), out));
  }
}

TEST(MoversTest, TheErrorNamesACorruptRoute) {
  Random random(9);
  const Exchange e(random, kDims, {3, DType::kBFloat16});
  for (const Route& bad : {Route{3, 0}, Route{-2, 0}, Route{0, -1},
                           Route{0, 200}, Route{INT32_MAX, INT32_MIN}}) {
    // Byte offsets of the first send route and the first recv route.
    const size_t header = 64;
    for (size_t at : {header, header + 100 * sizeof(Route)}) {
      std::vector<std::byte> mem = e.mem;
      std::memcpy(&mem[at], &bad, sizeof(bad));
      SealPlan(e.dims, mem.data());
      RankData out;
      ExpectFailure({Code::kInvalidArgument,
                     {StrCat("row ", bad.index, " of rank ", bad.rank)}},
                    at == header ? RunMover<GatherSum>(e, mem, e.slots, &out)
                                 : RunMover<Scatter>(e, mem, e.tokens, &out));
    }
  }
}

}  // namespace
}  // namespace ep::host
