// SPDX-License-Identifier: Apache-2.0

// Tests how jobs divide work into chunks and read corrupt plans, without an
// engine, and signatures. The conformance suite tests the results; see
// group_test.cc.

#include "ep_ffi/backends/host/movers/job.h"

#include <gtest/gtest.h>

#include <cstring>

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

// A plan of rank 0, and the inputs of all ranks for Scatter and Gather.
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

// Runs ep_dispatch or ep_dispatch_bwd on rank 0 with the plan in `mem`.
Status RunJob(const Exchange& e, Op op, const std::vector<std::byte>& mem,
              const std::vector<RankData>& inputs, RankData* out) {
  const bool scatters = op == Op::kDispatch;
  const int64_t num_rows = scatters ? e.dims.capacity : e.dims.num_tokens;
  out->rows.resize(num_rows * e.type.bytes());
  out->weights.resize(scatters ? e.dims.capacity : e.dims.num_choices());
  Site site = {};
  site.layer.tail = Tail::kZero;
  Job job = {};
  job.kind = scatters ? Job::kScatter : Job::kGather;
  job.call.site = &site;
  job.dims = e.dims;
  job.mem = {mem.data(), static_cast<int64_t>(mem.size())};
  job.out = {out->rows.data(), num_rows, e.type.width, e.type.dtype};
  job.out_weights = out->weights.data();
  EP_RETURN_IF_ERROR(job.Open());
  std::vector<Arrays> ranks;
  for (const RankData& d : inputs) {
    ranks.push_back({d.rows.data(), d.weights.data()});
  }
  for (int64_t chunk = job.num_chunks() - 1; chunk >= 0; --chunk) {
    EP_RETURN_IF_ERROR(job.RunChunk(ranks, chunk));
  }
  return Status();
}

constexpr PlanDims kDims = {/*num_experts=*/6, /*ep_size=*/3,
                            /*num_tokens=*/50, /*top_k=*/2,
                            /*capacity=*/200,  /*alignment=*/4,
                            /*drop=*/true};

// Tests row sizes below and above a chunk, and row sizes that do not divide it.
TEST(JobTest, ChunksCoverEveryRowOnce) {
  Random random(7);
  for (int64_t width : {1, 3000, 100000}) {
    PlanDims dims = kDims;
    if (width > 3000) dims.num_tokens = 5, dims.capacity = 30;
    const Exchange e(random, dims, {width, DType::kFloat32});
    const auto expected = [&](Op op, const std::vector<RankData>& inputs) {
      return ApplyOn(/*rank=*/0, op, e.dims, e.layout, e.type, inputs);
    };
    RankData out;
    ExpectOk(RunJob(e, Op::kDispatch, e.mem, e.tokens, &out));
    EXPECT_EQ("", Difference(e.type, expected(Op::kDispatch, e.tokens), out));
    ExpectOk(RunJob(e, Op::kDispatchBwd, e.mem, e.slots, &out));
    EXPECT_EQ("", Difference(e.type, expected(Op::kDispatchBwd, e.slots), out));
  }
}

TEST(JobTest, TheErrorNamesACorruptRoute) {
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
                    at == header
                        ? RunJob(e, Op::kDispatchBwd, mem, e.slots, &out)
                        : RunJob(e, Op::kDispatch, mem, e.tokens, &out));
    }
  }
}

TEST(SignatureTest, TheSecondArrayIsAligned) {
  Signature s;
  s[Signature::kFirstBytes] = 65;
  s[Signature::kSecondBytes] = 3;
  EXPECT_EQ(128u, s.second_offset());
  EXPECT_EQ(131u, s.staged_bytes());
}

TEST(SignatureTest, BothArraysMustFitIntoASegment) {
  Signature s;
  s[Signature::kFirstBytes] = 65;
  s[Signature::kSecondBytes] = 3;
  EXPECT_TRUE(s.FitsIn(131));
  EXPECT_FALSE(s.FitsIn(130));
  for (Signature::Field size :
       {Signature::kFirstBytes, Signature::kSecondBytes}) {
    for (int64_t value : {int64_t{-1}, int64_t{132}, INT64_MAX, INT64_MIN}) {
      Signature other = s;
      other[size] = value;
      EXPECT_FALSE(other.FitsIn(131)) << value;
    }
  }
}

}  // namespace
}  // namespace ep::host
