// SPDX-License-Identifier: Apache-2.0

// The two data movers, which copy or sum rows. A rank reads the rows of its
// peers and writes its own outputs, so no two ranks write the same memory.
//
//   Scatter    token rows -> slots    (dispatch, backward of combine)
//   GatherSum  slots -> token rows    (combine, backward of dispatch)
//
// A mover consists of independent chunks, which several threads may run.
// GatherSum adds in float32 in ascending k and rounds once. The compiler may
// not fuse multiply and add (copts.bzl), so that every machine computes the
// same bits.

#ifndef EP_FFI_BACKENDS_HOST_MOVERS_MOVERS_H_
#define EP_FFI_BACKENDS_HOST_MOVERS_MOVERS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/plan.h"
#include "ep_ffi/core/status.h"

namespace ep::host {

// The arrays of a rank that its peers read. For Scatter: token rows and [T, K]
// weights; for GatherSum: slots and [C] weights. Weights may be null.
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
  // Writes the tail. This is the last chunk, unless the tail is unspecified.
  void FillTail() const;
};

struct GatherSum {
  PlanDims dims;
  Plan plan;
  GatherArgs args;
  bool must_be_finite = false;  // whether an infinite or NaN sum is an error

  int64_t num_chunks() const;
  Status RunChunk(const std::vector<RankRows>& ranks, int64_t chunk) const;

 private:
  // Fails if a token's sum is not finite, and names a term that is not finite.
  Status CheckFinite(const std::vector<RankRows>& ranks, int64_t token) const;
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_MOVERS_MOVERS_H_
