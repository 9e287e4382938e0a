// SPDX-License-Identifier: Apache-2.0

// The symbols that ep/_src/native/ffi.py registers. They are the same on every
// platform.

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

// No handler has XLA's trait that allows to record it into a command buffer,
// not even the movers, which only enqueue on a GPU. XLA may record an op that
// has never run. But the first launch of an NCCL EP kernel loads it, which a
// stream refuses while it is captured. And in a command buffer ops leave the
// stream of XLA's collectives, so that a mover could run beside a collective.

EP_DEFINE_HANDLER(ep_instantiate, ep::Instantiate, ep::BindInstantiate());
EP_DEFINE_HANDLER(ep_prepare, ep::Prepare, ep::BindPrepare());
EP_DEFINE_HANDLER(ep_dispatch, ep::Dispatch, ep::BindDispatch());
EP_DEFINE_HANDLER(ep_dispatch_bwd, ep::DispatchBwd, ep::BindDispatch());
EP_DEFINE_HANDLER(ep_combine, ep::Combine, ep::BindCombine());
EP_DEFINE_HANDLER(ep_combine_bwd, ep::CombineBwd, ep::BindCombineBwd());

EP_EXPORT void* ep_op_state_type_id() { return &ep::OpState::id; }
EP_EXPORT const void* ep_op_state_type_info() { return &ep::OpState::info; }

// ep/_src/native/ffi.py compares it before it calls anything else.
EP_EXPORT const char* ep_interface() { return EP_INTERFACE; }
