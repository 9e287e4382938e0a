// The CPU platform: how XLA:CPU gives a call its context, and the symbols
// that ep/_src/ffi.py registers.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "ep_ffi/core/export.h"
#include "ep_ffi/handlers/combine.h"
#include "ep_ffi/handlers/dispatch.h"
#include "ep_ffi/handlers/instantiate.h"
#include "ep_ffi/handlers/op_call.h"
#include "ep_ffi/handlers/prepare.h"

namespace ep {
namespace {

// XLA's own intra-op pool; usable until the handler returns.
class ThreadPoolExecutor : public Executor {
 public:
  explicit ThreadPoolExecutor(ffi::ThreadPool pool) : pool_(pool) {}

  void Schedule(std::function<void()> task) override {
    pool_.Schedule(std::move(task));
  }
  int64_t num_threads() const override { return pool_.num_threads(); }

 private:
  ffi::ThreadPool pool_;
};

}  // namespace

ffi::TypeId OpState::id = {};

}  // namespace ep

template <>
struct xla::ffi::CtxDecoding<ep::OpCall> {
  using Type = ep::OpCall;

  static std::optional<Type> Decode(const XLA_FFI_Api* api,
                                    XLA_FFI_ExecutionContext* ctx,
                                    DiagnosticEngine& diagnostic) {
    auto state = CtxDecoding<State<ep::OpState>>::Decode(api, ctx, diagnostic);
    auto run_id = CtxDecoding<RunId>::Decode(api, ctx, diagnostic);
    auto device = CtxDecoding<DeviceOrdinal>::Decode(api, ctx, diagnostic);
    auto pool = CtxDecoding<ThreadPool>::Decode(api, ctx, diagnostic);
    if (!state || !run_id || !device || !pool) return std::nullopt;
    return ep::OpCall{*state, run_id->run_id, *device,
                      std::make_unique<ep::ThreadPoolExecutor>(*pool)};
  }
};

// Declared first, with default visibility: the macro that defines them has no
// place for it.
#define EP_DEFINE_HANDLER(symbol, body, binding)       \
  EP_EXPORT XLA_FFI_Error* symbol(XLA_FFI_CallFrame*); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, body, binding)

EP_DEFINE_HANDLER(ep_instantiate, ep::Instantiate, ep::BindInstantiate());
EP_DEFINE_HANDLER(ep_prepare, ep::Prepare, ep::BindPrepare());
EP_DEFINE_HANDLER(ep_dispatch, ep::Dispatch, ep::BindDispatch());
EP_DEFINE_HANDLER(ep_dispatch_bwd, ep::DispatchBwd, ep::BindDispatch());
EP_DEFINE_HANDLER(ep_combine, ep::Combine, ep::BindCombine());
EP_DEFINE_HANDLER(ep_combine_bwd, ep::CombineBwd, ep::BindCombineBwd());

EP_EXPORT void* ep_op_state_type_id() { return &ep::OpState::id; }
EP_EXPORT const void* ep_op_state_type_info() { return &ep::OpState::info; }
