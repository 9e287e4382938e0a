// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/core/denormals.h"

#include <gtest/gtest.h>

#include <limits>

namespace ep {
namespace {

// Returns whether this thread reads denormals as zero, and writes zero instead.
bool Flushes() {
  volatile float smallest = std::numeric_limits<float>::min();
  volatile float denormal = std::numeric_limits<float>::denorm_min();
  volatile float half = 0.5f, large = 1e30f;
  const float made = smallest * half;
  const float taken = denormal * large;
  EXPECT_EQ(made == 0, taken == 0);
  return made == 0;
}

TEST(DenormalsTest, DenormalsAreZeroInTheScopeOnly) {
  EXPECT_FALSE(Flushes());
  {
    const ScopedFlushDenormals outer;
    EXPECT_TRUE(Flushes());
    {
      const ScopedFlushDenormals inner;
      EXPECT_TRUE(Flushes());
    }
    EXPECT_TRUE(Flushes());
  }
  EXPECT_FALSE(Flushes());
}

}  // namespace
}  // namespace ep
