// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/movers/row_math.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "ep_ffi/core/denormals.h"
#include "ep_ffi/testing/formats.h"

namespace ep::host {
namespace {

using testing::Decode;
using testing::Encode;
using testing::Store;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A row and its scale. The dtype represents the values exactly.
struct Row {
  std::vector<double> values;
  float scale = 1;
};

// Returns the sums as bit patterns.
std::vector<uint32_t> Sum(DType dtype, const std::vector<Row>& rows,
                          int64_t width = 1) {
  std::vector<std::vector<std::byte>> arrays;
  std::vector<Term> terms;
  for (const Row& row : rows) {
    arrays.emplace_back(width * ByteWidth(dtype));
    for (int64_t i = 0; i < width; ++i) {
      Store(dtype, row.values[i], arrays.back().data(), i);
    }
    terms.push_back({arrays.back().data(), row.scale});
  }
  std::vector<std::byte> out(width * ByteWidth(dtype), std::byte{0x7f});
  SumRows(dtype, terms, width, out.data());
  std::vector<uint32_t> bits(width);
  for (int64_t i = 0; i < width; ++i) {
    std::memcpy(&bits[i], &out[i * ByteWidth(dtype)], ByteWidth(dtype));
  }
  return bits;
}

// Returns the bits of a float32 after rounding to the dtype.
uint32_t Rounded(DType dtype, float value) {
  return Sum(dtype, {{{1.0}, value}})[0];
}

bool IsNan(DType dtype, uint32_t bits) {
  return std::isnan(Decode(dtype, bits));
}

class RowMath : public ::testing::TestWithParam<DType> {};
class RowMath16 : public ::testing::TestWithParam<DType> {};

INSTANTIATE_TEST_SUITE_P(All, RowMath,
                         ::testing::Values(DType::kFloat32, DType::kBFloat16,
                                           DType::kFloat16));
INSTANTIATE_TEST_SUITE_P(All, RowMath16,
                         ::testing::Values(DType::kBFloat16, DType::kFloat16));

TEST_P(RowMath16, EveryValueIsItsOwnSum) {
  constexpr int kValues = 1 << 16;
  std::vector<std::byte> row(2 * kValues), out(2 * kValues);
  for (int i = 0; i < kValues; ++i) std::memcpy(&row[2 * i], &i, 2);
  SumRows(GetParam(), {{row.data(), 1.0f}}, kValues, out.data());
  for (uint32_t i = 0; i < kValues; ++i) {
    uint32_t sum = 0;
    std::memcpy(&sum, &out[2 * i], 2);
    if (IsNan(GetParam(), i)) {
      EXPECT_TRUE(IsNan(GetParam(), sum)) << i;
    } else {
      EXPECT_EQ(i == 0x8000 ? 0 : i, sum);  // -0 becomes +0
    }
  }
}

// Tests values near the midpoint of every two neighbouring values, including
// subnormal values and the largest finite value.
TEST_P(RowMath16, RoundsToNearestAndTiesToEven) {
  const uint32_t infinity = Encode(GetParam(), kInfinity);
  for (uint32_t low = 0; low < infinity; ++low) {
    const double a = Decode(GetParam(), low);
    const double ulp = low + 1 < infinity ? Decode(GetParam(), low + 1) - a
                                          : a - Decode(GetParam(), low - 1);
    const float middle = a + ulp / 2;
    const uint32_t even = low % 2 ? low + 1 : low;
    ASSERT_EQ(even, Rounded(GetParam(), middle)) << middle;
    ASSERT_EQ(low, Rounded(GetParam(), std::nextafter(middle, 0.0f)));
    ASSERT_EQ(low + 1, Rounded(GetParam(), std::nextafter(middle, kInfinity)));
    ASSERT_EQ(0x8000 | even, Rounded(GetParam(), -middle) | 0x8000);
  }
}

TEST_P(RowMath, RoundsProductsBeforeAddingThem) {
  // Rounding the product loses 2^-24, which a fused multiply-add would keep.
  const float scale = 1 + 0x1p-17;
  const double x = 1 + 0x1p-7;
  const float product = scale * x;
  ASSERT_NE(0.0f, std::fma(scale, static_cast<float>(x), -product));
  // Wide enough to use every lane of every vector unit.
  const int64_t width = 67;
  const std::vector<Row> rows = {{std::vector<double>(width, 1.0), -product},
                                 {std::vector<double>(width, x), scale}};
  EXPECT_EQ(std::vector<uint32_t>(width, 0), Sum(GetParam(), rows, width));
}

TEST_P(RowMath, ZeroSumsArePositive) {
  EXPECT_EQ(0u, Sum(GetParam(), {})[0]);
  EXPECT_EQ(0u, Sum(GetParam(), {{{-0.0}}})[0]);
  EXPECT_EQ(0u, Sum(GetParam(), {{{-0.0}}, {{-0.0}}})[0]);
  EXPECT_EQ(0u, Sum(GetParam(), {{{1}}, {{-1}}})[0]);
  // The sum underflows: in vectorized columns (64), and in a single column.
  const ScopedFlushDenormals flush;
  for (int64_t width : {1, 64}) {
    const std::vector<double> ones(width, 1);
    EXPECT_EQ(
        std::vector<uint32_t>(width, 0),
        Sum(GetParam(), {{ones, 0x1.0p-126f}, {ones, -0x1.1p-126f}}, width));
  }
}

// If rounded like a number, a NaN with every bit set would become zero.
TEST_P(RowMath, ANanWithEveryBitSetStaysANan) {
  const uint32_t bits = 0x7fffffff;
  float nan;
  std::memcpy(&nan, &bits, sizeof(nan));
  EXPECT_TRUE(IsNan(GetParam(), Rounded(GetParam(), nan)));
  EXPECT_TRUE(IsNan(GetParam(), Rounded(GetParam(), -nan)));
}

TEST_P(RowMath, InfinitiesAndNansStayNotFinite) {
  const uint32_t infinity = Encode(GetParam(), kInfinity);
  const uint32_t largest = infinity - 1;
  const double max = Decode(GetParam(), largest);
  EXPECT_EQ(largest, Sum(GetParam(), {{{max}}})[0]);
  EXPECT_EQ(infinity, Sum(GetParam(), {{{max}}, {{max}}})[0]);
  EXPECT_EQ(infinity, Sum(GetParam(), {{{kInfinity}}, {{-max}}})[0]);
  for (const std::vector<Row>& rows : std::vector<std::vector<Row>>{
           {{{kInfinity}}, {{-kInfinity}}},
           {{{kInfinity}, 0.0f}},
           {{{std::nan("")}}, {{1}}},
           {{{1}, std::nanf("")}},
       }) {
    EXPECT_TRUE(IsNan(GetParam(), Sum(GetParam(), rows)[0]));
  }
}

}  // namespace
}  // namespace ep::host
