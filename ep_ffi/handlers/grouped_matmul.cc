// SPDX-License-Identifier: Apache-2.0

// The handler of ep_grouped_matmul (ep/_src/matmul/grouped_matmul.py), a
// primitive without a group. The arguments are the rows X [C, F], and pairs of
// matrices W [L, F, G] and outs Y [C, G]: first all matrices, then all outs.
// The attribute `missing` names the argument that the handler computes; all
// others are operands:
//
//   (sizes s32[L], segments s32[L, S], operands...) -> missing...

#include "ep_ffi/matmul/grouped_matmul.h"

#include <exception>
#include <vector>

#include "ep_ffi/handlers/op_call.h"
#include "ep_ffi/handlers/thread_pool.h"

namespace ep {
namespace {

// Decodes `buffers`: the rows, then all matrices, then all outs.
Status DecodeGroupedMatmul(const std::vector<ffi::AnyBuffer>& buffers,
                           GroupedMatmulArgs* args) {
  const size_t num_pairs = buffers.size() / 2;
  if (num_pairs == 0 || buffers.size() != 2 * num_pairs + 1) {
    return Mismatch("number of operands");
  }
  Rows rows;
  EP_RETURN_IF_ERROR(DecodeRows("rows", buffers[0], &rows));
  const auto matrix_type = ToDType(buffers[1].element_type());
  if (!matrix_type) return Mismatch("matrices");
  args->num_rows = rows.count;
  args->width = rows.width;
  args->row_type = rows.dtype;
  args->matrix_type = *matrix_type;
  args->rows = rows.data;
  for (size_t i = 0; i < num_pairs; ++i) {
    const ffi::AnyBuffer& matrices = buffers[1 + i];
    Rows outs;
    EP_RETURN_IF_ERROR(DecodeRows("outs", buffers[1 + num_pairs + i], &outs));
    if (outs.count != rows.count || outs.dtype != rows.dtype) {
      return Mismatch("outs");
    }
    if (ToDType(matrices.element_type()) != matrix_type ||
        matrices.dimensions().size() != 3 ||
        Dim(matrices, 0) != args->num_slabs || Dim(matrices, 1) != rows.width ||
        Dim(matrices, 2) != outs.width) {
      return Mismatch("matrices");
    }
    args->pairs.push_back({static_cast<std::byte*>(matrices.untyped_data()),
                           outs.data, outs.width});
  }
  return Status();
}

Status GroupedMatmulOn(const ffi::AnyBuffer& sizes,
                       const ffi::AnyBuffer& segments,
                       ffi::RemainingArgs operands, ffi::RemainingRets results,
                       int64_t missing, int64_t tail, Executor* executor) {
  GroupedMatmulArgs args;
  if (missing < 0 || missing > 2 || tail < 0 || tail > 2) {
    return Mismatch("missing or tail");
  }
  args.missing = static_cast<Missing>(missing);
  args.tail = static_cast<Tail>(tail);
  args.num_slabs = Dim(sizes, 0);
  args.num_segments = Dim(segments, 1);
  EP_RETURN_IF_ERROR(DecodeArray("sizes", sizes, ffi::DataType::S32,
                                 args.num_slabs, &args.sizes));
  EP_RETURN_IF_ERROR(DecodeArray("segments", segments, ffi::DataType::S32,
                                 args.num_slabs * args.num_segments,
                                 &args.segments));
  // Insert the result buffers at the position of the missing argument.
  std::vector<ffi::AnyBuffer> buffers;
  const size_t num_pairs = (operands.size() + results.size()) / 2;
  const size_t place = args.missing == Missing::kRows       ? 0
                       : args.missing == Missing::kMatrices ? 1
                                                            : 1 + num_pairs;
  for (size_t i = 0; i < operands.size(); ++i) {
    buffers.push_back(*operands.get<ffi::AnyBuffer>(i));
  }
  if (place > buffers.size() ||
      results.size() != (place == 0 ? 1 : num_pairs)) {
    return Mismatch("number of results");
  }
  for (size_t i = 0; i < results.size(); ++i) {
    buffers.insert(buffers.begin() + place + i,
                   **results.get<ffi::AnyBuffer>(i));
  }
  EP_RETURN_IF_ERROR(DecodeGroupedMatmul(buffers, &args));
  return GroupedMatmul(*SupportedKernels()[0], args, executor);
}

ffi::Error RunGroupedMatmul(int32_t device, ffi::ThreadPool pool,
                            ffi::AnyBuffer sizes, ffi::AnyBuffer segments,
                            ffi::RemainingArgs operands,
                            ffi::RemainingRets results, int64_t missing,
                            int64_t tail) {
  TsanEdge& edge = TsanEdge::DeviceOps(device);
  edge.Acquire();
  ThreadPoolExecutor executor(pool);
  Status status;
  try {
    status = GroupedMatmulOn(sizes, segments, operands, results, missing, tail,
                             &executor);
  } catch (const std::exception& e) {
    status = Status(Code::kInternal, StrCat("grouped_matmul: ", e.what()));
  }
  edge.Release();
  return ToError(status);
}

auto BindGroupedMatmul() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::DeviceOrdinal>()
      .Ctx<ffi::ThreadPool>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .RemainingArgs()
      .RemainingRets()
      .Attr<int64_t>("missing")
      .Attr<int64_t>("tail");
}

}  // namespace
}  // namespace ep

EP_DEFINE_HANDLER(ep_grouped_matmul, ep::RunGroupedMatmul,
                  ep::BindGroupedMatmul());
