// SPDX-License-Identifier: Apache-2.0

// The three float formats by their definition: a fraction of so many bits
// times a power of two. Slow and obvious, to hold fast conversions against.

#ifndef EP_FFI_TESTING_FORMATS_H_
#define EP_FFI_TESTING_FORMATS_H_

#include <cstddef>
#include <cstdint>

#include "ep_ffi/core/backend.h"

namespace ep::testing {

// The value of a bit pattern.
double Decode(DType dtype, uint32_t bits);

// The bit pattern nearest to `value`, ties to the even one; values beyond the
// largest finite one are infinite.
uint32_t Encode(DType dtype, double value);

// The same from and to an element of an array.
double Load(DType dtype, const std::byte* array, int64_t index);
void Store(DType dtype, double value, std::byte* array, int64_t index);

// What rounding to a format changes a value by at most, relative to it.
double UnitRoundoff(DType dtype);

}  // namespace ep::testing

#endif  // EP_FFI_TESTING_FORMATS_H_
