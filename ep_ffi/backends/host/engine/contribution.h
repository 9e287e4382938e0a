// SPDX-License-Identifier: Apache-2.0

// The contribution of a rank to an exchange: arrays that its peers read, and
// the work that it does once all ranks have posted.

#ifndef EP_FFI_BACKENDS_HOST_ENGINE_CONTRIBUTION_H_
#define EP_FFI_BACKENDS_HOST_ENGINE_CONTRIBUTION_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "ep_ffi/backends/host/movers/movers.h"
#include "ep_ffi/backends/host/transport/signature.h"
#include "ep_ffi/core/plan.h"
#include "ep_ffi/core/status.h"
#include "ep_ffi/core/trace.h"

namespace ep::host {

// The two arrays that a rank lets its peers read. The op decides which kind
// they are; the other kind is null. Their sizes are in the rank's signature.
struct Arrays {
  RankRows rows = {};        // of a mover: rows and weights
  ChoicesView choices = {};  // of ep_prepare: starts and order
};

// The arrays of all ranks, by rank.
struct AllArrays {
  std::vector<RankRows> rows;
  std::vector<ChoicesView> choices;
};

struct Contribution {
  Signature signature;
  Arrays arrays;
  // Copies the parts of the arrays that other processes read to the places of
  // the first and the second array in a segment. If it is null, both arrays are
  // copied whole.
  std::function<void(std::byte* first, std::byte* second)> stage;
  // The work of this rank, in chunks that may run at the same time.
  int64_t num_chunks = 0;
  std::function<Status(const AllArrays& ranks, int64_t chunk)> run;
  // Returns what was moved, after the work; null for nothing.
  std::function<TracedRows()> moved;
};

// Copies the arrays of a contribution to a segment, which is large enough.
void StageArrays(const Contribution& contribution, std::byte* segment);

// Returns the arrays that a rank with this signature has staged in a segment.
Arrays StagedArrays(const Signature& signature, const std::byte* segment);

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_ENGINE_CONTRIBUTION_H_
