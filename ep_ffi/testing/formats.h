// SPDX-License-Identifier: Apache-2.0

// The three float formats by their definition: a fraction of a few bits times a
// power of two. These conversions are slow and obvious; tests compare the fast
// ones with them.

#ifndef EP_FFI_TESTING_FORMATS_H_
#define EP_FFI_TESTING_FORMATS_H_

#include <cstddef>
#include <cstdint>

#include "ep_ffi/core/backend.h"

namespace ep::testing {

// Returns the value of a bit pattern.
double Decode(DType dtype, uint32_t bits);

// Returns the bit pattern nearest to `value`, of two equally near ones the even
// one. Values beyond the largest finite one become infinite.
uint32_t Encode(DType dtype, double value);

// Decodes and encodes an element of an array.
double Load(DType dtype, const std::byte* array, int64_t index);
void Store(DType dtype, double value, std::byte* array, int64_t index);

}  // namespace ep::testing

#endif  // EP_FFI_TESTING_FORMATS_H_
