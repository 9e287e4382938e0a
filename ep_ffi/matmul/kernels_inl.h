// SPDX-License-Identifier: Apache-2.0

// The kernels of one instruction set. kernels.cc includes this file in a
// namespace with constants kName, kLanes, kVectors and kRows, and defines
// EP_TARGET as the attribute that selects the instruction set.

typedef float Vector
    __attribute__((vector_size(sizeof(float) * kLanes), may_alias));
typedef int IntVector __attribute__((vector_size(sizeof(int) * kLanes)));
typedef float UnalignedVector __attribute__((
    vector_size(sizeof(float) * kLanes), aligned(alignof(float)), may_alias));

// Computes kRows rows and n vectors of the result at `row` and `column`. The
// loops are unrolled, because GCC would otherwise keep the sums in memory.
template <int n, Fetch fetch>
EP_TARGET void MultiplyTile(const Product& p, int64_t row, int64_t column,
                            const float* b) {
  float* out = p.out + row * p.out_row + column;
  const int64_t b_step = p.b_step > 0 ? p.b_step : n * kLanes;
  const float* a[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    a[r] = p.a + std::min(row + r, p.rows - 1) * p.a_row;
  }
  b += p.first * b_step;
  // The rows of a matrix are consecutive, so a tile is one stretch of memory,
  // of which each step fetches kRows elements.
  constexpr int64_t kStepsOfLine = 64 / sizeof(float) / kRows;
  const float* ahead = p.ahead + (fetch == Fetch::kB ? b : p.a + row * p.a_row);
  if (fetch == Fetch::kResult) {
    const std::byte* result =
        p.result + row * p.result_row + column * p.result_column;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 3
      for (int v = 0; v < n; ++v) {
        __builtin_prefetch(
            result + r * p.result_row + v * kLanes * p.result_column, 1, 2);
      }
    }
  }
  Vector sums[kRows][n];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 3
    for (int v = 0; v < n; ++v) {
      sums[r][v] = p.adds ? *reinterpret_cast<const UnalignedVector*>(
                                out + r * p.out_row + v * kLanes)
                          : Vector{};
    }
  }
  const int64_t stop = p.depth * p.a_step;
  for (int64_t k = 0; k < stop; k += p.a_step) {
    Vector columns[n];
#pragma GCC unroll 3
    for (int v = 0; v < n; ++v) {
      columns[v] = *reinterpret_cast<const UnalignedVector*>(b + v * kLanes);
      if (fetch == Fetch::kB) __builtin_prefetch(ahead + v * kLanes, 0, 2);
    }
    if (fetch == Fetch::kA && k % kStepsOfLine == 0) {
      __builtin_prefetch(ahead, 0, 2);
    }
    ahead += fetch == Fetch::kB ? b_step : kRows;
    b += b_step;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 3
      for (int v = 0; v < n; ++v) sums[r][v] += a[r][k] * columns[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 3
    for (int v = 0; v < n; ++v) {
      *reinterpret_cast<UnalignedVector*>(out + r * p.out_row + v * kLanes) =
          sums[r][v];
    }
  }
}

template <Fetch fetch>
EP_TARGET void MultiplyTiles(const Product& p) {
  constexpr int64_t kWidth = kLanes * kVectors;
  const float* b = p.b;
  for (int64_t c = 0; c < p.columns; c += kWidth, b += p.b_panel) {
    const int64_t vectors = std::min((p.columns - c) / kLanes, kVectors);
    const auto multiply = vectors == 3   ? MultiplyTile<3, fetch>
                          : vectors == 2 ? MultiplyTile<2, fetch>
                                         : MultiplyTile<1, fetch>;
    for (int64_t r = 0; r < p.rows; r += kRows) multiply(p, r, c, b);
  }
}

EP_TARGET void Multiply(const Product& p) {
  switch (p.fetch) {
    case Fetch::kA:
      return MultiplyTiles<Fetch::kA>(p);
    case Fetch::kB:
      return MultiplyTiles<Fetch::kB>(p);
    case Fetch::kResult:
      return MultiplyTiles<Fetch::kResult>(p);
  }
}

template <typename T>
EP_TARGET void DecodeAs(const std::byte* in, int64_t n, float* out) {
  const T* values = reinterpret_cast<const T*>(in);
  for (int64_t i = 0; i < n; ++i) out[i] = ToFloat(values[i]);
}

template <typename T>
EP_TARGET void RoundThrough(float* values, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    T rounded;
    Round(values[i], &rounded);
    values[i] = ToFloat(rounded);
  }
}

EP_TARGET void Decode(DType dtype, DType through, const std::byte* in,
                      int64_t n, float* out) {
  switch (dtype) {
    case DType::kFloat32:
      DecodeAs<float>(in, n, out);
      break;
    case DType::kBFloat16:
      DecodeAs<BFloat16>(in, n, out);
      break;
    case DType::kFloat16:
      DecodeAs<Float16>(in, n, out);
      break;
  }
  if (through == dtype) return;
  if (through == DType::kBFloat16) RoundThrough<BFloat16>(out, n);
  if (through == DType::kFloat16) RoundThrough<Float16>(out, n);
}

template <typename T>
EP_TARGET void EncodeAs(const float* in, int64_t n, std::byte* out) {
  T* values = reinterpret_cast<T*>(out);
  for (int64_t i = 0; i < n; ++i) Round(in[i], values + i);
}

EP_TARGET void Encode(DType dtype, const float* in, int64_t n, std::byte* out) {
  switch (dtype) {
    case DType::kFloat32:
      return EncodeAs<float>(in, n, out);
    case DType::kBFloat16:
      return EncodeAs<BFloat16>(in, n, out);
    case DType::kFloat16:
      return EncodeAs<Float16>(in, n, out);
  }
}

// Swaps the lanes of x whose index has `bit` with the other lanes of y.
template <int bit, int... lane>
EP_TARGET EP_ALWAYS_INLINE void Exchange(Vector* x, Vector* y,
                                         std::integer_sequence<int, lane...>) {
  const Vector low =
      EP_SHUFFLE(*x, *y, (lane & bit ? kLanes + lane - bit : lane)...);
  *y = EP_SHUFFLE(*x, *y, (lane & bit ? kLanes + lane : lane + bit)...);
  *x = low;
}

template <int bit>
EP_TARGET EP_ALWAYS_INLINE void ExchangeRows(Vector* rows) {
  if constexpr (bit < kLanes) {
#pragma GCC unroll 16
    for (int r = 0; r < kLanes; ++r) {
      if (r & bit) continue;
      Exchange<bit>(rows + r, rows + r + bit,
                    std::make_integer_sequence<int, kLanes>());
    }
    ExchangeRows<2 * bit>(rows);
  }
}

EP_TARGET void Transpose(const float* in, int64_t in_row, int64_t rows,
                         int64_t columns, float* out, int64_t out_row) {
  for (int64_t r = 0; r < rows; r += kLanes) {
    int64_t c = 0;
    for (; c + kLanes <= columns; c += kLanes) {
      Vector block[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        block[i] = *reinterpret_cast<const UnalignedVector*>(
            in + std::min(r + i, rows - 1) * in_row + c);
      }
      ExchangeRows<1>(block);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        *reinterpret_cast<UnalignedVector*>(out + (c + i) * out_row + r) =
            block[i];
      }
    }
    for (; c < columns; ++c) {
      for (int i = 0; i < kLanes; ++i) {
        out[c * out_row + r + i] = in[std::min(r + i, rows - 1) * in_row + c];
      }
    }
  }
}

EP_TARGET void Add(const float* in, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] += in[i];
}

constexpr Kernels kKernels = {kName,     kLanes,   kLanes * kVectors,
                              kRows,     Multiply, Add,
                              Transpose, Decode,   Encode};
