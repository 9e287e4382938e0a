// SPDX-License-Identifier: Apache-2.0

// Conversions of the three float formats by definition: a fraction times a
// power of two. Tests compare the fast conversions with these conversions.

#ifndef EP_FFI_TESTING_FORMATS_H_
#define EP_FFI_TESTING_FORMATS_H_

#include <cstddef>
#include <cstdint>

#include "ep_ffi/core/backend.h"

namespace ep::testing {

double Decode(DType dtype, uint32_t bits);

// Returns the bit pattern nearest to `value`, and rounds ties to even. Values
// beyond the largest finite number become infinite.
uint32_t Encode(DType dtype, double value);

double Load(DType dtype, const std::byte* array, int64_t index);
void Store(DType dtype, double value, std::byte* array, int64_t index);

}  // namespace ep::testing

#endif  // EP_FFI_TESTING_FORMATS_H_
