// SPDX-License-Identifier: Apache-2.0

// Grouped matmul on CPUs, for ep/_src/matmul/grouped_matmul.py.
//
// Slab j has the sizes[j] rows of expert j, and follows slab j - 1. Arguments
// are rows X [C, F], and pairs of matrices W [L, F, G] and outs Y [C, G]. One
// of X, W and Y is missing, and is computed from the other two. For row r of
// slab j:
//
//   outs      Y[r] = X[r] W[j]
//   rows      X[r] = sum over pairs of Y[r] W[j]^T
//   matrices  W[j] = sum over rows r of slab j of X[r]^T Y[r]
//
// A BLAS does not suffice: it cannot read and write 16-bit and 32-bit matrices
// in place next to rows of another type, and it promises no order of sums. A
// result must have the same bits in all layouts of a mesh.
//
// The contract: matrices are rounded to the rows' type. Each element of a
// result starts from +0, adds float32 products in order of the contracted
// index, pair by pair, and is rounded once to its type. Multiply and add are
// fused if the processor can fuse them. So a sum of zeros is +0, and only an
// underflowing sum may be -0. The bits of a row of X or Y depend only on that
// row and its matrices: not on other rows, blocks or threads.

#ifndef EP_FFI_MATMUL_GROUPED_MATMUL_H_
#define EP_FFI_MATMUL_GROUPED_MATMUL_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/status.h"
#include "ep_ffi/matmul/kernels.h"

namespace ep {

// Equal to the values in ep/_src/matmul/grouped_matmul.py.
enum class Missing : int64_t { kRows, kMatrices, kOuts };

struct GroupedMatmulArgs {
  struct Pair {
    std::byte* matrices;  // [L, F, G]
    std::byte* outs;      // [C, G]
    int64_t width;        // G
  };

  Missing missing;
  Tail tail;             // how to write rows past the last slab
  const int32_t* sizes;  // [L]
  // [L, S], the sizes of the S segments at the start of each slab; the rows
  // after the segments are zero. The segments' matrices are added in a tree, as
  // in ep/_src/lax/ordered_sum.py.
  const int32_t* segments;
  int64_t num_slabs, num_segments;
  int64_t num_rows;  // C
  int64_t width;     // F
  DType row_type;    // dtype of rows and outs
  DType matrix_type;
  std::byte* rows;  // [C, F]
  std::vector<Pair> pairs;
};

// Computes the missing argument. Never reads rows past the last slab, and
// writes these rows only as `tail` requires. If the sizes do not fit, fails
// without writing. If a thread lacks memory for scratch arrays, fails with
// undefined results.
Status GroupedMatmul(const Kernels& kernels, const GroupedMatmulArgs& args,
                     Executor* executor);

}  // namespace ep

#endif  // EP_FFI_MATMUL_GROUPED_MATMUL_H_
