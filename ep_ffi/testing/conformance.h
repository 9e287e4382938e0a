// SPDX-License-Identifier: Apache-2.0

// What every backend must do, as one suite of tests. A backend takes part by
// saying how its groups are made and what it promises:
//
//   INSTANTIATE_TEST_CASE_P(Host, Conformance, ::testing::Values(Backend{
//       "threads", [](const WorldOptions& options) { ... }}));

#ifndef EP_FFI_TESTING_CONFORMANCE_H_
#define EP_FFI_TESTING_CONFORMANCE_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <iostream>
#include <ostream>
#include <string>
#include <vector>

#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/plan.h"
#include "ep_ffi/testing/oracle.h"
#include "ep_ffi/testing/ranks.h"
#include "ep_ffi/testing/samples.h"

namespace ep::testing {

struct Backend {
  std::string name;
  // Makes one group, on all ranks of all its domains.
  std::function<std::vector<Domain>(const WorldOptions&)> make;

  // What it takes: sizes made to fit, where the capacity may only grow; a
  // multiple for the width of rows; and how many ranks.
  std::function<PlanDims(PlanDims)> fit = [](PlanDims dims) { return dims; };
  int64_t width_multiple = 1;
  int64_t min_ep_size = 1;

  // Its sums are the contract's, to the bit; else they differ by so many
  // roundings at most, see RoundingSlack().
  bool exact_sums = true;
  double sum_roundings = 0;
  // ep_combine multiplies by weights.
  bool fuses_weights = true;
  // The bytes of a handle depend on the routing alone.
  bool repeatable_handles = true;
  // An op waits for its peers outside of any queue: they may come to their ops
  // in different orders, or not at all.
  bool any_order = true;
  // Ranks tell each other what an op is about, so that each knows what another
  // has wrong, and no op harms with what it was given.
  bool checks_every_op = true;
};

inline std::ostream& operator<<(std::ostream& out, const Backend& backend) {
  return out << backend.name;
}

// For tests that are not about sizes.
inline constexpr PlanDims kDims = {
    /*num_experts=*/8, /*ep_size=*/4,
    /*num_tokens=*/6,  /*top_k=*/2,
    /*capacity=*/64,   /*alignment=*/2,
    /*drop=*/false};
inline constexpr WorldOptions kWorld = {kDims};

// A routing that every rank of a domain has prepared.
struct Routed {
  PlanDims dims;
  Layout layout;
  std::vector<std::vector<std::byte>> mems;  // by rank
};

// Ends a test that needs what a backend does not promise, and says why.
#define EP_REQUIRE(promise, reason)                                    \
  if (!GetParam().promise) {                                           \
    std::cout << "[  SKIPPED ] " << GetParam() << " does not promise " \
              << #promise << ", and here " << reason << std::endl;     \
    return;                                                            \
  }

inline void ExpectOk(const Status& status) {
  EXPECT_TRUE(status.ok()) << status.message();
}

class Conformance : public ::testing::TestWithParam<Backend> {
 protected:
  Random random_{20240229};

  // Sizes and rows that the backend takes.
  PlanDims RandomFittingDims(int64_t ep_size, bool drop);
  RowType Fit(const RowType& type) const;
  // For tests that are not about rows.
  RowType AnyType() const { return Fit({5, DType::kFloat32}); }

  // Groups are closed when the test ends.
  std::vector<Domain> MakeWorld(const WorldOptions& options);
  Domain MakeDomain(const WorldOptions& options);
  void TearDown() override;

  int64_t NextRun() { return next_run_++; }

  // ep_prepare's inputs.
  std::vector<RankInput> PrepareInputs(const PlanDims& dims,
                                       const Choices& topk_idx) const;
  // Runs ep_prepare and expects the oracle's layout.
  Routed Prepare(const Domain& domain, const PlanDims& dims,
                 const Choices& topk_idx);
  Routed PrepareRandom(const Domain& domain, const PlanDims& dims);

  // Random inputs of another op. What lies in unused slots is NaN. A combine
  // has weights only if the backend multiplies by them.
  std::vector<RankInput> RandomInputs(Op op, const Routed& routed,
                                      const RowType& type,
                                      bool weighted = true);
  // Runs a step on all ranks and expects that to work.
  static void ExpectRuns(const StepPtr& step);
  // Expects of a step that is done what the oracle makes of its inputs.
  void ExpectOracle(Op op, const Routed& routed,
                    const std::vector<RankInput>& inputs, const StepPtr& step);
  // A random step, run, with its result checked.
  void ExpectWorks(const Domain& domain, Op op, const Routed& routed,
                   const RowType& type);

 private:
  std::vector<Domain> domains_;
  int64_t next_run_ = 1000;
};

}  // namespace ep::testing

#endif  // EP_FFI_TESTING_CONFORMANCE_H_
