// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/testing/samples.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "ep_ffi/testing/formats.h"

namespace ep::testing {
namespace {

// Returns a number of moderate size, so that sums round but stay finite.
float RandomFloat(Random& random) {
  const double fraction = std::uniform_real_distribution<double>(-1, 1)(random);
  return std::ldexp(fraction, Uniform(random, -6, 4));
}

}  // namespace

int64_t Uniform(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

int64_t WorstCaseCapacity(const PlanDims& dims) {
  const int64_t num_local = dims.num_local_experts();
  return dims.ep_size * dims.num_tokens * std::min(dims.top_k, num_local) +
         num_local * dims.alignment;
}

PlanDims RandomDims(Random& random, int64_t ep_size, bool drop) {
  PlanDims dims;
  dims.ep_size = ep_size;
  dims.num_experts = Uniform(random, 1, 5 * ep_size);
  dims.num_tokens = Uniform(random, 0, 20);
  dims.top_k = Uniform(random, 1, 4);
  dims.alignment = Uniform(random, 0, 1) ? 1 : Uniform(random, 2, 9);
  dims.drop = drop;
  dims.capacity = WorstCaseCapacity(dims);
  if (drop) dims.capacity = Uniform(random, 1, dims.capacity);
  return dims;
}

Choices RandomChoices(Random& random, const PlanDims& dims) {
  std::vector<int64_t> candidates(dims.num_experts);
  std::iota(candidates.begin(), candidates.end(), 0);
  candidates.resize(dims.num_experts + dims.top_k, -1);
  Choices choices(dims.ep_size);
  for (std::vector<int64_t>& mine : choices) {
    for (int64_t t = 0; t < dims.num_tokens; ++t) {
      std::shuffle(candidates.begin(), candidates.end(), random);
      mine.insert(mine.end(), candidates.begin(),
                  candidates.begin() + dims.top_k);
    }
  }
  return choices;
}

RankData RandomInput(Random& random, Op op, const PlanDims& dims,
                     const RowType& type, bool weighted) {
  const bool scatters = IsScatter(op);
  const int64_t num_rows = scatters ? dims.num_tokens : dims.capacity;
  RankData data;
  data.rows.resize(num_rows * type.bytes());
  for (int64_t i = 0; i < num_rows * type.width; ++i) {
    Store(type.dtype, RandomFloat(random), data.rows.data(), i);
  }
  if (op == Op::kCombineBwd || !weighted) return data;
  data.weights.resize(scatters ? dims.num_choices() : dims.capacity);
  for (float& weight : data.weights) weight = RandomFloat(random);
  return data;
}

void PoisonUnusedSlots(const RowType& type, const std::vector<Route>& recv,
                       RankData* slots) {
  for (size_t c = 0; c < recv.size(); ++c) {
    if (recv[c].rank >= 0) continue;
    for (int64_t h = 0; h < type.width; ++h) {
      Store(type.dtype, std::nan(""), slots->rows.data(), c * type.width + h);
    }
    if (!slots->weights.empty()) slots->weights[c] = std::nanf("");
  }
}

}  // namespace ep::testing
