// SPDX-License-Identifier: Apache-2.0

// Tests the traits that the handlers report to XLA.

#include <gtest/gtest.h>

#include "ep_ffi/handlers/op_call.h"
#include "xla/ffi/api/c_api.h"

extern "C" {
XLA_FFI_Error* ep_prepare(XLA_FFI_CallFrame*);
XLA_FFI_Error* ep_dispatch(XLA_FFI_CallFrame*);
XLA_FFI_Error* ep_dispatch_bwd(XLA_FFI_CallFrame*);
XLA_FFI_Error* ep_combine(XLA_FFI_CallFrame*);
XLA_FFI_Error* ep_combine_bwd(XLA_FFI_CallFrame*);
}

namespace ep {
namespace {

// Asks a handler for its traits as XLA does.
XLA_FFI_Handler_Traits TraitsOf(XLA_FFI_Handler* handler) {
  XLA_FFI_Metadata metadata = {};
  metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
  metadata.traits = ~XLA_FFI_Handler_Traits{0};
  XLA_FFI_Metadata_Extension extension = {};
  extension.extension_base.struct_size = XLA_FFI_Metadata_Extension_STRUCT_SIZE;
  extension.extension_base.type = XLA_FFI_Extension_Metadata;
  extension.metadata = &metadata;
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.extension_start = &extension.extension_base;
  EXPECT_EQ(nullptr, handler(&frame));
  return metadata.traits;
}

// A command buffer would record ops that load kernels, and replay them on
// another stream than that of XLA's collectives.
TEST(TraitsTest, NothingIsRecordedIntoCommandBuffers) {
  for (XLA_FFI_Handler* handler :
       {ep_prepare, ep_dispatch, ep_dispatch_bwd, ep_combine, ep_combine_bwd}) {
    EXPECT_EQ(0u, TraitsOf(handler));
  }
}

}  // namespace
}  // namespace ep
