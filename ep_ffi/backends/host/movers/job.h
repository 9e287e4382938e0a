// SPDX-License-Identifier: Apache-2.0

// The job of a rank: one call of an op, and the code that moves its rows. A
// rank reads the arrays of its peers and writes its own outputs, so no two
// ranks write the same memory.
//
//   Prepare    sorted choices of all ranks -> plan of the rank
//   Scatter    token rows -> slots    (dispatch, backward of combine)
//   Gather     slots -> token rows    (combine, backward of dispatch)
//
// A job consists of independent chunks, which several threads may run. Gather
// adds in float32 in ascending k and rounds once. The compiler may not fuse
// multiply and add (copts.bzl), so that every machine computes the same bits.

#ifndef EP_FFI_BACKENDS_HOST_MOVERS_JOB_H_
#define EP_FFI_BACKENDS_HOST_MOVERS_JOB_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/plan.h"
#include "ep_ffi/core/status.h"

namespace ep::host {

// The values that must be equal on all ranks of an exchange, with the sizes of
// the two arrays that each rank posts. All values except the hash of the
// routing come from shapes and attributes. Messages contain the struct's bytes.
struct Signature {
  enum Field {
    kOp,
    kExperts,
    kTokens,
    kTopK,
    kWidth,
    kDType,
    kCapacity,
    kAlignment,
    kDrop,
    kTail,
    kWire,
    kFingerprint,
    kWeighted,
    kRouting,
    kFirstBytes,
    kSecondBytes,
    kNumFields,
  };
  int64_t values[kNumFields] = {};

  int64_t operator[](Field field) const { return values[field]; }
  int64_t& operator[](Field field) { return values[field]; }

  // Return the offset of the second array in a segment, and the total bytes.
  size_t second_offset() const;
  size_t staged_bytes() const;
  // Returns whether both arrays fit into a segment of `bytes`. Also works for
  // invalid values from a peer.
  bool FitsIn(size_t bytes) const;

  std::optional<Field> FirstDifference(const Signature& other) const;
  // Return the name and the value of a field, for error messages.
  static const char* Name(Field field);
  std::string ValueOf(Field field) const;
};

// The two arrays of a rank that its peers read. The signature contains their
// sizes.
//
//   Prepare    the two arrays of SortedChoices
//   Scatter    token rows, and weights [T, K]
//   Gather     slots, and weights [C]
struct Arrays {
  const void* first = nullptr;
  const void* second = nullptr;  // null if the array is empty
  // Whether another process can write to the arrays at any time.
  bool is_shared = false;

  const std::byte* rows() const { return static_cast<const std::byte*>(first); }
  const float* weights() const { return static_cast<const float*>(second); }
};

struct Job {
  enum Kind { kPrepare, kScatter, kGather };

  Kind kind;
  Call call;
  PlanDims dims;
  PrepareArgs prepare = {};
  // Scatter and Gather: the rows that peers read, and the rows that this rank
  // writes. A pointer to weights is null if the op has no such weights.
  Mem mem = {};
  ConstRows in = {};
  const float* in_weights = nullptr;
  Rows out = {};
  float* out_weights = nullptr;

  int32_t domain = 0;
  int32_t rank = 0;
  // `Open` sets the fields below.
  SortedChoices choices = {};  // Prepare: the choices of this rank
  Plan plan = {};              // Scatter and Gather: the plan of this rank

  // Checks the arguments. Call this method before all other methods.
  Status Open();

  Signature signature() const;
  Arrays arrays() const;

  // Copies to a segment the parts of both arrays that other processes read.
  // `is_local` says by rank whether the rank belongs to this process.
  void Stage(const std::vector<bool>& is_local, std::byte* segment) const;

  int64_t num_chunks() const;
  // Runs a chunk. `ranks` has the arrays of all ranks.
  Status RunChunk(const std::vector<Arrays>& ranks, int64_t chunk) const;

 private:
  Status SortTopk();
  void StageSlots(const std::vector<bool>& is_local, std::byte* rows,
                  std::byte* weights) const;
  Status Build(const std::vector<Arrays>& ranks) const;
  Status Scatter(const std::vector<Arrays>& ranks, int64_t chunk) const;
  void FillTail() const;
  Status Gather(const std::vector<Arrays>& ranks, int64_t chunk) const;
  // Fails if a token's sum is not finite, and names a term that is not finite.
  Status CheckFinite(const std::vector<Arrays>& ranks, int64_t token) const;
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_MOVERS_JOB_H_
