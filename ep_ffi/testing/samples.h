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

// Uniform in [low, high].
int64_t Uniform(Random& random, int64_t low, int64_t high);

// Enough slots for any routing of these sizes, whatever `dims.capacity` is.
int64_t WorstCaseCapacity(const PlanDims& dims);

// Sizes of every kind: no tokens, one expert, more choices than local experts,
// ragged alignments, and a capacity that often overflows if `drop`.
PlanDims RandomDims(Random& random, int64_t ep_size, bool drop);

// Distinct experts for each token, with unused choices among them.
Choices RandomChoices(Random& random, const PlanDims& dims);

// A rank's rows and `num_weights` weights, of either sign and many sizes.
RankData RandomData(Random& random, const RowType& type, int64_t num_rows,
                    int64_t num_weights);

// Makes NaN of what lies in slots that hold no token: nothing may read it.
void PoisonUnusedSlots(const RowType& type, const std::vector<Route>& recv,
                       RankData* slots);

}  // namespace ep::testing

#endif  // EP_FFI_TESTING_SAMPLES_H_
