// The symbols that ep/_src/ffi.py registers, the same on every platform.

#include "ep_ffi/core/export.h"
#include "ep_ffi/handlers/combine.h"
#include "ep_ffi/handlers/dispatch.h"
#include "ep_ffi/handlers/instantiate.h"
#include "ep_ffi/handlers/interface.h"
#include "ep_ffi/handlers/op_call.h"
#include "ep_ffi/handlers/prepare.h"

ep::ffi::TypeId ep::OpState::id = {};
const ep::ffi::TypeInfo ep::OpState::info =
    ep::ffi::MakeTypeInfo<ep::OpState>();

// On a GPU the movers only enqueue, so XLA may record them once into a command
// buffer and replay that without them. ep_prepare looks at what earlier ones
// found.
inline constexpr auto kMover = {ep::ffi::Traits::kCmdBufferCompatible};

// Declared first, with default visibility: the macro that defines them has no
// place for it.
#define EP_DEFINE_HANDLER(symbol, ...)                 \
  EP_EXPORT XLA_FFI_Error* symbol(XLA_FFI_CallFrame*); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, __VA_ARGS__)

EP_DEFINE_HANDLER(ep_instantiate, ep::Instantiate, ep::BindInstantiate());
EP_DEFINE_HANDLER(ep_prepare, ep::Prepare, ep::BindPrepare());
EP_DEFINE_HANDLER(ep_dispatch, ep::Dispatch, ep::BindDispatch(), kMover);
EP_DEFINE_HANDLER(ep_dispatch_bwd, ep::DispatchBwd, ep::BindDispatch(), kMover);
EP_DEFINE_HANDLER(ep_combine, ep::Combine, ep::BindCombine(), kMover);
EP_DEFINE_HANDLER(ep_combine_bwd, ep::CombineBwd, ep::BindCombineBwd(), kMover);

EP_EXPORT void* ep_op_state_type_id() { return &ep::OpState::id; }
EP_EXPORT const void* ep_op_state_type_info() { return &ep::OpState::info; }

// Compared before anything else is called.
EP_EXPORT const char* ep_interface() { return EP_INTERFACE; }
