// SPDX-License-Identifier: Apache-2.0

// Tests what all handlers share.

#include "ep_ffi/handlers/op_call.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ep_ffi/backends/nccl/testing/group_fixture.h"

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

}  // namespace
}  // namespace ep
