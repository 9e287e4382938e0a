// SPDX-License-Identifier: Apache-2.0

// The contribution of a rank to an exchange: arrays for its peers, and the work
// of the rank after all ranks have posted.

#ifndef EP_FFI_BACKENDS_HOST_ENGINE_CONTRIBUTION_H_
#define EP_FFI_BACKENDS_HOST_ENGINE_CONTRIBUTION_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "ep_ffi/backends/host/movers/movers.h"
#include "ep_ffi/backends/host/transport/messages.h"
#include "ep_ffi/core/plan.h"
#include "ep_ffi/core/status.h"
#include "ep_ffi/core/trace.h"

namespace ep::host {

// The two arrays of a rank that its peers read. The op determines their kind;
// the other kind is null. The signature has their sizes.
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
  // Copies the parts of both arrays that other processes read to a segment.
  // Null: copy both arrays whole.
  std::function<void(std::byte* first, std::byte* second)> stage;
  // The work of this rank, in chunks that may run concurrently.
  int64_t num_chunks = 0;
  std::function<Status(const AllArrays& ranks, int64_t chunk)> run;
  // Returns the row counts for a trace, after the work; null for none.
  std::function<TracedRows()> moved;
};

// Copies the arrays of a contribution to a segment of sufficient size.
void StageArrays(const Contribution& contribution, std::byte* segment);

// Returns the arrays of a segment that a rank with this signature has staged.
Arrays StagedArrays(const Signature& signature, const std::byte* segment);

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_ENGINE_CONTRIBUTION_H_
