// SPDX-License-Identifier: Apache-2.0

// The nccl backend over a fake of what it is built on: ranks are threads,
// devices are numbers, and whatever the real libraries would not have stood is
// a violation that fails the test.

#include "ep_ffi/backends/nccl/group.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ep_ffi/backends/nccl/communicator.h"
#include "ep_ffi/backends/nccl/fake/fake.h"
#include "ep_ffi/backends/nccl/kernels.h"
#include "ep_ffi/testing/conformance.h"
#include "ep_ffi/testing/formats.h"

namespace ep::nccl {
namespace {

using testing::Backend;
using testing::Choices;
using testing::Conformance;
using testing::Domain;
using testing::ExpectOk;
using testing::ForEachRank;
using testing::kDims;
using testing::kWorld;
using testing::RandomChoices;
using testing::RankInput;
using testing::Routed;
using testing::RowType;
using testing::Step;
using testing::StepPtr;
using testing::WorldOptions;

constexpr int64_t kMaxRowBytes = 4096;

// Waits until it is so, but not for long.
void Await(const std::function<bool()>& condition) {
  for (int i = 0; i < 200 && !condition(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

// After each test, that nothing was violated or left behind.
class Auditor : public ::testing::EmptyTestEventListener {
 public:
  // What this test leaves behind is as it should be.
  static void AllowLeaks() { leaks_allowed_ = true; }

 private:
  void OnTestStart(const ::testing::TestInfo&) override {
    leaks_allowed_ = false;
    before_ = fake::CountHoldings();
    fake::TheMachine() = fake::Machine();
  }
  void OnTestEnd(const ::testing::TestInfo&) override {
    for (const std::string& violation : fake::TakeViolations()) {
      ADD_FAILURE() << violation;
    }
    if (leaks_allowed_) return;
    // What connected a group may let go of it a little later.
    Await([this] { return fake::CountHoldings() == before_; });
    EXPECT_EQ(before_, fake::CountHoldings());
  }

  static bool leaks_allowed_;
  fake::Holdings before_;
};

bool Auditor::leaks_allowed_ = false;

[[maybe_unused]] const bool audited = [] {
  ::testing::UnitTest::GetInstance()->listeners().Append(new Auditor());
  return true;
}();

// A group whose ops are called as by XLA: within a handler.
class Handled : public Group {
 public:
  explicit Handled(std::shared_ptr<Group> group) : group_(std::move(group)) {}

  int64_t num_experts() const override { return group_->num_experts(); }
  int64_t ep_size() const override { return group_->ep_size(); }
  Status MemBytes(const Layer& layer, int64_t num_tokens,
                  int64_t* out) const override {
    return group_->MemBytes(layer, num_tokens, out);
  }
  void Prepare(Call call, const PrepareArgs& args) override {
    const fake::InHandler handler(args.mem, args.mem_bytes);
    group_->Prepare(std::move(call), args);
  }
  void Scatter(Call call, const ScatterArgs& args) override {
    const fake::InHandler handler(args.mem.data, args.mem.bytes);
    group_->Scatter(std::move(call), args);
  }
  void Gather(Call call, const GatherArgs& args) override {
    const fake::InHandler handler(args.mem.data, args.mem.bytes);
    group_->Gather(std::move(call), args);
  }
  void FailRun(int64_t run_id, const Status& status) override {
    group_->FailRun(run_id, status);
  }
  Status Check() override { return group_->Check(); }
  Status Close() override { return group_->Close(); }

 private:
  const std::shared_ptr<Group> group_;
};

Sizes SizesFor(const PlanDims& dims) {
  return {dims.num_experts, dims.ep_size, std::max<int64_t>(dims.num_tokens, 1),
          dims.capacity,    kMaxRowBytes, /*max_num_sms=*/0};
}

// The ranks of one domain connect, on devices from `first_device` on.
std::vector<Status> Connect(const Sizes& sizes, double timeout_s,
                            int32_t first_device,
                            std::vector<std::shared_ptr<Group>>* groups) {
  NcclGroup::Options common = {};
  common.name = "world";
  common.sizes = sizes;
  common.timeout_s = timeout_s;
  const Status made = NewUniqueId("", "", &common.unique_id);
  if (!made.ok()) return {made};
  groups->resize(sizes.ep_size);
  std::vector<Status> statuses(sizes.ep_size);
  ForEachRank(sizes.ep_size, [&](int64_t rank) {
    NcclGroup::Options mine = common;
    mine.rank = rank;
    mine.device = first_device + rank;
    statuses[rank] = NcclGroup::Create(mine, &(*groups)[rank]);
  });
  return statuses;
}

std::vector<Domain> MakeWorld(const WorldOptions& options) {
  std::vector<Domain> domains(options.num_domains);
  for (int32_t i = 0; i < options.num_domains; ++i) {
    const int64_t ep_size = options.dims.ep_size;
    Domain& domain = domains[i];
    for (const Status& status :
         Connect(SizesFor(options.dims), options.timeout_s, i * ep_size,
                 &domain.groups)) {
      ExpectOk(status);
    }
    std::vector<std::shared_ptr<CUstream_st>> streams;
    for (int64_t rank = 0; rank < ep_size; ++rank) {
      domain.groups[rank] = std::make_shared<Handled>(domain.groups[rank]);
      domain.devices.push_back(i * ep_size + rank);
      streams.push_back(fake::NewStream(domain.devices[rank]));
      domain.streams.push_back(streams[rank].get());
    }
    domain.synchronize = [streams, groups = domain.groups](int64_t rank) {
      return groups[rank]->Check();
    };
  }
  return domains;
}

PlanDims Fit(PlanDims dims) {
  const auto round_up = [](int64_t value, int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
  };
  dims.num_experts =
      round_up(dims.num_experts, std::lcm(dims.ep_size, int64_t{4}));
  while (dims.alignment & (dims.alignment - 1)) ++dims.alignment;
  dims.capacity =
      std::max({dims.capacity, round_up(dims.num_tokens, 4), int64_t{4}});
  dims.capacity = round_up(dims.capacity, dims.alignment);
  return dims;
}

Backend FakeNccl() {
  Backend backend;
  backend.name = "nccl";
  backend.make = MakeWorld;
  backend.fit = Fit;
  backend.width_multiple = 8;
  backend.min_ep_size = 2;
  // NCCL EP rounds what each expert rank has summed, and once more the sum of
  // these, where the contract rounds once: that makes three. Float32 rounds
  // with each addition, at most three of them in this suite, either way: six.
  backend.exact_sums = false;
  backend.sum_roundings = 6.5;  // and what is lost of float32's own
  backend.fuses_weights = false;
  backend.repeatable_handles = false;
  backend.any_order = false;
  backend.checks_every_op = false;
  return backend;
}

EP_INSTANTIATE_CONFORMANCE(Fake, FakeNccl());

// What only this backend does.
class NcclGroupTest : public Conformance {
 protected:
  // A routing in which rank 1 has a fault, and every rank its mem.
  Routed PrepareFault(const Domain& domain, const PlanDims& dims) {
    Choices topk_idx = RandomChoices(random_, dims);
    topk_idx[1][2] = dims.num_experts;
    const StepPtr step = Step::Make(domain, Op::kPrepare, {NextRun()},
                                    PrepareInputs(dims, topk_idx));
    for (const Status& status : step->Run()) {
      EXPECT_EQ(Code::kInvalidArgument, status.code()) << status.message();
    }
    Routed routed = {
        dims, testing::LayOut(dims, Choices(dims.ep_size, topk_idx[0])), {}};
    for (int64_t rank = 0; rank < dims.ep_size; ++rank) {
      routed.mems.push_back(step->output(rank).mem);
    }
    return routed;
  }
};

INSTANTIATE_TEST_SUITE_P(Fake, NcclGroupTest, ::testing::Values(FakeNccl()));

void ExpectWords(const std::vector<std::string>& words, const Status& status) {
  EXPECT_FALSE(status.ok());
  for (const std::string& word : words) {
    EXPECT_NE(std::string::npos, status.message().find(word))
        << "no \"" << word << "\" in: " << status.message();
  }
}

// That each element is NaN.
void ExpectNan(const RowType& type, const testing::RankData& data) {
  const int64_t count = data.rows.size() / ByteWidth(type.dtype);
  for (int64_t i = 0; i < count; ++i) {
    ASSERT_TRUE(std::isnan(testing::Load(type.dtype, data.rows.data(), i)))
        << "row " << i / type.width;
  }
  for (float weight : data.weights) ASSERT_TRUE(std::isnan(weight));
}

constexpr Op kMoves[] = {Op::kDispatch, Op::kCombine, Op::kDispatchBwd,
                         Op::kCombineBwd};

// Each step has a copy of its own of what it is given, so every op finds mem at
// another address; here the routings are of different sizes, too, and take
// turns.
TEST_P(NcclGroupTest, LayersOfAGroupTakeTurns) {
  const Domain domain = MakeDomain(kWorld);
  PlanDims other = kDims;
  other.top_k = 1;
  other.alignment = 8;
  other.num_tokens = 3;
  const Routed first = PrepareRandom(domain, kDims);
  const Routed second = PrepareRandom(domain, other);
  for (Op op : kMoves) {
    ExpectWorks(domain, op, first, AnyType());
    ExpectWorks(domain, op, second, AnyType());
  }
}

TEST_P(NcclGroupTest, NoTokensAndNoChoices) {
  PlanDims dims = kDims;
  dims.num_tokens = 0;
  const Domain domain = MakeDomain({kDims});
  const Routed empty = PrepareRandom(domain, dims);
  const Routed unused = Prepare(
      domain, kDims,
      Choices(kDims.ep_size, std::vector<int64_t>(kDims.num_choices(), -1)));
  for (Op op : kMoves) {
    ExpectWorks(domain, op, empty, AnyType());
    ExpectWorks(domain, op, unused, AnyType());
  }
}

// More choices than one block of threads counts, and than there is room for.
TEST_P(NcclGroupTest, ManyChoicesOfFewExperts) {
  const PlanDims dims = {
      /*num_experts=*/4, /*ep_size=*/2,    /*num_tokens=*/700,
      /*top_k=*/2,       /*capacity=*/704, /*alignment=*/16,
      /*drop=*/true};
  const Domain domain = MakeDomain({dims});
  const Routed routed = PrepareRandom(domain, dims);
  EXPECT_TRUE(routed.layout.Overflows(dims));
  for (Op op : kMoves) ExpectWorks(domain, op, routed, AnyType());
}

TEST_P(NcclGroupTest, AFaultMakesNansOnEveryRank) {
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareFault(domain, kDims);
  for (Op op : kMoves) {
    for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      const RowType type = Conformance::Fit({8, dtype});
      const StepPtr step =
          Step::Make(domain, op, {NextRun()}, RandomInputs(op, routed, type));
      ExpectRuns(step);
      for (int64_t rank = 0; rank < kDims.ep_size; ++rank) {
        ExpectNan(type, step->output(rank).data);
      }
    }
  }
  ExpectWorks(domain, Op::kDispatch, PrepareRandom(domain, kDims), AnyType());
}

TEST_P(NcclGroupTest, ARepeatedIdFails) {
  const Domain domain = MakeDomain(kWorld);
  Choices topk_idx = RandomChoices(random_, kDims);
  topk_idx[3][8] = topk_idx[3][9] = 5;
  const StepPtr step = Step::Make(domain, Op::kPrepare, {NextRun()},
                                  PrepareInputs(kDims, topk_idx));
  for (const Status& status : step->Run()) {
    ExpectWords(
        {"ep_prepare", testing::kLayerName, "rank 3", "topk_idx[4", "5"},
        status);
  }
}

TEST_P(NcclGroupTest, AFaultIsReportedOnce) {
  const Domain domain = MakeDomain(kWorld);
  PrepareFault(domain, kDims);
  for (const auto& group : domain.groups) ExpectOk(group->Check());
  PrepareRandom(domain, kDims);
}

TEST_P(NcclGroupTest, AFaultFailsTheSameLaterPrepareOnEveryRank) {
  Domain domain = MakeDomain(kWorld);
  const auto synchronize = std::exchange(domain.synchronize, nullptr);
  std::vector<StepPtr> steps;
  for (int64_t i = 0; i < 3 * NcclGroup::kWindow; ++i) {
    Choices topk_idx = RandomChoices(random_, kDims);
    if (i == 2) topk_idx[1][4] = -7;
    steps.push_back(Step::Make(domain, Op::kPrepare, {NextRun()},
                               PrepareInputs(kDims, topk_idx)));
  }
  ForEachRank(kDims.ep_size, [&](int64_t rank) {
    for (size_t i = 0; i < steps.size(); ++i) {
      SCOPED_TRACE(i);
      steps[i]->Post(rank);
      ASSERT_TRUE(steps[i]->IsDone(rank));
      const Status status = steps[i]->Wait(rank);
      if (i == 2 + NcclGroup::kWindow) {
        ExpectWords({"rank 1", "topk_idx[2, 0] = -7"}, status);
      } else {
        ExpectOk(status);
      }
    }
    ExpectOk(synchronize(rank));
  });
}

// A rank may look earlier than its peers, and yet enqueues what they do.
TEST_P(NcclGroupTest, ARankThatChecksAloneStaysInStep) {
  Domain domain = MakeDomain(kWorld);
  const auto check = std::exchange(domain.synchronize, nullptr);
  std::vector<StepPtr> steps;
  for (int64_t i = 0; i < 2 * NcclGroup::kWindow; ++i) {
    Choices topk_idx = RandomChoices(random_, kDims);
    if (i == 0) topk_idx[1][4] = -7;
    steps.push_back(Step::Make(domain, Op::kPrepare, {NextRun()},
                               PrepareInputs(kDims, topk_idx)));
  }
  ForEachRank(kDims.ep_size, [&](int64_t rank) {
    for (size_t i = 0; i < steps.size(); ++i) {
      SCOPED_TRACE(i);
      if (rank == 0 && i == 1) ExpectWords({"rank 1", "-7"}, check(rank));
      steps[i]->Post(rank);
      const Status status = steps[i]->Wait(rank);
      EXPECT_EQ(rank == 0 || i != NcclGroup::kWindow, status.ok())
          << status.message();
    }
    ExpectOk(check(rank));
  });
}

// Whose routing it is, its header says; what NCCL EP would make of it is not
// ours to test: here are routings that it cannot tell from the right ones.
TEST_P(NcclGroupTest, AForeignHandleMakesNans) {
  const Domain domain = MakeDomain(kWorld);
  PlanDims other = kDims;
  other.drop = true;
  Routed other_layer = PrepareRandom(domain, other);
  other_layer.dims = kDims;
  Routed other_rank = PrepareRandom(domain, kDims);
  std::rotate(other_rank.mems.begin(), other_rank.mems.begin() + 1,
              other_rank.mems.end());
  Routed less_than_none = PrepareRandom(domain, kDims);
  for (std::vector<std::byte>& mem : less_than_none.mems) {
    reinterpret_cast<Header*>(mem.data())->num_slots = -1;
  }
  for (const Routed& routed : {other_layer, other_rank, less_than_none}) {
    for (Op op : kMoves) {
      const StepPtr step = Step::Make(domain, op, {NextRun()},
                                      RandomInputs(op, routed, AnyType()));
      for (const Status& status : step->Run()) {
        ExpectWords({"handle.mem", "ep_prepare"}, status);
      }
      for (int64_t rank = 0; rank < kDims.ep_size; ++rank) {
        ExpectNan(AnyType(), step->output(rank).data);
      }
    }
  }
  for (const auto& group : domain.groups) ExpectOk(group->Check());
  ExpectWorks(domain, Op::kDispatch, PrepareRandom(domain, kDims), AnyType());
}

// Bytes of which nothing is as ep_prepare left it, even in NCCL EP's part: it
// must not see them, on one rank or on all.
TEST_P(NcclGroupTest, WhatIsNoHandleMakesNans) {
  const Domain domain = MakeDomain(kWorld);
  const Routed good = PrepareRandom(domain, kDims);
  for (bool on_all : {true, false}) {
    Routed routed = good;
    for (int64_t rank = 0; rank < kDims.ep_size; ++rank) {
      if (!on_all && rank != 2) continue;
      for (std::byte& byte : routed.mems[rank]) byte = std::byte(random_());
    }
    for (Op op : kMoves) {
      SCOPED_TRACE(StrCat(OpName(op), on_all ? " on all ranks" : " on one"));
      const StepPtr step = Step::Make(domain, op, {NextRun()},
                                      RandomInputs(op, routed, AnyType()));
      const std::vector<Status> statuses = step->Run();
      for (int64_t rank = 0; rank < kDims.ep_size; ++rank) {
        if (!on_all && rank != 2) {
          ExpectOk(statuses[rank]);
          continue;
        }
        ExpectWords({"handle.mem", "ep_prepare"}, statuses[rank]);
        ExpectNan(AnyType(), step->output(rank).data);
      }
    }
  }
  ExpectWorks(domain, Op::kDispatch, good, AnyType());
}

// NCCL EP calculates in a handle that XLA takes for constant, at its end; so
// what an op leaves there must not matter to the next, and before it all stays.
TEST_P(NcclGroupTest, MoversChangeNothingThatIsReadAgain) {
  const Domain domain = MakeDomain(kWorld);
  Routed routed = PrepareRandom(domain, kDims);
  const std::vector<std::vector<std::byte>> before = routed.mems;
  for (int round = 0; round < 2; ++round) {
    for (Op op : kMoves) {
      SCOPED_TRACE(OpName(op));
      const std::vector<RankInput> inputs = RandomInputs(op, routed, AnyType());
      const StepPtr step = Step::Make(domain, op, {NextRun()}, inputs);
      ExpectRuns(step);
      ExpectOracle(op, routed, inputs, step);
      for (int64_t rank = 0; rank < kDims.ep_size; ++rank) {
        const std::vector<std::byte>& after = step->input(rank).mem;
        const auto first_change =
            std::mismatch(after.begin(), after.end(), before[rank].begin());
        EXPECT_EQ(fake::kScratchBytes, after.end() - first_change.first);
        routed.mems[rank] = after;
      }
    }
  }
}

// Sets a column of the row that an expert returns for a rank's choice.
void SetTerm(const Routed& routed, int64_t rank, int64_t choice, int64_t column,
             double value, std::vector<RankInput>* inputs) {
  const Route route = routed.layout.send[rank][choice];
  RankInput& holder = (*inputs)[route.rank];
  testing::Store(holder.type.dtype, value, holder.data.rows.data(),
                 route.index * holder.type.width + column);
}

// Combine must return what is finite.
class CheckedCombineTest : public NcclGroupTest {
 protected:
  static constexpr double kInfinity = std::numeric_limits<double>::infinity();
  static constexpr double kNoNumber = std::numeric_limits<double>::quiet_NaN();

  // A routing without unused choices.
  Routed PrepareFull(const Domain& domain) {
    std::vector<int64_t> topk_idx(kDims.num_choices());
    for (size_t i = 0; i < topk_idx.size(); ++i) {
      topk_idx[i] = i % kDims.num_experts;
    }
    return Prepare(domain, kDims, Choices(kDims.ep_size, topk_idx));
  }
  std::vector<RankInput> CheckedInputs(Op op, const Routed& routed,
                                       const RowType& type) {
    std::vector<RankInput> inputs = RandomInputs(op, routed, type);
    for (RankInput& input : inputs) input.checked = true;
    return inputs;
  }
  StepPtr MakeStep(const Domain& domain, Op op,
                   const std::vector<RankInput>& inputs) {
    return Step::Make(domain, op, {NextRun()}, inputs);
  }
};

INSTANTIATE_TEST_SUITE_P(Fake, CheckedCombineTest,
                         ::testing::Values(FakeNccl()));

TEST_P(CheckedCombineTest, TheFirstElementThatIsNotFiniteIsNamedOnce) {
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareFull(domain);
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (double value : {kNoNumber, kInfinity, -kInfinity}) {
      for (int64_t column : {300, 301}) {
        SCOPED_TRACE(StrCat(ByteWidth(dtype), " bytes, ", value));
        std::vector<RankInput> inputs =
            CheckedInputs(Op::kCombine, routed, Fit({400, dtype}));
        SetTerm(routed, /*rank=*/2, /*choice=*/7, column, value, &inputs);
        SetTerm(routed, /*rank=*/2, /*choice=*/6, 302, value, &inputs);
        SetTerm(routed, /*rank=*/2, /*choice=*/8, 0, value, &inputs);
        const std::vector<Status> statuses =
            MakeStep(domain, Op::kCombine, inputs)->Run();
        for (int64_t rank : {0, 1, 3}) ExpectOk(statuses[rank]);
        EXPECT_EQ(Code::kInvalidArgument, statuses[2].code());
        EXPECT_EQ(StrCat("ep_combine(layer \"", testing::kLayerName,
                         "\"), rank 2: out[3, ", column, "] is not finite"),
                  statuses[2].message());
        ExpectOk(domain.groups[2]->Check());
      }
    }
  }
}

TEST_P(CheckedCombineTest, LargeNumbersAreFinite) {
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareFull(domain);
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    std::vector<RankInput> inputs =
        CheckedInputs(Op::kCombine, routed, Fit({8, dtype}));
    const double large = dtype == DType::kFloat16 ? 65504 : 3e38;
    for (int64_t column = 0; column < inputs[0].type.width; ++column) {
      SetTerm(routed, /*rank=*/1, /*choice=*/4, column, large, &inputs);
      SetTerm(routed, /*rank=*/1, /*choice=*/5, column, 0, &inputs);
    }
    const StepPtr step = MakeStep(domain, Op::kCombine, inputs);
    ExpectRuns(step);
    ExpectOracle(Op::kCombine, routed, inputs, step);
  }
}

TEST_P(CheckedCombineTest, NothingElseIsChecked) {
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareFull(domain);
  const auto run = [&](Op op, bool checked) {
    std::vector<RankInput> inputs = CheckedInputs(op, routed, AnyType());
    for (RankInput& input : inputs) input.checked = checked;
    SetTerm(routed, /*rank=*/0, /*choice=*/0, 0, kNoNumber, &inputs);
    ExpectRuns(MakeStep(domain, op, inputs));
  };
  run(Op::kCombine, /*checked=*/false);
  run(Op::kDispatchBwd, /*checked=*/true);
}

// Ops run on when one has a fault, and the host may look much later.
TEST_P(CheckedCombineTest, TheFirstOpIsReported) {
  Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareFull(domain);
  const auto check = std::exchange(domain.synchronize, nullptr);
  std::vector<StepPtr> steps;
  for (int64_t token : {-1, 4, 2}) {  // the first op has no fault
    std::vector<RankInput> inputs =
        CheckedInputs(Op::kCombine, routed, AnyType());
    for (int64_t rank = 0; rank < kDims.ep_size; ++rank) {
      inputs[rank].layer = StrCat("moe_", token);
      if (token < 0) continue;
      SetTerm(routed, rank, token * kDims.top_k, 6, kInfinity, &inputs);
    }
    steps.push_back(MakeStep(domain, Op::kCombine, inputs));
  }
  ForEachRank(kDims.ep_size, [&](int64_t rank) {
    for (const StepPtr& step : steps) {
      step->Post(rank);
      ExpectOk(step->Wait(rank));
    }
    ExpectWords({"\"moe_4\"", StrCat("rank ", rank, ": out[4, 6]")},
                check(rank));
    ExpectOk(check(rank));
  });
}

// Its NaNs are ours.
TEST_P(CheckedCombineTest, AFaultyRoutingIsReportedAsThat) {
  const Domain domain = MakeDomain(kWorld);
  Routed routed = PrepareFault(domain, kDims);
  ExpectRuns(MakeStep(domain, Op::kCombine,
                      CheckedInputs(Op::kCombine, routed, AnyType())));

  routed = PrepareFull(domain);
  std::rotate(routed.mems.begin(), routed.mems.begin() + 1, routed.mems.end());
  const StepPtr foreign = MakeStep(
      domain, Op::kCombine, CheckedInputs(Op::kCombine, routed, AnyType()));
  for (const Status& status : foreign->Run()) {
    ExpectWords({"handle.mem", "ep_prepare"}, status);
  }
  for (const auto& group : domain.groups) ExpectOk(group->Check());
}

// Each of these tells an op from another.
TEST_P(NcclGroupTest, RanksThatPrepareInDifferentPlacesFail) {
  const Domain domain = MakeDomain(kWorld);
  const auto inputs = PrepareInputs(kDims, RandomChoices(random_, kDims));
  const int64_t run = NextRun();
  for (const testing::Place& place :
       {testing::Place{run, /*position=*/1},
        testing::Place{run, 0, 0, /*program=*/1}}) {
    const StepPtr step = Step::Make(domain, Op::kPrepare, {run}, inputs);
    const StepPtr other = Step::Make(domain, Op::kPrepare, place, inputs);
    ForEachRank(kDims.ep_size, [&](int64_t rank) {
      const StepPtr& mine = rank == 2 ? other : step;
      mine->Post(rank);
      ExpectWords({"rank 0 and rank 2 disagree"}, mine->Wait(rank));
    });
  }
  PrepareRandom(domain, kDims);
}

// A rank that loads a program from a cache instantiates its ops more often, or
// less, than one that compiles it.
TEST_P(NcclGroupTest, RanksMayCountCopiesOfAnOpDifferently) {
  const Domain domain = MakeDomain(kWorld);
  const auto inputs = PrepareInputs(kDims, RandomChoices(random_, kDims));
  const int64_t run = NextRun();
  const StepPtr step = Step::Make(domain, Op::kPrepare, {run}, inputs);
  const StepPtr copy = Step::Make(domain, Op::kPrepare,
                                  {run, /*position=*/0, /*clone=*/1}, inputs);
  ForEachRank(kDims.ep_size, [&](int64_t rank) {
    const StepPtr& mine = rank == 2 ? copy : step;
    mine->Post(rank);
    ExpectOk(mine->Wait(rank));
  });
}

TEST_P(NcclGroupTest, AHandleOfAnotherSizeIsRefused) {
  const Domain domain = MakeDomain(kWorld);
  Routed routed = PrepareRandom(domain, kDims);
  for (std::vector<std::byte>& mem : routed.mems) mem.resize(mem.size() - 8);
  for (Op op : kMoves) {
    const StepPtr step = Step::Make(domain, op, {NextRun()},
                                    RandomInputs(op, routed, AnyType()));
    for (const Status& status : step->Run()) {
      ExpectWords({OpName(op), "handle.mem has", "ep_prepare"}, status);
    }
  }
}

TEST_P(NcclGroupTest, ClosingWaitsForTheDevice) {
  Domain domain = MakeDomain(kWorld);
  domain.synchronize = nullptr;
  const StepPtr step =
      Step::Make(domain, Op::kPrepare, {NextRun()},
                 PrepareInputs(kDims, RandomChoices(random_, kDims)));
  ForEachRank(kDims.ep_size, [&](int64_t rank) {
    if (rank == 3) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    step->Post(rank);
    ExpectOk(step->Wait(rank));
    (void)domain.groups[rank]->Close();
  });
  for (const auto& group : domain.groups) {
    (void)group->Close();
    ExpectWords({"finalized"}, group->Check());
    int64_t bytes = 0;
    ExpectWords({"finalized"}, group->MemBytes({}, 0, &bytes));
  }
}

// It may be long, and who asks for it never reads it.
TEST_P(NcclGroupTest, AnUnspecifiedTailIsNotWritten) {
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareRandom(domain, kDims);
  for (Op op : {Op::kDispatch, Op::kCombineBwd}) {
    std::vector<RankInput> inputs = RandomInputs(op, routed, AnyType());
    for (RankInput& input : inputs) input.tail = Tail::kUnspecified;
    const StepPtr step = Step::Make(domain, op, {NextRun()}, inputs);
    ExpectRuns(step);
    for (int64_t rank = 0; rank < kDims.ep_size; ++rank) {
      const std::vector<std::byte>& rows = step->output(rank).data.rows;
      const auto tail =
          rows.begin() +
          AnyType().bytes() * routed.layout.total_recv_tokens[rank];
      ASSERT_NE(rows.end(), tail);
      EXPECT_EQ(rows.end() - tail,
                std::count(tail, rows.end(), testing::kCanary));
    }
  }
}

// The blocks of threads that find nothing to do take time, too.
TEST_P(NcclGroupTest, ManySlotsTakeFewBlocks) {
  PlanDims dims = kDims;
  dims.capacity = 4096;
  const Domain domain = MakeDomain({dims});
  const Routed routed = PrepareRandom(domain, dims);
  fake::TakeLargestGrid("EpFinish");
  for (Op op : kMoves) ExpectWorks(domain, op, routed, AnyType());
  EXPECT_GE(512u, fake::TakeLargestGrid("EpFinish"));
}

// What a layer must not be is refused before anything is enqueued.
TEST_P(NcclGroupTest, LayersBeyondTheLimitsAreRefused) {
  const Domain domain = MakeDomain(kWorld);
  struct {
    const char* words;
    std::function<void(PlanDims*)> spoil;
  } cases[] = {
      {"recv_capacity_per_rank = 128", [](auto* d) { d->capacity = 128; }},
      {"alignment = 3", [](auto* d) { d->alignment = 3; }},
      {"alignment = 128", [](auto* d) { d->alignment = 128; }},
      {"max_tokens_per_rank = 6", [](auto* d) { d->num_tokens = 7; }},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.words);
    PlanDims dims = kDims;
    c.spoil(&dims);
    const StepPtr step =
        Step::Make(domain, Op::kPrepare, {NextRun()},
                   PrepareInputs(dims, RandomChoices(random_, dims)));
    for (const Status& status : step->Run()) {
      ExpectWords({"ep_prepare", testing::kLayerName, c.words}, status);
    }
  }
  PrepareRandom(domain, kDims);
}

TEST_P(NcclGroupTest, RowsBeyondTheLimitsAreRefused) {
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareRandom(domain, kDims);
  for (int64_t width : {4, 12, 2048}) {
    const StepPtr step = Step::Make(
        domain, Op::kDispatch, {NextRun()},
        RandomInputs(Op::kDispatch, routed, {width, DType::kFloat32}));
    for (const Status& status : step->Run()) {
      ExpectWords(
          {"ep_dispatch", testing::kLayerName, StrCat("rows of ", width)},
          status);
    }
  }
  ExpectWorks(domain, Op::kDispatch, routed, AnyType());
}

TEST_P(NcclGroupTest, ACombineWithWeightsIsRefused) {
  const Domain domain = MakeDomain(kWorld);
  const Routed routed = PrepareRandom(domain, kDims);
  std::vector<RankInput> inputs = RandomInputs(Op::kCombine, routed, AnyType());
  for (RankInput& input : inputs) input.data.weights.resize(kDims.capacity);
  const StepPtr step = Step::Make(domain, Op::kCombine, {NextRun()}, inputs);
  const std::vector<Status> statuses = step->Run();
  for (int64_t rank = 0; rank < kDims.ep_size; ++rank) {
    ExpectWords({"ep_combine", StrCat("rank ", rank, ":"), "weights"},
                statuses[rank]);
  }
}

// What gave up may still be writing, until the fake has ended it.
void AwaitStreams(const Domain& domain) {
  for (void* stream : domain.streams) {
    fake::Synchronize(static_cast<CUstream>(stream));
  }
}

// NCCL EP's kernels cannot be told to stop, so the group is not freed.
TEST_P(NcclGroupTest, AnAbsentRankIsNoticedInTime) {
  Auditor::AllowLeaks();
  WorldOptions options = kWorld;
  options.timeout_s = 1;
  const Domain domain = MakeDomain(options);
  const StepPtr step =
      Step::Make(domain, Op::kPrepare, {NextRun()},
                 PrepareInputs(kDims, RandomChoices(random_, kDims)));
  for (int64_t rank : {0, 1, 3}) step->Post(rank);
  ForEachRank(3, [&](int64_t i) {
    const Status status = step->Wait(i == 2 ? 3 : i);
    EXPECT_EQ(Code::kDeadlineExceeded, status.code()) << status.message();
    ExpectWords({"timeout_s = 1"}, status);
  });
  AwaitStreams(domain);
}

// Nobody checks, but no prepare is more than a window ahead of the device.
TEST_P(NcclGroupTest, AnAbsentRankIsNoticedByThoseWhoGoOn) {
  Auditor::AllowLeaks();
  WorldOptions options = kWorld;
  options.timeout_s = 1;
  Domain domain = MakeDomain(options);
  domain.synchronize = nullptr;
  std::vector<StepPtr> steps;
  for (int64_t i = 0; i < NcclGroup::kWindow + 2; ++i) {
    steps.push_back(
        Step::Make(domain, Op::kPrepare, {NextRun()},
                   PrepareInputs(kDims, RandomChoices(random_, kDims))));
  }
  ForEachRank(3, [&](int64_t rank) {
    for (size_t i = 0; i < steps.size(); ++i) {
      SCOPED_TRACE(i);
      steps[i]->Post(rank);
      const Status status = steps[i]->Wait(rank);
      if (i < NcclGroup::kWindow) {
        ExpectOk(status);
      } else {
        EXPECT_EQ(Code::kDeadlineExceeded, status.code());
        ExpectWords({"did not run within timeout_s = 1"}, status);
      }
    }
  });
  AwaitStreams(domain);
}

// What is held once the threads that earlier tests left behind are through.
fake::Holdings CountSettledHoldings() {
  for (;;) {
    const fake::Holdings holdings = fake::CountHoldings();
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    if (fake::CountHoldings() == holdings) return holdings;
  }
}

// To free what the device may yet use would wait for it, or worse.
TEST_P(NcclGroupTest, AStuckDeviceKeepsWhatItUses) {
  Auditor::AllowLeaks();
  const fake::Holdings before = CountSettledHoldings();
  {
    WorldOptions options = kWorld;
    options.timeout_s = 1;
    const Domain domain = GetParam().make(options)[0];
    const StepPtr step =
        Step::Make(domain, Op::kPrepare, {NextRun()},
                   PrepareInputs(kDims, RandomChoices(random_, kDims)));
    for (int64_t rank : {0, 1, 3}) step->Post(rank);
    for (int64_t rank : {0, 1, 3}) EXPECT_FALSE(step->Wait(rank).ok());
    AwaitStreams(domain);
  }
  const auto count = [&] {
    const fake::Holdings now = fake::CountHoldings();
    return std::vector<size_t>{now.contexts - before.contexts,
                               now.modules - before.modules,
                               now.host_allocations - before.host_allocations};
  };
  const std::vector<size_t> stuck = {3, 3, 3};
  Await([&] { return count() == stuck; });
  EXPECT_EQ(stuck, count());
}

TEST_P(NcclGroupTest, ARankThatCannotEnqueueFailsOnEveryRankInTime) {
  Auditor::AllowLeaks();
  WorldOptions options = kWorld;
  options.timeout_s = 1;
  struct {
    Op op;
    const char* function;
  } cases[] = {
      {Op::kPrepare, "ncclAllGather"},
      {Op::kPrepare, "ncclEpUpdateHandle"},
      {Op::kDispatch, "ncclEpDispatch"},
      {Op::kCombine, "ncclEpCombine"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.function);
    fake::TheMachine().failing.clear();
    const Domain domain = MakeDomain(options);
    const Routed routed = PrepareRandom(domain, kDims);
    const auto post = [&](Op op) {
      const StepPtr step =
          Step::Make(domain, op, {NextRun()},
                     op == Op::kPrepare
                         ? PrepareInputs(kDims, RandomChoices(random_, kDims))
                         : RandomInputs(op, routed, AnyType()));
      for (int64_t rank = 0; rank < kDims.ep_size; ++rank) step->Post(rank);
      return step;
    };
    fake::TheMachine().failing_device = 1;
    fake::TheMachine().failing = c.function;
    const StepPtr failing = post(c.op);
    const StepPtr later = post(Op::kDispatchBwd);
    ExpectWords({OpName(c.op), "rank 1", c.function}, failing->Wait(1));
    ExpectWords({"ep_dispatch_bwd", "rank 1", c.function}, later->Wait(1));
    for (int64_t rank : {0, 2, 3}) {
      const Status status = failing->Wait(rank);
      EXPECT_EQ(Code::kDeadlineExceeded, status.code()) << status.message();
    }
    AwaitStreams(domain);
  }
}

// Expects that ranks cannot connect.
void ExpectRefused(const Sizes& sizes, const std::vector<std::string>& words) {
  std::vector<std::shared_ptr<Group>> groups;
  for (const Status& status :
       Connect(sizes, /*timeout_s=*/10, /*first_device=*/0, &groups)) {
    ExpectWords(words, status);
  }
}

TEST(NcclGroupCreateTest, AnyOtherNcclIsRefused) {
  for (int version : {22907, 23000, 23006, 23100, 23201}) {
    fake::TheMachine().nccl_version = version;
    ExpectRefused(SizesFor(kDims),
                  {StrCat("NCCL is ", version / 10000, ".", version / 100 % 100,
                          ".", version % 100),
                   "2.30.7, neither an older nor a newer one", "docs/gpu.md"});
  }
}

TEST(NcclGroupCreateTest, AnyOtherNcclEpIsRefused) {
  for (int version : {100, 300}) {
    fake::TheMachine().nccl_ep_version = version;
    ExpectRefused(SizesFor(kDims),
                  {StrCat("NCCL EP is 0.", version / 100, ".0"), "0.2.0",
                   "nccl-extensions==0.1.0"});
  }
}

TEST(NcclGroupCreateTest, AnotherLayoutOfRowsIsRefused) {
  for (const char* variable :
       {"NCCL_EP_HT_EM_LOCAL_DUP", "NCCL_EP_HT_EM_NVLINK_DUP"}) {
    setenv(variable, "on", /*overwrite=*/1);
    ExpectRefused(SizesFor(kDims), {variable, "on", "unset it"});
    unsetenv(variable);
  }
}

TEST(NcclGroupCreateTest, AnOldGpuIsRefused) {
  fake::TheMachine().compute_capability_major = 8;
  ExpectRefused(SizesFor(kDims), {"compute capability 8", "Hopper"});
}

TEST(NcclGroupCreateTest, AMissingGpuIsRefused) {
  fake::TheMachine().num_devices = 0;
  ExpectRefused(SizesFor(kDims), {"invalid device ordinal"});
}

// What NCCL EP would end the process for.
TEST(NcclGroupCreateTest, SizesBeyondTheLimitsAreRefused) {
  struct {
    const char* words;
    std::function<void(Sizes*)> spoil;
  } cases[] = {
      {"ep_size = 1", [](Sizes* s) { s->ep_size = 1; }},
      {"num_experts = 6", [](Sizes* s) { s->ep_size = 2, s->num_experts = 6; }},
      {"num_experts = 10", [](Sizes* s) { s->num_experts = 10; }},
      {"num_experts = 1028", [](Sizes* s) { s->num_experts = 1028; }},
      {"recv_capacity_per_rank = 7", [](Sizes* s) { s->capacity = 7; }},
      {"4194305 rows", [](Sizes* s) { s->capacity = (1 << 22) + 1; }},
      {"24 bytes", [](Sizes* s) { s->max_row_bytes = 24; }},
      {"max_num_sms = 17", [](Sizes* s) { s->max_num_sms = 17; }},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.words);
    Sizes sizes = SizesFor(kDims);
    c.spoil(&sizes);
    ExpectRefused(sizes, {c.words});
  }
}

// These are refused before NCCL EP sees them: it would end the process, fail at
// the first dispatch, or count in too few bits.
TEST(NcclGroupCreateTest, WhatDoesNotSuitTheMachineIsRefused) {
  struct {
    const char* words;
    std::function<void(Sizes*, fake::Machine*)> spoil;
  } cases[] = {
      {"device API", [](auto*, auto* m) { m->device_api = false; }},
      {"2 ranks of an NVLink domain have 2 experts",
       [](auto* s, auto* m) { s->num_experts = 4, m->nvlink_ranks = 2; }},
      // These numbers are those of NCCL EP's own functions.
      {"rows of 76688 bytes need 232704 bytes",
       [](auto* s, auto*) { s->max_row_bytes = 76688; }},
      {"rows of 58000 bytes need 232704 bytes",
       [](auto* s, auto* m) { s->max_row_bytes = 58000, m->nvlink_ranks = 2; }},
      {"this GPU has 101376",
       [](auto* s, auto* m) {
         s->max_row_bytes = 1 << 16, m->shared_bytes = 101376;
       }},
      // 32 MiB, and 128 rows of tokens and slots, weights and a bitmap.
      {"needs 34082848 bytes of GPU memory beside JAX's, but 34082847",
       [](auto*, auto* m) { m->free_bytes = 34082847; }},
      {"times the 512 experts of an NVLink domain",
       [](auto* s, auto*) { s->capacity = 1 << 22, s->num_experts = 512; }},
      {"times num_experts = 1024 is more",
       [](auto* s, auto*) {
         s->num_experts = 1024;
         s->max_tokens = s->capacity = (1 << 21);
       }},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.words);
    Sizes sizes = SizesFor(kDims);
    fake::TheMachine() = fake::Machine();
    c.spoil(&sizes, &fake::TheMachine());
    ExpectRefused(sizes, {c.words, "NCCL EP's limit"});
  }
}

TEST(NcclGroupCreateTest, WhatJustSuitsTheMachineIsTaken) {
  Sizes sizes = SizesFor(kDims);
  Machine suits = {/*device_api=*/true, sizes.ep_size, /*shared_bytes=*/232448,
                   /*free_bytes=*/int64_t{1} << 40};
  sizes.max_row_bytes = 76672;
  ExpectOk(CheckMachine(sizes, suits));
  sizes.max_row_bytes = 57984;
  suits.nvlink_ranks = sizes.ep_size / 2;
  ExpectOk(CheckMachine(sizes, suits));
  suits.nvlink_ranks = sizes.ep_size;
  sizes.max_row_bytes = 1 << 15;
  sizes.num_experts = sizes.ep_size * 256;
  sizes.capacity = (1 << 21) - 1;
  ExpectOk(CheckMachine(sizes, suits));
}

TEST(NcclGroupCreateTest, MoreThanCanBeCountedIsRefused) {
  Sizes sizes = {};
  sizes.num_experts = sizes.ep_size = 1024;
  sizes.max_tokens = sizes.capacity = 1 << 21;
  Layer layer = {/*top_k=*/1, /*alignment=*/1, sizes.capacity, /*drop=*/true,
                 Tail::kZero};
  ExpectWords({"2147483648 rows"}, CheckLayer(sizes, layer, 1));
  sizes.max_tokens /= 2;
  ExpectOk(CheckLayer(sizes, layer, 1));
  layer.top_k = 33;
  ExpectWords({"top_k = 33"}, CheckLayer(sizes, layer, 1));
}

// A C++ exception comes through NCCL EP's C interface.
TEST(NcclGroupCreateTest, WhatNcclEpThrowsIsAnError) {
  const Libraries unused = {};
  const auto call = [&](const std::function<void()>& fail) {
    return CallNcclEp(unused, "ncclEpDispatch", [&] {
      fail();
      return ncclSuccess;
    });
  };
  ExpectWords({"ncclEpDispatch failed: Assertion"},
              call([] { throw std::runtime_error("Assertion"); }));
  ExpectWords({"ncclEpDispatch failed"}, call([] { throw 7; }));
}

TEST(NcclGroupCreateTest, ARankThatDoesNotComeIsNoticedInTime) {
  Auditor::AllowLeaks();
  fake::TheMachine().patience_s = 2;  // the thread that is left behind ends
  NcclGroup::Options options = {};
  options.name = "world";
  options.sizes = SizesFor(kDims);
  options.timeout_s = 0.5;
  ExpectOk(NewUniqueId("", "", &options.unique_id));
  std::shared_ptr<Group> group;
  const Status status = NcclGroup::Create(options, &group);
  EXPECT_EQ(Code::kDeadlineExceeded, status.code()) << status.message();
  std::this_thread::sleep_for(std::chrono::seconds(3));
  EXPECT_EQ(1u, fake::TakeViolations().size());
}

}  // namespace
}  // namespace ep::nccl
