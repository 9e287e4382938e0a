// SPDX-License-Identifier: Apache-2.0

// The tests that every backend passes. A backend describes how it makes groups
// and which promises it makes, and gets the tests of these promises:
//
//   using ep::testing::Backend;
//
//   Backend Threads() {
//     Backend backend;
//     backend.name = "threads";
//     backend.make = [](const WorldOptions& options) { ... };
//     backend.any_order = false;  // makes no such promise
//     return backend;
//   }
//
//   EP_INSTANTIATE_CONFORMANCE(Host, Threads());
//
// Without any promise, a backend gets the suite `Conformance`. A new backend
// may begin with this suite and add promises one by one: `gathers` and
// `shares_failures` first, because other suites need them.
// --gtest_filter=*/OrderConformance.* selects one suite.

#ifndef EP_FFI_TESTING_CONFORMANCE_H_
#define EP_FFI_TESTING_CONFORMANCE_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/plan.h"
#include "ep_ffi/testing/expect.h"
#include "ep_ffi/testing/oracle.h"
#include "ep_ffi/testing/ranks.h"
#include "ep_ffi/testing/samples.h"

namespace ep::testing {

struct Backend {
  std::string name;
  // Makes one group with all ranks of all domains.
  std::function<std::vector<Domain>(const WorldOptions&)> make;

  // The sizes that the backend supports.

  // Returns the nearest supported sizes; the capacity may only grow.
  std::function<PlanDims(PlanDims)> fit = [](PlanDims dims) { return dims; };
  int64_t width_multiple = 1;  // row widths must be multiples
  int64_t min_ep_size = 1;

  // The promises of the backend, each with the suite that tests it.

  // Implements `Group::Gather` bit for bit as the numeric contract requires.
  // (GatherConformance)
  bool gathers = true;
  // Fails an op on every rank if one rank fails, with a message that names the
  // op, the layer and the rank. (FailureConformance)
  bool shares_failures = true;
  // Lets ranks call their ops in different orders, because no queue blocks
  // while an op waits for its peers. (OrderConformance)
  bool any_order = true;
  // Exchanges a description of every op between ranks. So each rank learns the
  // errors of other ranks, and invalid inputs do no harm. (CheckConformance)
  bool checks_every_op = true;

  // Promises that have no suite. Other tests read them.

  // Multiplies rows by weights in ep_combine.
  bool fuses_weights = true;
  // Makes handles whose bytes depend on the routing alone.
  bool repeatable_handles = true;
};

inline std::ostream& operator<<(std::ostream& out, const Backend& backend) {
  return out << backend.name;
}

// The default sizes, for tests in which the sizes do not matter.
inline constexpr PlanDims kDims = {
    /*num_experts=*/8, /*ep_size=*/4,
    /*num_tokens=*/6,  /*top_k=*/2,
    /*capacity=*/64,   /*alignment=*/2,
    /*drop=*/false};
inline constexpr WorldOptions kWorld = {kDims};

// The result of ep_prepare on every rank of a domain.
struct Routed {
  PlanDims dims;
  Layout layout;
  std::vector<std::vector<std::byte>> mems;  // EpHandle.mem by rank
};

// Run a step and expect success, or a failure, on every rank.
void ExpectRuns(const StepPtr& step);
void ExpectFailureOnAll(const Failure& expected, const StepPtr& step);
void ExpectWordsOnAll(const std::vector<std::string>& words,
                      const StepPtr& step);
// Expects these results of ep_prepare on a rank. Does not compare `mem`.
void ExpectCounts(const Layout& expected, int64_t rank,
                  const RankOutput& actual);

// The base class of tests of a backend.
class BackendTest : public ::testing::Test {
 protected:
  explicit BackendTest(Backend backend) : backend_(std::move(backend)) {}

  const Backend backend_;
  Random random_{20240229};

  // Return sizes and row types that the backend supports.
  PlanDims RandomFittingDims(int64_t ep_size, bool drop);
  RowType Fit(const RowType& type) const;
  // Returns a row type for tests in which the row type does not matter.
  RowType AnyType() const { return Fit({5, DType::kFloat32}); }

  // Make groups, which TearDown closes.
  std::vector<Domain> MakeWorld(const WorldOptions& options);
  Domain MakeDomain(const WorldOptions& options);
  void TearDown() override;

  int64_t NextRun() { return next_run_++; }

  std::vector<RankInput> PrepareInputs(const PlanDims& dims,
                                       const Choices& topk_idx) const;
  // Return a step of any op, of ep_prepare with given or random choices, or of
  // another op with random inputs. Without a `place`, the step starts a new
  // run.
  StepPtr NewStep(const Domain& domain, Op op,
                  const std::vector<RankInput>& inputs);
  StepPtr NewPrepare(const Domain& domain, const PlanDims& dims,
                     const Choices& topk_idx);
  StepPtr NewPrepare(const Domain& domain, const PlanDims& dims);
  StepPtr NewMove(const Domain& domain, Op op, const Routed& routed);
  StepPtr NewMove(const Domain& domain, Op op, const Routed& routed,
                  const Place& place);
  // Runs ep_prepare and expects the oracle's layout.
  Routed Prepare(const Domain& domain, const PlanDims& dims,
                 const Choices& topk_idx);
  Routed PrepareRandom(const Domain& domain, const PlanDims& dims);

  // Returns random inputs of an op other than ep_prepare. Unused slots are NaN.
  // A combine has weights only if the backend fuses weights.
  std::vector<RankInput> RandomInputs(Op op, const Routed& routed,
                                      const RowType& type,
                                      bool weighted = true);
  // Expects the oracle's outputs from a step that has run.
  void ExpectOracle(const Routed& routed, const StepPtr& step);
  // Runs an op on random inputs and expects the oracle's outputs.
  void ExpectWorks(const Domain& domain, Op op, const Routed& routed,
                   const RowType& type, bool weighted = true);

 private:
  std::vector<Domain> domains_;
  int64_t next_run_ = 1000;
};

class Conformance : public BackendTest,
                    public ::testing::WithParamInterface<Backend> {
 public:
  // Returns whether a backend gets the tests of this suite.
  static bool IsFor(const Backend&) { return true; }

 protected:
  Conformance() : BackendTest(GetParam()) {}
};

class GatherConformance : public Conformance {
 public:
  static bool IsFor(const Backend& b) { return b.gathers; }
};

class FailureConformance : public Conformance {
 public:
  static bool IsFor(const Backend& b) { return b.shares_failures; }
};

class OrderConformance : public Conformance {
 public:
  static bool IsFor(const Backend& b) {
    return b.gathers && b.shares_failures && b.any_order;
  }
};

class CheckConformance : public Conformance {
 public:
  static bool IsFor(const Backend& b) {
    return b.gathers && b.shares_failures && b.checks_every_op;
  }
};

// Returns the parameters of a suite: the backends that get its tests.
template <typename Suite>
auto BackendsOf(std::initializer_list<Backend> backends) {
  std::vector<Backend> chosen;
  for (const Backend& backend : backends) {
    if (Suite::IsFor(backend)) chosen.push_back(backend);
  }
  return ::testing::ValuesIn(chosen);
}

// Registers the tests for some backends. Use this macro in a namespace.
#define EP_INSTANTIATE_CONFORMANCE(name, ...)                   \
  EP_INSTANTIATE_SUITE_(name, Conformance, __VA_ARGS__);        \
  EP_INSTANTIATE_SUITE_(name, GatherConformance, __VA_ARGS__);  \
  EP_INSTANTIATE_SUITE_(name, FailureConformance, __VA_ARGS__); \
  EP_INSTANTIATE_SUITE_(name, OrderConformance, __VA_ARGS__);   \
  EP_INSTANTIATE_SUITE_(name, CheckConformance, __VA_ARGS__)

#define EP_INSTANTIATE_SUITE_(name, suite, ...) \
  using ::ep::testing::suite;                   \
  INSTANTIATE_TEST_SUITE_P(name, suite,         \
                           ::ep::testing::BackendsOf<suite>({__VA_ARGS__}))

}  // namespace ep::testing

#endif  // EP_FFI_TESTING_CONFORMANCE_H_
