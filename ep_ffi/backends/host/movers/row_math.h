// SPDX-License-Identifier: Apache-2.0

// Sums of rows. A sum multiplies and adds in float32, in the order of its
// terms, and rounds once to the rows' dtype. Empty sums and sums of -0 are +0.

#ifndef EP_FFI_BACKENDS_HOST_MOVERS_ROW_MATH_H_
#define EP_FFI_BACKENDS_HOST_MOVERS_ROW_MATH_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ep_ffi/core/backend.h"

namespace ep::host {

struct Term {
  const std::byte* row;
  float scale;
};

// Returns the index of the first element that is infinite or NaN, or -1.
int64_t FindNotFinite(DType dtype, const std::byte* row, int64_t width);

// Writes the sum of the rows, each row multiplied by its scale.
void SumRows(DType dtype, const std::vector<Term>& terms, int64_t width,
             std::byte* out);

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_MOVERS_ROW_MATH_H_
