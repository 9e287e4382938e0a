// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/core/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <set>
#include <string>

#include "ep_ffi/testing/expect.h"
#include "ep_ffi/testing/plans.h"

namespace ep {

static bool operator==(const Route& a, const Route& b) {
  return a.rank == b.rank && a.index == b.index;
}

static std::ostream& operator<<(std::ostream& out, const Route& route) {
  return out << "{" << route.rank << ", " << route.index << "}";
}

namespace {

using testing::BuiltPlan;
using testing::Choices;
using testing::ExpectFailure;
using testing::Layout;
using testing::LayOut;
using testing::SortAll;

constexpr PlanDims kSmall = {/*num_experts=*/4, /*ep_size=*/2,
                             /*num_tokens=*/3,  /*top_k=*/2,
                             /*capacity=*/16,   /*alignment=*/4,
                             /*drop=*/false};
const Choices kSmallChoices = {{0, 1, 2, 3, 0, 3}, {1, -1, 3, 0, 2, 1}};

BuiltPlan Build(const PlanDims& dims, int64_t rank, const Choices& topk_idx) {
  return BuiltPlan(dims, rank, SortAll(dims, topk_idx));
}

Status Open(const PlanDims& dims, int64_t rank,
            const std::vector<std::byte>& mem) {
  Plan plan;
  return Plan::Open(dims, rank, mem.data(), mem.size(), &plan);
}

Plan OpenValid(const PlanDims& dims, int64_t rank,
               const std::vector<std::byte>& mem) {
  Plan plan;
  testing::ExpectOk(Plan::Open(dims, rank, mem.data(), mem.size(), &plan));
  return plan;
}

// The numbers of the worked example in docs/semantics.md. Random plans match
// the contract in tests/ops/rules_test.py.
TEST(PlanTest, TheWorkedExample) {
  using Counts = std::vector<std::vector<int32_t>>;
  PlanDims dims = {
      /*num_experts=*/4, /*ep_size=*/2,   /*num_tokens=*/2,
      /*top_k=*/2,       /*capacity=*/10, /*alignment=*/2,
      /*drop=*/true};
  const Choices topk_idx = {{0, 2, 0, 3}, {0, 1, 2, -1}};
  Layout layout = LayOut(dims, topk_idx);
  EXPECT_EQ((Counts{{4, 2}, {2, 2}}), layout.group_sizes);
  EXPECT_EQ((Counts{{3, 1}, {2, 1}}), layout.token_counts);
  EXPECT_EQ((Counts{{0, 0}, {0, 0}}), layout.dropped_counts);
  EXPECT_EQ((std::vector<int32_t>{6, 4}), layout.total_recv_tokens);
  EXPECT_EQ(6, layout.max_recv_tokens);
  const std::vector<std::vector<Route>> send = {
      {{0, 0}, {1, 0}, {0, 1}, {1, 2}}, {{0, 2}, {0, 4}, {1, 1}, kNoRoute}};
  EXPECT_EQ(send, layout.send);
  dims.capacity = 4;
  layout = LayOut(dims, topk_idx);
  EXPECT_EQ((Counts{{4, 0}, {2, 2}}), layout.group_sizes);
  EXPECT_EQ((Counts{{3, 0}, {2, 1}}), layout.token_counts);
  EXPECT_EQ((Counts{{0, 1}, {0, 0}}), layout.dropped_counts);
  EXPECT_EQ(6, layout.max_recv_tokens);
  EXPECT_EQ((std::vector<uint8_t>{1, 0, 1, 0}), layout.kept[1]);
}

TEST(BuildPlanTest, AFullCapacityIsEnough) {
  PlanDims dims = kSmall;
  dims.capacity = 8;
  EXPECT_TRUE(Build(dims, 0, kSmallChoices).status.ok());
}

TEST(BuildPlanTest, RejectsCorruptChoicesOfAPeer) {
  const std::vector<SortedChoices> good = SortAll(kSmall, kSmallChoices);
  const int32_t huge = std::numeric_limits<int32_t>::max();
  struct {
    const char* what;
    std::function<void(SortedChoices*)> corrupt;
  } cases[] = {
      {"does not start at 0", [](auto* c) { c->starts[0] = 1; }},
      {"descends", [](auto* c) { c->starts[1] = c->starts[2] + 1; }},
      {"descends from far", [&](auto* c) { c->starts[2] = huge; }},
      {"is negative", [](auto* c) { c->starts[1] = -1; }},
      {"has too many choices", [](auto* c) { c->starts.back() = 7; }},
      {"has a choice too large", [](auto* c) { c->order[2] = 6; }},
      {"has a negative choice", [](auto* c) { c->order[0] = -1; }},
  };
  for (const auto& c : cases) {
    std::vector<SortedChoices> sorted = good;
    c.corrupt(&sorted[1]);
    SCOPED_TRACE(c.what);
    ExpectFailure({Code::kInternal, {"rank 1"}},
                  BuiltPlan(kSmall, 0, sorted).status);
  }
}

TEST(PlanTest, OpensOnlyForItsSizes) {
  const BuiltPlan prepared = Build(kSmall, 1, kSmallChoices);
  ASSERT_TRUE(Open(kSmall, 1, prepared.mem).ok());
  // A plan for any of these sizes has the same number of bytes.
  PlanDims wrong[6];
  std::fill(std::begin(wrong), std::end(wrong), kSmall);
  wrong[0].num_experts = 8;
  wrong[1].ep_size = 4;
  wrong[2].num_tokens = 2, wrong[2].top_k = 3;
  wrong[3].capacity = 18, wrong[3].num_tokens = 2;
  wrong[4].alignment = 2;
  wrong[5].num_tokens = 6, wrong[5].top_k = 1;
  for (const PlanDims& dims : wrong) {
    ASSERT_EQ(PlanBytes(kSmall), PlanBytes(dims));
    ExpectFailure({Code::kInvalidArgument, {"ep_prepare"}},
                  Open(dims, 1, prepared.mem));
  }
}

TEST(PlanTest, RejectsBytesThatAreNotAPlanOfThisRank) {
  const std::vector<std::byte> mem = Build(kSmall, 1, kSmallChoices).mem;
  EXPECT_EQ(Code::kInvalidArgument, Open(kSmall, 0, mem).code());
  EXPECT_EQ(Code::kInvalidArgument,
            Open(kSmall, 1, std::vector<std::byte>(mem.size())).code());
  const std::vector<std::byte> shorter(mem.begin(), mem.end() - 1);
  ExpectFailure({Code::kInvalidArgument,
                 {StrCat("has ", shorter.size(), " bytes"),
                  StrCat("has ", PlanBytes(kSmall), " bytes")}},
                Open(kSmall, 1, shorter));
  std::vector<std::byte> moved(mem.size() + 1);
  std::copy(mem.begin(), mem.end(), moved.begin() + 1);
  Plan plan;
  EXPECT_EQ(Code::kInvalidArgument,
            Plan::Open(kSmall, 1, moved.data() + 1, mem.size(), &plan).code());
}

// Ops read neither padding nor routes past the used slots.
TEST(PlanTest, RejectsEveryChangedBitThatMoversRead) {
  const BuiltPlan prepared = Build(kSmall, 0, kSmallChoices);
  const Plan plan = OpenValid(kSmall, 0, prepared.mem);
  const auto* bytes = prepared.mem.data();
  const auto* end =
      reinterpret_cast<const std::byte*>(plan.recv() + plan.num_slots());
  const auto* routes = reinterpret_cast<const std::byte*>(plan.send());
  const int64_t header = 48;
  for (const std::byte* byte = bytes; byte != end; ++byte) {
    if (byte >= bytes + header && byte < routes) continue;  // padding
    for (int bit = 0; bit < 8; ++bit) {
      std::vector<std::byte> mem = prepared.mem;
      mem[byte - bytes] ^= std::byte(1 << bit);
      EXPECT_EQ(Code::kInvalidArgument, Open(kSmall, 0, mem).code())
          << "byte " << byte - bytes;
    }
  }
}

TEST(PlanTest, RejectsSwappedRoutes) {
  std::vector<std::byte> mem = Build(kSmall, 0, kSmallChoices).mem;
  std::byte* routes = mem.data() + 64;
  ASSERT_NE(0, std::memcmp(routes, routes + sizeof(Route), sizeof(Route)));
  std::swap_ranges(routes, routes + sizeof(Route), routes + sizeof(Route));
  EXPECT_EQ(Code::kInvalidArgument, Open(kSmall, 0, mem).code());
}

TEST(PlanTest, FingerprintsDifferByRoutingAndDomain) {
  Choices other = kSmallChoices, swapped = kSmallChoices;
  other[1][0] = 2;
  std::swap(swapped[0][0], swapped[0][2]);  // each expert has as many tokens
  std::set<uint64_t> fingerprints;
  for (const Choices& topk_idx : {kSmallChoices, other, swapped}) {
    for (int64_t domain : {0, 1}) {
      const BuiltPlan built(kSmall, 0, SortAll(kSmall, topk_idx), domain);
      fingerprints.insert(OpenValid(kSmall, 0, built.mem).fingerprint());
    }
  }
  EXPECT_EQ(6u, fingerprints.size());
}

TEST(ValidateDimsTest, RejectsInvalidSizes) {
  struct {
    const char* what;
    int64_t PlanDims::* field;
    int64_t value;
  } cases[] = {
      {"no experts", &PlanDims::num_experts, 0},
      {"no ranks", &PlanDims::ep_size, 0},
      {"negative tokens", &PlanDims::num_tokens, -1},
      {"no choices", &PlanDims::top_k, 0},
      {"no capacity", &PlanDims::capacity, 0},
      {"no alignment", &PlanDims::alignment, 0},
      {"tokens past 32 bits", &PlanDims::num_tokens, int64_t{1} << 30},
      {"tokens past 64 bits", &PlanDims::num_tokens, int64_t{1} << 62},
      {"alignment past 32 bits", &PlanDims::alignment, int64_t{1} << 31},
      {"capacity past 32 bits", &PlanDims::capacity, int64_t{1} << 31},
  };
  for (const auto& c : cases) {
    PlanDims dims = kSmall;
    dims.*c.field = c.value;
    EXPECT_EQ(Code::kInvalidArgument, ValidateDims(dims).code()) << c.what;
  }
}

}  // namespace
}  // namespace ep
