// SPDX-License-Identifier: Apache-2.0

// Tests how movers divide work into chunks and read corrupt plans, without an
// engine. The conformance suite tests the results; see group_test.cc.

#include "ep_ffi/backends/host/movers/movers.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <type_traits>
#include <utility>

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
using testing::Uniform;

// Memory between two inaccessible pages. The memory ends at the upper page, so
// that the first access past its end crashes.
class Fenced {
 public:
  explicit Fenced(size_t bytes) {
    const size_t page = sysconf(_SC_PAGESIZE);
    size_ = (bytes + page - 1) / page * page + 2 * page;
    base_ = static_cast<std::byte*>(
        mmap(nullptr, size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(base_ + page, size_ - 2 * page, PROT_READ | PROT_WRITE);
    data_ = base_ + size_ - page - bytes;
  }
  Fenced(const void* source, size_t bytes) : Fenced(bytes) {
    if (bytes > 0) std::memcpy(data_, source, bytes);
  }
  Fenced(Fenced&& other) noexcept
      : base_(std::exchange(other.base_, nullptr)),
        data_(other.data_),
        size_(other.size_) {}
  ~Fenced() {
    if (base_) munmap(base_, size_);
  }

  std::byte* bytes() const { return data_; }
  float* floats() const { return reinterpret_cast<float*>(data_); }

 private:
  std::byte* base_;
  std::byte* data_;
  size_t size_;
};

// Copies of the ranks' arrays, in fenced memory.
struct Sources {
  explicit Sources(const std::vector<RankData>& data) {
    for (const RankData& d : data) {
      rows.emplace_back(d.rows.data(), d.rows.size());
      weights.emplace_back(d.weights.data(), d.weights.size() * sizeof(float));
      ranks.push_back({rows.back().bytes(), weights.back().floats()});
    }
  }

  std::vector<Fenced> rows, weights;
  std::vector<RankRows> ranks;
};

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

// Runs a mover on rank 0 with the plan in `mem` and fenced outputs.
template <typename Mover>
Status RunMover(const Exchange& e, const std::byte* mem, const Sources& sources,
                RankData* out) {
  constexpr bool kScatters = std::is_same_v<Mover, Scatter>;
  const int64_t num_rows = kScatters ? e.dims.capacity : e.dims.num_tokens;
  const int64_t num_weights =
      kScatters ? e.dims.capacity : e.dims.num_choices();
  const Fenced rows(num_rows * e.type.bytes());
  const Fenced weights(num_weights * sizeof(float));
  const Rows outputs = {rows.bytes(), num_rows, e.type.width, e.type.dtype};
  Mover mover = {};
  mover.dims = e.dims;
  if constexpr (kScatters) {
    mover.tail = Tail::kZero;
    mover.args.slots = outputs;
    mover.args.slot_weights = weights.floats();
  } else {
    mover.args.tokens = outputs;
    mover.args.topk_weights = weights.floats();
  }
  EP_RETURN_IF_ERROR(Plan::Open(e.dims, 0, mem, e.mem.size(), &mover.plan));
  for (int64_t chunk = mover.num_chunks() - 1; chunk >= 0; --chunk) {
    EP_RETURN_IF_ERROR(mover.RunChunk(sources.ranks, chunk));
  }
  out->rows.assign(rows.bytes(), rows.bytes() + num_rows * e.type.bytes());
  out->weights.assign(weights.floats(), weights.floats() + num_weights);
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
    ExpectOk(RunMover<Scatter>(e, e.mem.data(), Sources(e.tokens), &out));
    EXPECT_EQ("", Difference(e.type, expected(Op::kDispatch, e.tokens), out));
    ExpectOk(RunMover<GatherSum>(e, e.mem.data(), Sources(e.slots), &out));
    EXPECT_EQ("", Difference(e.type, expected(Op::kDispatchBwd, e.slots), out));
  }
}

// Flipped bits change routes or cause an error, and no access is out of bounds.
TEST(MoversTest, CorruptPlansStayInBounds) {
  Random random(8);
  const Exchange e(random, kDims, {3, DType::kBFloat16});
  const Sources tokens(e.tokens), slots(e.slots);
  int errors = 0;
  for (int i = 0; i < 5000; ++i) {
    const Fenced mem(e.mem.data(), e.mem.size());
    for (int64_t flips = Uniform(random, 1, 4); flips > 0; --flips) {
      mem.bytes()[Uniform(random, 0, e.mem.size() - 1)] ^=
          std::byte(1 << Uniform(random, 0, 7));
    }
    SealPlan(e.dims, mem.bytes());
    RankData out;
    for (const Status& status :
         {RunMover<Scatter>(e, mem.bytes(), tokens, &out),
          RunMover<GatherSum>(e, mem.bytes(), slots, &out)}) {
      if (status.ok()) continue;
      ++errors;
      ExpectFailure({Code::kInvalidArgument, {"handle.mem"}}, status);
    }
  }
  EXPECT_GT(errors, 500);
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
      ExpectFailure(
          {Code::kInvalidArgument,
           {StrCat("row ", bad.index, " of rank ", bad.rank)}},
          at == header
              ? RunMover<GatherSum>(e, mem.data(), Sources(e.slots), &out)
              : RunMover<Scatter>(e, mem.data(), Sources(e.tokens), &out));
    }
  }
}

}  // namespace
}  // namespace ep::host
