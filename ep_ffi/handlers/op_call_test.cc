// SPDX-License-Identifier: Apache-2.0

// Tests what all handlers share.

#include "ep_ffi/handlers/op_call.h"

#include <gtest/gtest.h>

#include <utility>

#include "ep_ffi/backends/nccl/testing/group_fixture.h"
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

// A group fails before it is given the call: ep_prepare asks it for a size.
TEST(OpCallTest, AnOpAfterFinalizeIsNamed) {
  std::vector<std::shared_ptr<Group>> groups;
  for (const Status& status :
       nccl::Connect(nccl::SizesFor(nccl::kDims), /*timeout_s=*/10,
                     /*first_device=*/0, &groups)) {
    nccl::ExpectOk(status);
  }
  for (const auto& group : groups) (void)group->Close();
  Layer layer = {};
  layer.name = "moe_3";
  const OpState state = {groups[0], MakeSite(layer, "jit_step#0", 0, 0),
                         /*domains=*/{}};
  OpCall context = {};
  context.state = &state;
  std::optional<std::string> message;
  Submit(Op::kPrepare, context, [](Group& group, Call call) {
    int64_t bytes = 0;
    return group.MemBytes(call.site->layer, /*num_tokens=*/1, &bytes);
  }).OnReady([&](const std::optional<ffi::Error>& error) {
    message = error ? error->message() : "";
  });
  ASSERT_TRUE(message);
  EXPECT_EQ(0u, message->find("ep_prepare(layer \"moe_3\"): ")) << *message;
  EXPECT_NE(std::string::npos, message->find("was finalized")) << *message;
}

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
// another stream than XLA's collectives use.
TEST(TraitsTest, NothingIsRecordedIntoCommandBuffers) {
  for (XLA_FFI_Handler* handler :
       {ep_prepare, ep_dispatch, ep_dispatch_bwd, ep_combine, ep_combine_bwd}) {
    EXPECT_EQ(0u, TraitsOf(handler));
  }
}

}  // namespace
}  // namespace ep
