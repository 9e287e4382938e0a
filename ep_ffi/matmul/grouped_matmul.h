// SPDX-License-Identifier: Apache-2.0

// Products of slabs of rows and matrices, for ep/_src/matmul/grouped_matmul.py.
//
// Slab j is the sizes[j] rows after the slabs 0 to j - 1. Of the rows X
// [C, F] and pairs of matrices W [L, F, G] and outs Y [C, G], one is missing
// and is computed from the others, where j is the slab of row r:
//
//   outs      Y[r] = X[r] W[j]
//   rows      X[r] = sum over pairs of Y[r] W[j]^T
//   matrices  W[j] = sum over rows r of slab j of X[r]^T Y[r]
//
// We have our own matmul for two reasons. Nothing that we may depend on reads
// and writes matrices of 16 and of 32 bits in place, next to rows of another
// type. And no BLAS promises an order of sums, but a result must have the same
// bits wherever its rows lie, in all layouts of a mesh.
//
// The promise: a matrix is rounded to the rows' type. Each element of a result
// starts from +0, adds products in float32 in order of the contracted index, of
// one pair after another, and is rounded once to its own type. Multiply and add
// are one operation where the processor has it. So a sum of zeros of any sign
// is +0, and only one that underflows may be -0. The bits of a row of X or Y
// depend on that row and its matrices alone: neither on the slab's other rows
// nor on blocks and threads.

#ifndef EP_FFI_MATMUL_GROUPED_MATMUL_H_
#define EP_FFI_MATMUL_GROUPED_MATMUL_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/status.h"
#include "ep_ffi/matmul/kernels.h"

namespace ep {

// ep/_src/matmul/grouped_matmul.py has the same values.
enum class Missing : int64_t { kRows, kMatrices, kOuts };

struct GroupedMatmulArgs {
  struct Pair {
    std::byte* matrices;  // [L, F, G]
    std::byte* outs;      // [C, G]
    int64_t width;        // G
  };

  Missing missing;
  Tail tail;             // of the missing rows or outs
  const int32_t* sizes;  // [L]
  // [L, S]: a slab begins with S segments, which have these numbers of rows,
  // and what follows the segments is zero. Each is summed into matrices on its
  // own, and the sums are added as the tree of
  // ep/_src/matmul/ordered_sum.py. With S = 0 the slab is one.
  const int32_t* segments;
  int64_t num_slabs, num_segments;
  int64_t num_rows;  // C
  int64_t width;     // F
  DType row_type;    // of rows and outs
  DType matrix_type;
  std::byte* rows;  // [C, F]
  std::vector<Pair> pairs;
};

// Computes the missing argument. Rows past the last slab are never read, and
// not written unless the tail says so. Fails before it writes if the sizes do
// not fit. If a thread lacks memory for scratch arrays, it fails, and what it
// has written means nothing.
Status GroupedMatmul(const Kernels& kernels, const GroupedMatmulArgs& args,
                     Executor* executor);

}  // namespace ep

#endif  // EP_FFI_MATMUL_GROUPED_MATMUL_H_
