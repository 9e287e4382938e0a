// SPDX-License-Identifier: Apache-2.0

// The context of a call on XLA:CPU is the id of the run, and a pool of threads.
// The handlers here are those that only XLA:CPU needs.

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "ep_ffi/handlers/grouped_matmul.h"
#include "ep_ffi/handlers/handover.h"
#include "ep_ffi/handlers/op_call.h"
#include "ep_ffi/handlers/row_buffers.h"

EP_DEFINE_HANDLER(ep_unwritten, ep::Unwritten, ep::BindUnwritten());
EP_DEFINE_HANDLER(ep_retyped, ep::Retyped, ep::BindRetyped());

namespace ep {
namespace {

// XLA's own intra-op pool. It can be used until the handler returns.
class ThreadPoolExecutor : public Executor {
 public:
  explicit ThreadPoolExecutor(ffi::ThreadPool pool) : pool_(pool) {}

  void Schedule(std::function<void()> task) override {
    auto run = [task = std::move(task)] {
      Handover::OfTasks().FromXla();
      task();
    };
    Handover::OfTasks().ToXla();
    const ScopedIgnoreWrites copies_of_run;
    pool_.Schedule(std::move(run));
  }
  int64_t num_threads() const override { return pool_.num_threads(); }

 private:
  ffi::ThreadPool pool_;
};

ffi::Error RunGroupedMatmulOn(int32_t device, ffi::ThreadPool pool,
                              ffi::AnyBuffer sizes, ffi::AnyBuffer segments,
                              ffi::RemainingArgs operands,
                              ffi::RemainingRets results, int64_t missing,
                              int64_t tail) {
  Handover& handover = Handover::OfDevice(device);
  handover.FromXla();
  ThreadPoolExecutor executor(pool);
  Status status;
  try {
    status = RunGroupedMatmul(sizes, segments, operands, results, missing, tail,
                              &executor);
  } catch (const std::exception& e) {
    status = Status(Code::kInternal, StrCat("grouped_matmul: ", e.what()));
  }
  handover.ToXla();
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

bool DecodePlatform(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx,
                    ffi::DiagnosticEngine& diagnostic, OpCall* call) {
  auto run_id = ffi::CtxDecoding<ffi::RunId>::Decode(api, ctx, diagnostic);
  auto pool = ffi::CtxDecoding<ffi::ThreadPool>::Decode(api, ctx, diagnostic);
  if (!run_id || !pool) return false;
  call->run_id = run_id->run_id;
  call->executor = std::make_unique<ThreadPoolExecutor>(*pool);
  return true;
}

}  // namespace ep

EP_DEFINE_HANDLER(ep_grouped_matmul, ep::RunGroupedMatmulOn,
                  ep::BindGroupedMatmul());
