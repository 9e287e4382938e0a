// SPDX-License-Identifier: Apache-2.0

// The two data movers. Each pulls: a rank reads its peers' rows and writes
// its own outputs, so no two ranks ever write the same memory.
//
//   Scatter    token rows -> slots    (dispatch, backward of combine)
//   GatherSum  slots -> token rows    (combine, backward of dispatch)
//
// A mover is cut into independent chunks so that several threads can share
// it. Sums are taken in float32 in ascending k, rounded once; the file is
// compiled without contraction to fused multiply-adds, so that every machine
// gives the same bits.

#ifndef EP_FFI_BACKENDS_HOST_MOVERS_MOVERS_H_
#define EP_FFI_BACKENDS_HOST_MOVERS_MOVERS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/plan.h"
#include "ep_ffi/core/status.h"

namespace ep::host {

// The arrays that a rank lets its peers read: for Scatter its token rows and
// [T, K] weights, for GatherSum its slots and their weights. Weights may be
// null.
struct RankRows {
  const std::byte* rows;
  const float* weights;
};

struct Scatter {
  PlanDims dims;
  Plan plan;
  Tail tail;
  ScatterArgs args;

  int64_t num_chunks() const;
  Status RunChunk(const std::vector<RankRows>& ranks, int64_t chunk) const;

 private:
  // Runs the last chunk, which there is unless the tail is unspecified.
  void FillTail() const;
};

struct GatherSum {
  PlanDims dims;
  Plan plan;
  GatherArgs args;
  bool must_be_finite = false;  // whether a sum that is not is an error

  int64_t num_chunks() const;
  Status RunChunk(const std::vector<RankRows>& ranks, int64_t chunk) const;

 private:
  // Fails if the sum of a token is not finite, and names a term that is not.
  Status CheckFinite(const std::vector<RankRows>& ranks, int64_t token) const;
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_MOVERS_MOVERS_H_
