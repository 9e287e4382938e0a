// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/matmul/grouped_matmul.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>

#include "ep_ffi/core/pages.h"
#include "ep_ffi/matmul/shared_work.h"

namespace ep {
namespace {

// A block of the right operand, and a tile of the result, stay in a core's L2
// cache while all rows are multiplied by the block.
constexpr int64_t kBlockElements = 128 << 10;
constexpr int64_t kTileElements = 16 << 10;
// With at least this number of rows, it pays to copy the right operand into
// panels of consecutive memory.
constexpr int64_t kRowsPerCopy = 128;
// The depth of one call of `multiply`. The depth is low if the matrix is read
// in place, so that its rows are read in the order of their addresses.
constexpr int64_t kDepthOfCopy = 512, kDepthInPlace = 32;
// Prefetch distance, in elements, if a matrix is the left operand.
constexpr int64_t kAhead = 16 << 10;
// With fewer products per thread, waking the thread takes longer than the work.
constexpr int64_t kProductsPerHelper = 1 << 20;
constexpr int64_t kItemsPerThread = 4;
constexpr int64_t kTailRows = 1024;  // rows that one item writes

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

// A matrix in memory. Elements are consecutive along one axis.
struct View {
  std::byte* data;
  DType dtype;
  int64_t row, column;  // strides in elements

  View At(int64_t r, int64_t c) const {
    return {data + (r * row + c * column) * ByteWidth(dtype), dtype, row,
            column};
  }
  View Transposed() const { return {data, dtype, column, row}; }
};

// A product of a [rows, depth] and b [depth, columns].
struct Term {
  View a, b;
  int64_t depth;
};

// The result [rows, columns] of a slab: a sum of terms, as a chain or a tree.
struct SlabProduct {
  View out;
  int64_t rows, columns;
  bool is_tree;
  Fetch matrix;
  std::vector<Term> terms;
};

// One unit of work: columns of a slab's product, or rows past the last slab.
struct Item {
  int64_t slab, result, first, count;
};

// Memory aligned to cache lines.
class Scratch {
 public:
  float* Get(int64_t size) {
    constexpr int64_t kLine = 64 / sizeof(float);
    if (size_ < size + kLine) {
      size_ = size + kLine;
      data_.reset();
      data_.reset(new float[size_]);
    }
    const auto address = reinterpret_cast<uintptr_t>(data_.get());
    return data_.get() + -address / sizeof(float) % kLine;
  }

 private:
  std::unique_ptr<float[]> data_;
  int64_t size_ = 0;
};

class Worker {
 public:
  // The worker rounds matrices to the type `through`.
  Worker(const Kernels& kernels, DType through)
      : kernels_(kernels), through_(through) {}

  void Run(const SlabProduct& product, int64_t first, int64_t count);

 private:
  // Rows of consecutive elements; rows are `step` elements apart.
  struct Runs {
    const float* data;
    int64_t step;
  };
  void SetA(const View& a, Product* product);
  // Sets product->b to [depth, count] elements in place or, if `copy` is not
  // null, to panels in `copy`.
  void SetB(const View& b, int64_t depth, int64_t count, float* copy,
            Product* product);
  void Store(const Product& product, int64_t count, const View& out);

  // Returns the rows in float32: in place, or converted in `scratch`.
  Runs Decoded(const View& rows, int64_t num_rows, int64_t n, Scratch* scratch);
  bool IsInPlace(const View& x) const {
    return x.dtype == DType::kFloat32 && through_ == DType::kFloat32;
  }

  const Kernels& kernels_;
  const DType through_;
  Scratch a_, b_, tiles_, runs_;
};

void Worker::Run(const SlabProduct& product, int64_t first, int64_t count) {
  // If the left operand is the matrix, the right operand is transposed.
  bool is_copied =
      !IsInPlace(product.terms[0].b) || product.matrix == Fetch::kA ||
      (product.matrix == Fetch::kB && product.rows >= kRowsPerCopy);
  const int64_t surplus = count % kernels_.lanes;
  if (!is_copied && surplus > 0) {
    // Copies only the columns that do not fill a vector.
    if (surplus < count) {
      Run(product, first, count - surplus);
      return Run(product, first + count - surplus, surplus);
    }
    is_copied = true;
  }
  const int64_t columns = RoundUp(count, kernels_.lanes);
  int64_t depth = 0;
  for (const Term& term : product.terms) depth += term.depth;
  const bool is_fetched =
      product.matrix == Fetch::kA ? IsInPlace(product.terms[0].a) : !is_copied;
  const int64_t most_depth = is_copied ? kDepthOfCopy : kDepthInPlace;
  float* copy = is_copied ? b_.Get(depth * columns) : nullptr;
  std::vector<Product> parts;
  for (const Term& term : product.terms) {
    Product& p = parts.emplace_back();
    p.columns = p.out_row = columns;
    p.fetch = is_fetched ? product.matrix : Fetch::kResult;
    SetB(term.b.At(0, first), term.depth, count, copy, &p);
    if (is_copied) copy += term.depth * columns;
  }
  const int64_t tile_rows = std::min(
      RoundUp(product.rows, kernels_.tile_rows),
      std::max<int64_t>(1, kTileElements / columns / kernels_.tile_rows) *
          kernels_.tile_rows);
  const int64_t tile = tile_rows * columns;
  int64_t num_tiles = 1;  // a tree needs one tile per height
  for (size_t n = parts.size(); product.is_tree && n > 1; n /= 2) ++num_tiles;
  float* const tiles = tiles_.Get(num_tiles * tile);
  for (int64_t r = 0; r < product.rows; r += tile_rows) {
    const int64_t rows = std::min(tile_rows, product.rows - r);
    const View out = product.out.At(r, first);
    float* sum = tiles;
    for (size_t i = 0; i < parts.size(); ++i) {
      if (product.is_tree && i > 0) sum += tile;
      Product& p = parts[i];
      p.rows = rows;
      p.out = sum;
      p.result = out.data;
      p.result_column = ByteWidth(out.dtype);
      p.result_row = out.row * p.result_column;
      // Runs once even with depth 0, for a result of zero.
      const Term& term = product.terms[i];
      for (p.first = 0; p.first == 0 || p.first < term.depth;
           p.first += most_depth) {
        p.depth = std::min(most_depth, term.depth - p.first);
        p.adds = p.first > 0 || (i > 0 && !product.is_tree);
        SetA(term.a.At(r, p.first), &p);
        kernels_.multiply(p);
      }
      // Adds neighbouring tiles of equal height in the tree.
      for (size_t n = i + 1; product.is_tree && n % 2 == 0; n /= 2) {
        sum -= tile;
        kernels_.add(sum + tile, rows * columns, sum);
      }
    }
    for (; sum != tiles; sum -= tile) {
      kernels_.add(sum, rows * columns, sum - tile);
    }
    Product& p = parts.back();
    p.out = tiles;
    Store(p, count, out);
  }
}

Worker::Runs Worker::Decoded(const View& rows, int64_t num_rows, int64_t n,
                             Scratch* scratch) {
  if (IsInPlace(rows)) {
    return {reinterpret_cast<const float*>(rows.data), rows.row};
  }
  float* decoded = scratch->Get(num_rows * n);
  for (int64_t i = 0; i < num_rows; ++i) {
    kernels_.decode(rows.dtype, through_, rows.At(i, 0).data, n,
                    decoded + i * n);
  }
  return {decoded, n};
}

void Worker::SetA(const View& a, Product* product) {
  if (a.column == 1) {
    const Runs runs = Decoded(a, product->rows, product->depth, &a_);
    product->a = runs.data;
    product->a_row = runs.step;
    product->a_step = 1;
    if (product->fetch == Fetch::kA) {
      product->ahead = kAhead + product->first * (kernels_.tile_rows - 1);
    }
  } else {
    const Runs runs =
        Decoded(a.Transposed(), product->depth, product->rows, &a_);
    product->a = runs.data;
    product->a_row = 1;
    product->a_step = runs.step;
  }
}

void Worker::SetB(const View& b, int64_t depth, int64_t count, float* copy,
                  Product* product) {
  const int64_t width = kernels_.panel_width;
  const int64_t columns = product->columns;
  if (!copy) {
    product->b = reinterpret_cast<const float*>(b.data);
    product->b_step = b.row;
    product->b_panel = width;
    product->ahead = kDepthInPlace * b.row;
    return;
  }
  product->b = copy;
  product->b_step = 0;
  product->b_panel = width * depth;
  for (int64_t k = 0; b.column == 1 && k < depth; ++k) {
    const float* in = Decoded(b.At(k, 0), 1, count, &runs_).data;
    for (int64_t c = 0; c < columns; c += width) {
      const int64_t n = std::min(width, columns - c);
      const int64_t used = std::min(n, count - c);
      float* out = copy + c * depth + k * n;
      std::fill_n(std::copy_n(in + c, used, out), n - used, 0.0f);
    }
  }
  for (int64_t c = 0; b.column != 1 && c < columns; c += width) {
    const int64_t n = std::min(width, columns - c);
    const int64_t used = std::min(n, count - c);
    const Runs runs = Decoded(b.At(0, c).Transposed(), used, depth, &runs_);
    kernels_.transpose(runs.data, runs.step, used, depth, copy + c * depth, n);
  }
}

// Uses plain stores. Non-temporal stores are hardly faster, and slower for
// memory that the OS kernel has just zeroed in a cache (131 instead of 74 ms
// for 128 MB).
void Worker::Store(const Product& product, int64_t count, const View& out) {
  const float* data = product.out;
  int64_t step = product.out_row, num_runs = product.rows, n = count;
  if (out.column != 1) {
    step = RoundUp(product.rows, kernels_.lanes);
    float* transposed = runs_.Get(count * step);
    kernels_.transpose(data, product.out_row, product.rows, count, transposed,
                       step);
    data = transposed;
    std::swap(num_runs, n);
  }
  const View runs = out.column == 1 ? out : out.Transposed();
  for (int64_t i = 0; i < num_runs; ++i) {
    kernels_.encode(out.dtype, data + i * step, n, runs.At(i, 0).data);
  }
}

class Computation {
 public:
  Computation(const Kernels& kernels, const GroupedMatmulArgs& args)
      : kernels_(kernels), args_(args) {}

  Status Run(Executor* executor);

 private:
  Status FindSlabs();
  void MakeItems(int64_t num_threads);
  SlabProduct ProductOf(int64_t slab, int64_t result) const;
  void FillTail(const Item& item) const;

  View Rows() const { return {args_.rows, args_.row_type, args_.width, 1}; }
  View Outs(int64_t i) const {
    return {args_.pairs[i].outs, args_.row_type, args_.pairs[i].width, 1};
  }
  View Matrix(int64_t i, int64_t slab) const {
    const GroupedMatmulArgs::Pair& pair = args_.pairs[i];
    return View{pair.matrices, args_.matrix_type, pair.width, 1}.At(
        slab * args_.width, 0);
  }

  const Kernels& kernels_;
  const GroupedMatmulArgs& args_;
  std::vector<int64_t> starts_;  // first rows of slabs and tail
  std::vector<Item> items_;
};

Status Computation::Run(Executor* executor) {
  EP_RETURN_IF_ERROR(FindSlabs());
  int64_t num_products = 0;
  for (const GroupedMatmulArgs::Pair& pair : args_.pairs) {
    num_products += starts_.back() * args_.width * pair.width;
    if (args_.missing == Missing::kMatrices) {
      PreferHugePages(pair.matrices, args_.num_slabs * args_.width *
                                         pair.width *
                                         ByteWidth(args_.matrix_type));
    }
  }
  const int64_t num_threads =
      std::clamp<int64_t>(executor ? executor->num_threads() : 1, 1,
                          1 + num_products / kProductsPerHelper);
  MakeItems(num_threads);
  return RunShared(items_.size(), num_threads, executor, [this] {
    auto worker = std::make_shared<Worker>(kernels_, args_.row_type);
    return [this, worker](int64_t i) {
      const Item& item = items_[i];
      if (item.slab == args_.num_slabs) return FillTail(item);
      worker->Run(ProductOf(item.slab, item.result), item.first, item.count);
    };
  });
}

Status Computation::FindSlabs() {
  starts_.push_back(0);
  for (int64_t j = 0; j < args_.num_slabs; ++j) {
    const int64_t size = args_.sizes[j];
    if (size < 0) {
      return Status(Code::kInvalidArgument,
                    StrCat("grouped_matmul: group_sizes[", j, "] is ", size,
                           "; pass numbers of rows, which are not negative."));
    }
    const int32_t* segments = args_.segments + j * args_.num_segments;
    int64_t rows = 0;
    for (int64_t s = 0; s < args_.num_segments; ++s) {
      rows += segments[s];
      if (segments[s] < 0 || rows > size) {
        return Status(Code::kInvalidArgument,
                      StrCat("grouped_matmul: segments[", j, ", ", s, "] is ",
                             segments[s], ", but slab ", j, " has ", size,
                             " rows; pass segments that lie in their slab."));
      }
    }
    starts_.push_back(starts_.back() + size);
  }
  if (starts_.back() > args_.num_rows) {
    return Status(Code::kInvalidArgument,
                  StrCat("grouped_matmul: the sum of group_sizes is ",
                         starts_.back(), ", but there are ", args_.num_rows,
                         " rows; pass sizes of slabs that lie in the rows."));
  }
  return Status();
}

// Cuts the results into blocks of columns, so that a block of the right operand
// stays in a cache and all threads work.
void Computation::MakeItems(int64_t num_threads) {
  const bool is_sum = args_.missing == Missing::kRows;
  const int64_t num_results = is_sum ? 1 : args_.pairs.size();
  const int64_t num_blocks =
      num_threads == 1 ? 1
                       : CeilDiv(num_threads * kItemsPerThread,
                                 std::max<int64_t>(1, args_.num_slabs));
  for (int64_t result = 0; result < num_results; ++result) {
    for (int64_t slab = 0; slab < args_.num_slabs; ++slab) {
      const SlabProduct product = ProductOf(slab, result);
      if (product.rows == 0) continue;
      int64_t depth = 1;
      for (const Term& term : product.terms) depth += term.depth;
      const int64_t most = std::max(
          kernels_.panel_width, std::min({CeilDiv(product.columns, num_blocks),
                                          CeilDiv(kBlockElements, depth),
                                          kTileElements / kernels_.tile_rows}));
      const int64_t count =
          RoundUp(CeilDiv(product.columns,
                          std::max<int64_t>(1, CeilDiv(product.columns, most))),
                  kernels_.lanes);
      for (int64_t c = 0; c < product.columns; c += count) {
        items_.push_back(
            {slab, result, c, std::min(count, product.columns - c)});
      }
    }
    if (args_.missing == Missing::kMatrices ||
        args_.tail == Tail::kUnspecified) {
      continue;
    }
    for (int64_t r = starts_.back(); r < args_.num_rows; r += kTailRows) {
      items_.push_back({args_.num_slabs, result, r,
                        std::min(kTailRows, args_.num_rows - r)});
    }
  }
}

SlabProduct Computation::ProductOf(int64_t slab, int64_t result) const {
  const int64_t start = starts_[slab], size = args_.sizes[slab];
  SlabProduct product;
  product.rows = args_.width;
  product.columns = args_.pairs[result].width;
  product.is_tree = false;
  switch (args_.missing) {
    case Missing::kOuts:
      product.out = Outs(result).At(start, 0);
      product.matrix = Fetch::kB;
      product.rows = size;
      product.terms = {
          {Rows().At(start, 0), Matrix(result, slab), args_.width}};
      break;
    case Missing::kRows:
      // Computes the transposed product, which reads the matrices in place.
      product.out = Rows().At(start, 0).Transposed();
      product.matrix = Fetch::kA;
      product.columns = size;
      for (size_t i = 0; i < args_.pairs.size(); ++i) {
        product.terms.push_back({Matrix(i, slab),
                                 Outs(i).At(start, 0).Transposed(),
                                 args_.pairs[i].width});
      }
      break;
    case Missing::kMatrices: {
      product.out = Matrix(result, slab);
      product.matrix = Fetch::kResult;
      product.is_tree = true;
      const int32_t* depths = args_.segments + slab * args_.num_segments;
      int64_t row = start;
      for (int64_t s = 0; s < args_.num_segments; ++s) {
        product.terms.push_back({Rows().At(row, 0).Transposed(),
                                 Outs(result).At(row, 0), depths[s]});
        row += depths[s];
      }
      break;
    }
  }
  return product;
}

void Computation::FillTail(const Item& item) const {
  const View out =
      (args_.missing == Missing::kRows ? Rows() : Outs(item.result))
          .At(item.first, 0);
  if (args_.tail == Tail::kZero) {
    return WriteZeros(out.data, item.count * out.row * ByteWidth(out.dtype));
  }
  const std::vector<float> row(out.row,
                               std::numeric_limits<float>::quiet_NaN());
  for (int64_t r = 0; r < item.count; ++r) {
    kernels_.encode(out.dtype, row.data(), out.row, out.At(r, 0).data);
  }
}

}  // namespace

Status GroupedMatmul(const Kernels& kernels, const GroupedMatmulArgs& args,
                     Executor* executor) {
  return Computation(kernels, args).Run(executor);
}

}  // namespace ep
