// SPDX-License-Identifier: Apache-2.0

// Tests the grouped matmul, and the distribution of work to threads.

#include "ep_ffi/matmul/grouped_matmul.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <new>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ep_ffi/core/denormals.h"
#include "ep_ffi/core/mutex.h"
#include "ep_ffi/matmul/shared_work.h"
#include "ep_ffi/testing/formats.h"
#include "ep_ffi/testing/samples.h"

namespace ep {
namespace {

using testing::Decode;
using testing::Encode;
using testing::Load;
using testing::Random;
using testing::Store;
using testing::Uniform;

constexpr Missing kMissing[] = {Missing::kRows, Missing::kMatrices,
                                Missing::kOuts};
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// An executor that starts a thread per task, and claims `num_threads` threads.
class Threads : public Executor {
 public:
  explicit Threads(int64_t num_threads) : num_threads_(num_threads) {}
  ~Threads() override {
    for (std::thread& thread : threads_) thread.join();
  }
  void Schedule(std::function<void()> task) override {
    threads_.emplace_back(std::move(task));
  }
  int64_t num_threads() const override { return num_threads_; }

 private:
  const int64_t num_threads_;
  std::vector<std::thread> threads_;
};

// An array of NaN that ends where its memory ends, so that AddressSanitizer
// detects reads past the end.
class Array {
 public:
  Array(DType dtype, int64_t size)
      : dtype_(dtype), size_(size), bytes_(size * ByteWidth(dtype)) {
    for (int64_t i = 0; i < size; ++i) Set(i, kNan);
  }

  std::byte* data() { return bytes_.data(); }
  int64_t size() const { return size_; }
  double Get(int64_t i) const { return Load(dtype_, bytes_.data(), i); }
  void Set(int64_t i, double value) { Store(dtype_, value, data(), i); }
  std::string Bits(int64_t first, int64_t n) const {
    return {reinterpret_cast<const char*>(bytes_.data()) +
                first * ByteWidth(dtype_),
            static_cast<size_t>(n * ByteWidth(dtype_))};
  }

 private:
  DType dtype_;
  int64_t size_;
  std::vector<std::byte> bytes_;
};

struct Case {
  int64_t num_rows, width;
  std::vector<int64_t> widths;
  std::vector<int32_t> sizes;
  std::vector<std::vector<int32_t>> segments = {};
  DType row_type = DType::kFloat32;
  DType matrix_type = DType::kFloat32;
  Tail tail = Tail::kUnspecified;

  int64_t used() const {
    return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  }

  // By default, a slab is one segment.
  int64_t num_segments() const {
    return segments.empty() ? 1 : segments[0].size();
  }
  std::vector<int32_t> SegmentsOf(size_t slab) const {
    return segments.empty() ? std::vector<int32_t>{sizes[slab]}
                            : segments[slab];
  }
};

// Random arguments, with NaN in the rows outside all slabs.
struct Arrays {
  Arrays(const Case& c, uint64_t seed)
      : rows(c.row_type, c.num_rows * c.width) {
    Random random(seed);
    const auto fill = [&](Array& array, int64_t n) {
      for (int64_t i = 0; i < n; ++i) {
        array.Set(i, std::ldexp(Uniform(random, -(1 << 20), 1 << 20), -20));
      }
    };
    fill(rows, c.used() * c.width);
    for (int64_t width : c.widths) {
      matrices.emplace_back(c.matrix_type, c.sizes.size() * c.width * width);
      fill(matrices.back(), matrices.back().size());
      outs.emplace_back(c.row_type, c.num_rows * width);
      fill(outs.back(), c.used() * width);
    }
  }

  std::vector<Array*> Of(Missing missing) {
    std::vector<Array*> arrays;
    if (missing == Missing::kRows) arrays.push_back(&rows);
    for (Array& x : missing == Missing::kOuts ? outs : matrices) {
      if (missing != Missing::kRows) arrays.push_back(&x);
    }
    return arrays;
  }

  Array rows;
  std::vector<Array> matrices, outs;
};

Status Compute(const Kernels& kernels, const Case& c, Missing missing,
               Arrays* arrays, Executor* executor = nullptr) {
  std::vector<int32_t> segments;
  for (size_t j = 0; j < c.sizes.size(); ++j) {
    for (int32_t size : c.SegmentsOf(j)) segments.push_back(size);
  }
  GroupedMatmulArgs args;
  args.missing = missing;
  args.tail = c.tail;
  args.sizes = c.sizes.data();
  args.segments = segments.data();
  args.num_slabs = c.sizes.size();
  args.num_segments = c.num_segments();
  args.num_rows = c.num_rows;
  args.width = c.width;
  args.row_type = c.row_type;
  args.matrix_type = c.matrix_type;
  args.rows = arrays->rows.data();
  for (size_t i = 0; i < c.widths.size(); ++i) {
    args.pairs.push_back(
        {arrays->matrices[i].data(), arrays->outs[i].data(), c.widths[i]});
  }
  return GroupedMatmul(kernels, args, executor);
}

// Returns sum + x * y. Inputs are multiples of 2^-20 below 1, so product and
// sum are exact in double, and the result is rounded once.
float Chain(const Kernels& kernels, float sum, float x, float y) {
  const bool is_fused = std::string(kernels.name) != "baseline";
  if (is_fused) return static_cast<float>(double{x} * y + sum);
  const float product = x * y;
  return sum + product;
}

// Adds neighbouring sums until one sum is left.
float Tree(std::vector<float> sums) {
  while (sums.size() > 1) {
    std::vector<float> next;
    for (size_t i = 0; i + 1 < sums.size(); i += 2) {
      next.push_back(sums[i] + sums[i + 1]);
    }
    if (sums.size() % 2) next.push_back(sums.back());
    sums = next;
  }
  return sums[0];
}

// Computes the missing argument with plain loops. Each element is one chain of
// additions or, with segments, a tree of one chain per segment.
std::vector<std::vector<double>> Loop(const Kernels& kernels, const Case& c,
                                      Missing missing, Arrays& arrays) {
  std::vector<std::vector<std::vector<float>>> sums;
  const bool is_tree = missing == Missing::kMatrices;
  for (Array* x : arrays.Of(missing)) {
    sums.emplace_back(x->size(),
                      std::vector<float>(is_tree ? c.num_segments() : 1));
  }
  int64_t start = 0;
  for (size_t j = 0; j < c.sizes.size(); ++j) {
    int64_t r = start;
    start += c.sizes[j];
    const auto segments =
        is_tree ? c.SegmentsOf(j) : std::vector<int32_t>{c.sizes[j]};
    for (size_t s = 0; s < segments.size(); ++s) {
      for (const int64_t end = r + segments[s]; r < end; ++r) {
        for (size_t p = 0; p < c.widths.size(); ++p) {
          for (int64_t f = 0; f < c.width; ++f) {
            for (int64_t g = 0; g < c.widths[p]; ++g) {
              const int64_t x = r * c.width + f, y = r * c.widths[p] + g;
              const int64_t m = (j * c.width + f) * c.widths[p] + g;
              const auto add = [&](std::vector<float>& sum, double a,
                                   double b) {
                sum[s] = Chain(kernels, sum[s], a, b);
              };
              const auto matrix = [&] {
                return Decode(c.row_type,
                              Encode(c.row_type, arrays.matrices[p].Get(m)));
              };
              if (missing == Missing::kRows) {
                add(sums[0][x], arrays.outs[p].Get(y), matrix());
              } else if (missing == Missing::kMatrices) {
                add(sums[p][m], arrays.rows.Get(x), arrays.outs[p].Get(y));
              } else {
                add(sums[p][y], arrays.rows.Get(x), matrix());
              }
            }
          }
        }
      }
    }
  }
  const DType type = missing == Missing::kMatrices ? c.matrix_type : c.row_type;
  std::vector<std::vector<double>> results;
  for (const auto& array : sums) {
    std::vector<double>& result = results.emplace_back();
    for (const auto& sum : array) {
      result.push_back(Decode(type, Encode(type, Tree(sum))));
    }
  }
  return results;
}

// Compares each missing argument with plain loops.
void Check(const Kernels& kernels, const Case& c) {
  for (Missing missing : kMissing) {
    Arrays arrays(c, 7);
    const auto expected = Loop(kernels, c, missing, arrays);
    for (Array* x : arrays.Of(missing)) {
      for (int64_t i = 0; i < x->size(); ++i) x->Set(i, 77);
    }
    ASSERT_TRUE(Compute(kernels, c, missing, &arrays).ok());
    for (size_t result = 0; result < expected.size(); ++result) {
      const Array& out = *arrays.Of(missing)[result];
      const int64_t width =
          missing == Missing::kRows ? c.width : c.widths[result];
      const int64_t used =
          missing == Missing::kMatrices ? out.size() : c.used() * width;
      for (int64_t i = 0; i < out.size(); ++i) {
        const double got = out.Get(i);
        if (i < used) {
          ASSERT_EQ(expected[result][i], got)
              << kernels.name << " missing " << static_cast<int>(missing)
              << " result " << result << " at " << i;
        } else if (c.tail == Tail::kNan) {
          ASSERT_TRUE(std::isnan(got));
        } else {
          ASSERT_EQ(c.tail == Tail::kZero ? 0 : 77, got);
        }
      }
    }
  }
}

class GroupedMatmulTest : public ::testing::TestWithParam<const Kernels*> {
 protected:
  const Kernels& kernels_ = *GetParam();
};

INSTANTIATE_TEST_SUITE_P(AllKernels, GroupedMatmulTest,
                         ::testing::ValuesIn(SupportedKernels()));

// The bits of an output row depend only on its input row and its matrix.
TEST_P(GroupedMatmulTest, EqualsPlainLoopsForAllShapes) {
  Check(kernels_, {40, 17, {33, 5}, {3, 0, 9, 20}, {}});
  Check(kernels_, {200, 70, {9, 4}, {20, 151, 5}, {}});
  Check(kernels_, {150, 16, {48}, {1, 149}, {}});   // copies of b
  Check(kernels_, {7, 600, {20}, {7}, {}});         // many steps
  Check(kernels_, {3, 2, {1500}, {1, 1}, {}});      // many columns
  Check(kernels_, {1200, 3, {2}, {1100}, {}});      // many rows
  Check(kernels_, {40, 17, {1, 5}, {16, 16}, {}});  // a pair of one column
  Check(kernels_, {40, 1, {16, 5}, {16, 16}, {}});
  Check(kernels_, {0, 4, {3}, {0, 0}, {}});
  Check(kernels_, {5, 0, {3}, {5}, {}});
  Check(kernels_, {5, 3, {0}, {5}, {}});
  Check(kernels_,
        {5, 3, {2}, {}, {}, DType::kFloat32, DType::kFloat32, Tail::kZero});
}

TEST_P(GroupedMatmulTest, SupportsAllPairsOfTypes) {
  for (DType row_type : testing::kDTypes) {
    for (DType matrix_type : testing::kDTypes) {
      for (Tail tail : {Tail::kUnspecified, Tail::kZero, Tail::kNan}) {
        Check(kernels_,
              {30, 19, {21, 16}, {5, 18}, {}, row_type, matrix_type, tail});
      }
    }
  }
}

TEST_P(GroupedMatmulTest, IgnoresRowsAfterTheSegments) {
  Check(kernels_,
        {50, 9, {20}, {10, 0, 35}, {{3, 0, 5}, {0, 0, 0}, {5, 10, 20}}});
  Check(kernels_, {50, 9, {20}, {10, 20}, {{10}, {4}}, DType::kBFloat16});
}

// One contracted dimension exceeds the depth of one call of `multiply`.
TEST_P(GroupedMatmulTest, AddsLongChainsInOrder) {
  Check(kernels_, {11, 530, {20, 7}, {5, 6}});
  Check(kernels_, {11, 9, {530, 40}, {5, 6}});
  Check(kernels_, {539, 9, {48, 7}, {530, 9}});
}

TEST_P(GroupedMatmulTest, AddsSegmentsAsATree) {
  for (int num_segments = 1; num_segments < 8; ++num_segments) {
    Case c = {90, 11, {37}, {80}, {{}}};
    for (int s = 0; s < num_segments; ++s) c.segments[0].push_back(3 + s);
    Check(kernels_, c);
  }
}

TEST_P(GroupedMatmulTest, FlushesSubnormalResults) {
  const Case c = {1, 1, {1}, {1}};
  for (Missing missing : kMissing) {
    Arrays arrays(c, 1);
    for (Array* x : {&arrays.rows, &arrays.matrices[0], &arrays.outs[0]}) {
      x->Set(0, 0x1p-70);
    }
    ASSERT_TRUE(Compute(kernels_, c, missing, &arrays).ok());
    EXPECT_EQ(0, arrays.Of(missing)[0]->Get(0));
  }
}

// Expects equal bits, except that any NaN equals any other NaN.
void ExpectSame(DType dtype, uint32_t expected, uint32_t got) {
  if (std::isnan(Decode(dtype, expected))) {
    EXPECT_TRUE(std::isnan(Decode(dtype, got)));
  } else {
    EXPECT_EQ(expected, got);
  }
}

TEST_P(GroupedMatmulTest, ConvertsAllNumbers) {
  constexpr int kNumbers = 1 << 16;
  for (DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    std::vector<uint16_t> halves(kNumbers);
    std::iota(halves.begin(), halves.end(), 0);
    std::vector<uint32_t> floats(kNumbers);
    const auto decode = [&](DType from, const void* in) {
      const ScopedFlushDenormals flush;  // as RunShared does
      kernels_.decode(from, dtype, static_cast<const std::byte*>(in), kNumbers,
                      reinterpret_cast<float*>(floats.data()));
    };
    decode(dtype, halves.data());
    std::vector<uint32_t> between(kNumbers);
    for (int i = 0; i < kNumbers; ++i) {
      const double x = Decode(dtype, i);
      ExpectSame(DType::kFloat32, Encode(DType::kFloat32, x), floats[i]);
      // NaN, infinity, and numbers at or next to the middle of two numbers.
      const double middle = (x + Decode(dtype, (i + 1) % kNumbers)) / 2;
      between[i] = Encode(DType::kFloat32, middle) + i % 3 - 1;
    }
    {
      const ScopedFlushDenormals flush;
      kernels_.encode(dtype, reinterpret_cast<const float*>(between.data()),
                      kNumbers, reinterpret_cast<std::byte*>(halves.data()));
    }
    decode(DType::kFloat32, between.data());
    for (int i = 0; i < kNumbers; ++i) {
      const uint32_t rounded =
          Encode(dtype, Decode(DType::kFloat32, between[i]));
      ExpectSame(dtype, rounded, halves[i]);
      ExpectSame(DType::kFloat32,
                 Encode(DType::kFloat32, Decode(dtype, rounded)), floats[i]);
    }
  }
}

TEST_P(GroupedMatmulTest, BitsDoNotDependOnThreads) {
  // The case is large enough to use several threads.
  Case c = {700, 64, {100, 48}, {300, 1, 260}, {{200, 99}, {0, 1}, {60, 77}}};
  c.tail = Tail::kZero;
  for (Missing missing : kMissing) {
    Arrays one(c, 3);
    ASSERT_TRUE(Compute(kernels_, c, missing, &one).ok());
    for (int64_t num_threads : {0, 3}) {
      Arrays several(c, 3);
      Threads threads(num_threads);
      ASSERT_TRUE(Compute(kernels_, c, missing, &several, &threads).ok());
      for (size_t i = 0; i < one.Of(missing).size(); ++i) {
        const Array& x = *one.Of(missing)[i];
        EXPECT_TRUE(x.Bits(0, x.size()) ==
                    several.Of(missing)[i]->Bits(0, x.size()));
      }
    }
  }
}

TEST_P(GroupedMatmulTest, RejectsInvalidSizesBeforeItWrites) {
  const auto message = [&](const Case& c) {
    Arrays arrays({10, 3, {2}, {3, 3}}, 1), same({10, 3, {2}, {3, 3}}, 1);
    const Status status = Compute(kernels_, c, Missing::kOuts, &arrays);
    EXPECT_EQ(Code::kInvalidArgument, status.code());
    EXPECT_EQ(same.outs[0].Bits(0, 20), arrays.outs[0].Bits(0, 20));
    return status.message();
  };
  EXPECT_EQ(
      "grouped_matmul: group_sizes[1] is -1; pass numbers of rows, which are "
      "not negative.",
      message({10, 3, {2}, {3, -1}}));
  EXPECT_EQ(
      "grouped_matmul: the sum of group_sizes is 11, but there are 10 rows; "
      "pass sizes of slabs that lie in the rows.",
      message({10, 3, {2}, {3, 8}}));
  EXPECT_EQ(
      "grouped_matmul: segments[1, 1] is 4, but slab 1 has 5 rows; pass "
      "segments that lie in their slab.",
      message({10, 3, {2}, {3, 5}, {{1, 1}, {2, 4}}}));
  EXPECT_EQ(
      "grouped_matmul: segments[0, 0] is -1, but slab 0 has 3 rows; pass "
      "segments that lie in their slab.",
      message({10, 3, {2}, {3, 5}, {{-1, 1}, {2, 3}}}));
}

// A pool of busy threads, which keeps all tasks and runs none.
class BusyPool : public Executor {
 public:
  void Schedule(std::function<void()> task) override {
    tasks.push_back(std::move(task));
  }
  int64_t num_threads() const override { return 4; }

  std::vector<std::function<void()>> tasks;
};

TEST(SharedWorkTest, DoesNotWaitForTasksThatHaveNotStarted) {
  BusyPool pool;
  std::vector<int> runs(10);
  {
    int num_workers = 0;
    EXPECT_TRUE(RunShared(10, 4, &pool, [&] {
                  ++num_workers;
                  return [&](int64_t item) { ++runs[item]; };
                }).ok());
    EXPECT_EQ(1, num_workers);
  }
  EXPECT_EQ(std::vector<int>(10, 1), runs);
  EXPECT_EQ(3u, pool.tasks.size());
  // After RunShared, these tasks find no item and use no data of the call.
  for (const auto& task : pool.tasks) task();
  EXPECT_EQ(std::vector<int>(10, 1), runs);
}

TEST(SharedWorkTest, WaitsForItemsOfOtherThreads) {
  Threads threads(4);
  std::atomic<int> num_workers{0}, num_ended{0};
  // No item finishes before each of four threads has begun an item.
  EXPECT_TRUE(RunShared(4, 4, &threads, [&] {
                ++num_workers;
                return [&](int64_t) {
                  while (num_workers < 4) std::this_thread::yield();
                  ++num_ended;
                };
              }).ok());
  EXPECT_EQ(4, num_ended);
}

TEST(SharedWorkTest, ReportsLackOfMemory) {
  BusyPool pool;
  int num_runs = 0;
  const Status status = RunShared(3, 4, &pool, [&] {
    return [&](int64_t item) {
      ++num_runs;
      if (item == 1) throw std::bad_alloc();
    };
  });
  EXPECT_EQ(Code::kResourceExhausted, status.code());
  EXPECT_EQ(2, num_runs);
  for (const auto& task : pool.tasks) task();
  EXPECT_EQ(2, num_runs);
}

}  // namespace
}  // namespace ep
