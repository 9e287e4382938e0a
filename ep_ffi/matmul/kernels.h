// SPDX-License-Identifier: Apache-2.0

// The inner loops of matrix products, for several instruction sets.

#ifndef EP_FFI_MATMUL_KERNELS_H_
#define EP_FFI_MATMUL_KERNELS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ep_ffi/core/backend.h"

namespace ep {

// The array that a kernel prefetches into the L2 cache: the matrices, whose
// elements are each used once, or the result if the matrices are copied.
enum class Fetch { kA, kB, kResult };

// A product a * b. Strides are in elements.
//
// b consists of panels of `Kernels::panel_width` columns; the width of the last
// panel is a multiple of `Kernels::lanes`. The product uses `depth` steps of b
// from step `first`, which corresponds to step 0 of a.
struct Product {
  int64_t rows, first, depth, columns;
  const float* a;  // [rows, depth]
  int64_t a_row, a_step;
  const float* b;           // [first + depth or more, columns]
  int64_t b_step, b_panel;  // b_step 0: the steps of a panel are consecutive
  // [rows, columns], with rows rounded up to a multiple of
  // `Kernels::tile_rows`. The surplus rows are undefined.
  float* out;
  int64_t out_row;
  bool adds;  // whether to add to `out` or to overwrite it
  Fetch fetch;
  int64_t ahead;  // prefetch distance in a or b
  // The final destination of `out`. Strides are in bytes.
  const std::byte* result;
  int64_t result_row, result_column;
};

struct Kernels {
  const char* name;
  int64_t lanes;  // float32 elements of a vector
  int64_t panel_width;
  int64_t tile_rows;

  // Computes a * b, or adds a * b to `out`. Each element is one chain of
  // multiply-adds in order of the depth, fused if the processor can fuse.
  void (*multiply)(const Product& product);

  void (*add)(const float* in, int64_t n, float* out);

  // Writes the transpose of `in` [rows, columns]. `in_row` and `out_row` are
  // strides. The rows of `out` are rounded up to a multiple of `lanes`, and the
  // surplus is undefined.
  void (*transpose)(const float* in, int64_t in_row, int64_t rows,
                    int64_t columns, float* out, int64_t out_row);

  // Converts n elements to float32, after rounding them to the type `through`.
  void (*decode)(DType dtype, DType through, const std::byte* in, int64_t n,
                 float* out);

  // Rounds n elements to a type.
  void (*encode)(DType dtype, const float* in, int64_t n, std::byte* out);
};

// Returns the kernels for this processor, the fastest first.
const std::vector<const Kernels*>& SupportedKernels();

}  // namespace ep

#endif  // EP_FFI_MATMUL_KERNELS_H_
