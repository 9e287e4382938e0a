// SPDX-License-Identifier: Apache-2.0

// The inner loops of matrix products, compiled for several instruction sets.

#ifndef EP_FFI_MATMUL_KERNELS_H_
#define EP_FFI_MATMUL_KERNELS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ep_ffi/core/backend.h"

namespace ep {

// Names the array that a kernel fetches into the second cache while it
// computes: the matrices, since each of their elements is read or written once;
// or the result, if the matrices are copied.
enum class Fetch { kA, kB, kResult };

// A product a * b, and how it is computed. Distances count elements.
//
// The columns of b lie in panels of `Kernels::panel_width`; the last panel has
// a multiple of `Kernels::lanes`. The product has `depth` steps of b from step
// `first` on, which is step 0 of a.
struct Product {
  int64_t rows, first, depth, columns;
  const float* a;  // [rows, depth]
  int64_t a_row, a_step;
  const float* b;           // [first + depth or more, columns]
  int64_t b_step, b_panel;  // b_step 0: the steps of a panel are consecutive
  // This is [rows, columns], with rows up to the next multiple of
  // `Kernels::tile_rows`. The surplus ones mean nothing.
  float* out;
  int64_t out_row;
  bool adds;  // to what `out` has, rather than to zero
  Fetch fetch;
  int64_t ahead;  // from what is read of a or b to what is fetched
  // This is where `out` will be written in the end. Its distances count bytes.
  const std::byte* result;
  int64_t result_row, result_column;
};

struct Kernels {
  const char* name;
  int64_t lanes;  // of a vector
  int64_t panel_width;
  int64_t tile_rows;

  // Computes a * b, or adds it to `out`. Each element is one chain of
  // multiply-adds in order of the depth, fused where the instruction set has
  // it.
  void (*multiply)(const Product& product);

  // Adds n numbers to others.
  void (*add)(const float* in, int64_t n, float* out);

  // Writes the transpose of `in` [rows, columns], whose rows are `in_row`
  // apart. The rows of `out` are up to the next multiple of `lanes`, and the
  // surplus means nothing.
  void (*transpose)(const float* in, int64_t in_row, int64_t rows,
                    int64_t columns, float* out, int64_t out_row);

  // Converts n numbers to float32, after rounding them to the type `through`.
  void (*decode)(DType dtype, DType through, const std::byte* in, int64_t n,
                 float* out);

  // Rounds n numbers to a type.
  void (*encode)(DType dtype, const float* in, int64_t n, std::byte* out);
};

// Returns the kernels that this processor can run, the fastest first.
const std::vector<const Kernels*>& SupportedKernels();

}  // namespace ep

#endif  // EP_FFI_MATMUL_KERNELS_H_
