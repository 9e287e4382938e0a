// SPDX-License-Identifier: Apache-2.0

// Random but repeatable inputs.

#ifndef EP_FFI_TESTING_SAMPLES_H_
#define EP_FFI_TESTING_SAMPLES_H_

#include <cstdint>
#include <random>
#include <vector>

#include "ep_ffi/core/plan.h"
#include "ep_ffi/testing/oracle.h"

namespace ep::testing {

using Random = std::mt19937_64;

// Returns a uniformly distributed number from [low, high].
int64_t Uniform(Random& random, int64_t low, int64_t high);

// Returns a capacity that suffices for every routing. Ignores `dims.capacity`.
int64_t WorstCaseCapacity(const PlanDims& dims);

// Returns random sizes, including zero tokens, one expert, more choices than
// local experts, and alignments that do not divide other sizes. With `drop`,
// routings often exceed the capacity.
PlanDims RandomDims(Random& random, int64_t ep_size, bool drop);

// Returns distinct experts for each token, and some unused choices.
Choices RandomChoices(Random& random, const PlanDims& dims);

// Returns inputs of an op other than ep_prepare, with weights if `weighted`.
// Numbers have both signs and different magnitudes.
RankData RandomInput(Random& random, Op op, const PlanDims& dims,
                     const RowType& type, bool weighted = true);

// Writes NaN to the slots without a token, which no op may read.
void PoisonUnusedSlots(const RowType& type, const std::vector<Route>& recv,
                       RankData* slots);

}  // namespace ep::testing

#endif  // EP_FFI_TESTING_SAMPLES_H_
