// SPDX-License-Identifier: Apache-2.0

// Tests the shared parts of the handlers, and borrowed communicators with a
// fake of XLA's function table and extension.

#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <utility>

#include "ep_ffi/backends/nccl/testing/group_fixture.h"
#include "ep_ffi/handlers/borrowed_communicator.h"
#include "ep_ffi/handlers/collectives.h"
#include "ep_ffi/handlers/op_call.h"
#include "xla/ffi/api/c_api.h"

struct XLA_FFI_Error {
  std::string message;
};

extern "C" {
XLA_FFI_Error* ep_prepare(XLA_FFI_CallFrame*);
XLA_FFI_Error* ep_dispatch(XLA_FFI_CallFrame*);
XLA_FFI_Error* ep_dispatch_bwd(XLA_FFI_CallFrame*);
XLA_FFI_Error* ep_combine(XLA_FFI_CallFrame*);
XLA_FFI_Error* ep_combine_bwd(XLA_FFI_CallFrame*);
XLA_FFI_Error* ep_request_scatter(XLA_FFI_CallFrame*);
XLA_FFI_Error* ep_request_gather(XLA_FFI_CallFrame*);
}

namespace ep {
namespace {

using Places = std::vector<int64_t>;

struct Api {
  XLA_FFI_Api base;
  FindExtension* find;
};
static_assert(offsetof(Api, find) == sizeof(XLA_FFI_Api));

// A fake of XLA. A call's context is a pointer to this object.
struct Xla {
  Extension other = {sizeof(Extension), 7, 0, 1, &collectives.base};
  Collectives collectives = {{sizeof(Collectives), 129, 0, 2, nullptr},
                             this,
                             Request,
                             Get,
                             RequestWindow,
                             GetWindow};
  Api api = {};
  std::vector<Places> requested;
  int communicator = 0;
  std::vector<Region> regions;  // of which windows were requested
  OpState* state = nullptr;
  bool fails = false;

  Xla() {
    api.base.struct_size = sizeof(api);
    api.base.XLA_FFI_Error_GetMessage = [](XLA_FFI_Error_GetMessage_Args* a) {
      auto* args = reinterpret_cast<ErrorDetailsArgs*>(a);
      EXPECT_EQ(sizeof(ErrorDetailsArgs), args->struct_size);
      args->message = args->error->message.c_str();
    };
    api.base.XLA_FFI_Error_Destroy = [](XLA_FFI_Error_Destroy_Args* args) {
      delete args->error;
    };
    api.base.XLA_FFI_State_Get =
        [](XLA_FFI_State_Get_Args* args) -> XLA_FFI_Error* {
      args->state = reinterpret_cast<Xla*>(args->ctx)->state;
      return nullptr;
    };
    api.find = [](FindExtensionArgs* args) -> XLA_FFI_Error* {
      EXPECT_EQ(sizeof(FindExtensionArgs), args->struct_size);
      const Xla* xla = reinterpret_cast<Xla*>(args->context);
      args->extension = &xla->other;
      while (args->extension && args->extension->type != args->type) {
        args->extension = args->extension->next;
      }
      return nullptr;
    };
  }

  // Returns the clique's groups.
  static std::vector<Places> Decode(const Clique& clique, size_t struct_size) {
    EXPECT_EQ(struct_size, clique.struct_size);
    EXPECT_EQ(3, clique.group_mode);
    // XLA uses the ids from 0 on for its own collectives.
    EXPECT_LT(1000, clique.communication_id);
    std::vector<Places> groups;
    for (size_t i = 0; i < clique.num_groups; ++i) {
      const ReplicaGroup& group = clique.groups[i];
      groups.push_back({group.ids, group.ids + group.size});
    }
    return groups;
  }
  static XLA_FFI_Error* Request(const Collectives* self,
                                CommunicatorRequest* args) {
    Of(self).requested = Decode(args->clique, 48);
    return Of(self).Fail();
  }
  static XLA_FFI_Error* Get(const Collectives* self, CommunicatorGet* args) {
    EXPECT_EQ(Of(self).requested, Decode(args->clique, 56));
    args->communicator = &Of(self).communicator;
    return Of(self).Fail();
  }
  static XLA_FFI_Error* RequestWindow(const Collectives* self,
                                      WindowRequest* args) {
    EXPECT_EQ(Of(self).requested, Decode(args->clique, 64));
    Of(self).regions = {args->regions, args->regions + args->num_regions};
    return Of(self).Fail();
  }
  static XLA_FFI_Error* GetWindow(const Collectives* self, WindowGet* args) {
    EXPECT_EQ(Of(self).requested, Decode(args->clique, 72));
    for (const Region& region : Of(self).regions) {
      if (region.buffer == args->buffer) args->window = self->state;
    }
    args->offset = 256;
    return Of(self).Fail();
  }
  static Xla& Of(const Collectives* self) {
    return *static_cast<Xla*>(self->state);
  }
  XLA_FFI_Error* Fail() const {
    return fails ? new XLA_FFI_Error{"no clique"} : nullptr;
  }

  XlaContext context() {
    return {&api.base, reinterpret_cast<XLA_FFI_ExecutionContext*>(this)};
  }
};

Status Decode(int64_t axis, const Places& mesh, Domains* out) {
  return DecodeDomains({mesh.data(), mesh.size()}, axis, out);
}

Domains Pairs() {
  Domains domains;
  EXPECT_TRUE(Decode(1, {2, 2}, &domains).ok());
  return domains;
}

TEST(BorrowedCommunicatorTest, DomainsLieAlongAnAxisOfTheMesh) {
  const std::vector<std::pair<int64_t, Places>> cases = {
      {0, {0, 6, 1, 7, 2, 8, 3, 9, 4, 10, 5, 11}},
      {1, {0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11}},
      {2, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}}};
  for (const auto& [axis, places] : cases) {
    Domains domains;
    ASSERT_TRUE(Decode(axis, {2, 3, 2}, &domains).ok());
    EXPECT_EQ(places, domains.places) << "axis " << axis;
  }
}

TEST(BorrowedCommunicatorTest, WithoutAxesThereAreNoDomains) {
  Domains domains;
  EXPECT_TRUE(Decode(0, {}, &domains).ok());
  EXPECT_EQ(0, domains.size);
}

TEST(BorrowedCommunicatorTest, RefusesInvalidMeshes) {
  const std::vector<std::pair<int64_t, Places>> cases = {
      {-1, {2}},
      {1, {2}},
      {0, {0}},
      {0, {2, -1}},
      {0, {int64_t{1} << 62, int64_t{1} << 62}}};
  for (const auto& [axis, shape] : cases) {
    Domains domains;
    EXPECT_FALSE(Decode(axis, shape, &domains).ok());
    EXPECT_EQ(Places(), domains.places);
  }
}

TEST(BorrowedCommunicatorTest, RequestsAndFindsCommunicators) {
  Xla xla;
  const Domains domains = Pairs();
  void* communicator = nullptr;
  ASSERT_TRUE(RequestCommunicators(xla.context(), domains).ok());
  ASSERT_TRUE(FindCommunicator(xla.context(), domains, &communicator).ok());
  EXPECT_EQ((std::vector<Places>{{0, 1}, {2, 3}}), xla.requested);
  EXPECT_EQ(&xla.communicator, communicator);
}

TEST(BorrowedCommunicatorTest, AcceptsNewerMinorVersions) {
  Xla xla;
  xla.collectives.base.minor_version = 7;
  xla.collectives.base.struct_size += 32;
  EXPECT_TRUE(RequestCommunicators(xla.context(), Pairs()).ok());
  EXPECT_EQ(2u, xla.requested.size());
}

TEST(BorrowedCommunicatorTest, RequestsAndFindsWindows) {
  Xla xla;
  const Domains domains = Pairs();
  const std::vector<float> rows(6);
  Window window;
  ASSERT_TRUE(CheckWindows(xla.context()).ok());
  ASSERT_TRUE(RequestCommunicators(xla.context(), domains).ok());
  ASSERT_TRUE(RequestWindow(xla.context(), domains, rows.data(), 24).ok());
  EXPECT_EQ(24u, xla.regions.at(0).num_bytes);
  ASSERT_TRUE(FindWindow(xla.context(), domains, rows.data(), &window).ok());
  EXPECT_EQ(&xla, window.handle);
  EXPECT_EQ(256u, window.offset);
}

// jaxlib 0.11.2 lends communicators only, and older versions lend nothing.
TEST(BorrowedCommunicatorTest, ExplainsThatThereAreNoWindows) {
  for (bool is_older : {false, true}) {
    Xla xla;
    xla.collectives.base.minor_version = 1;
    xla.collectives.base.struct_size = offsetof(Collectives, request_window);
    if (is_older) xla.other.next = nullptr;
    Window window;
    ASSERT_TRUE(RequestCommunicators(xla.context(), Pairs()).ok());
    for (const Status& status :
         {CheckWindows(xla.context()),
          RequestWindow(xla.context(), Pairs(), &xla, 8),
          FindWindow(xla.context(), Pairs(), &xla, &window)}) {
      testing::ExpectFailure(
          {Code::kFailedPrecondition,
           {"no windows", "jaxlib 0.12.0.1", "EP_NCCL_ZERO_COPY"}},
          status);
    }
    EXPECT_TRUE(xla.regions.empty());
  }
}

TEST(BorrowedCommunicatorTest, ExplainsAnUnknownVersion) {
  for (bool is_short : {false, true}) {
    Xla xla;
    xla.collectives.base.major_version = is_short ? 0 : 1;
    xla.collectives.base.minor_version = 1;
    if (is_short) xla.collectives.base.struct_size = sizeof(Extension);
    void* communicator = nullptr;
    for (const Status& status :
         {RequestCommunicators(xla.context(), Pairs()),
          FindCommunicator(xla.context(), Pairs(), &communicator)}) {
      testing::ExpectFailure({Code::kFailedPrecondition,
                              {is_short ? "version 0.1" : "version 1.1",
                               "knows 0.1", "EP_NCCL_COMMUNICATOR"}},
                             status);
    }
    EXPECT_TRUE(xla.requested.empty());
  }
}

// For example, XLA's function table is too short for the extension, XLA has no
// extension, or the group has its own communicator.
TEST(BorrowedCommunicatorTest, MayFindNothing) {
  for (int why : {0, 1, 2}) {
    Xla xla;
    if (why == 0) xla.api.base.struct_size = sizeof(XLA_FFI_Api);
    if (why == 1) xla.other.next = nullptr;
    const Domains domains = why == 2 ? Domains() : Pairs();
    void* communicator = &xla;
    EXPECT_TRUE(RequestCommunicators(xla.context(), domains).ok());
    EXPECT_TRUE(FindCommunicator(xla.context(), domains, &communicator).ok());
    EXPECT_EQ(nullptr, communicator);
    EXPECT_TRUE(xla.requested.empty());
  }
}

TEST(BorrowedCommunicatorTest, PassesOnErrorsOfXla) {
  Xla xla;
  xla.fails = true;
  void* communicator = nullptr;
  Window window;
  for (const Status& status :
       {RequestCommunicators(xla.context(), Pairs()),
        FindCommunicator(xla.context(), Pairs(), &communicator),
        RequestWindow(xla.context(), Pairs(), &xla, 8),
        FindWindow(xla.context(), Pairs(), &xla, &window)}) {
    testing::ExpectFailure({Code::kInternal, {": no clique"}}, status);
  }
  EXPECT_EQ(nullptr, communicator);
}

// Calls a handler of the Prepare stage with buffers of 2 x 3 floats.
XLA_FFI_Error* CallPrepare(XLA_FFI_Handler* handler, Xla& xla,
                           std::vector<void*> args, std::vector<void*> rets) {
  int64_t dims[] = {2, 3};
  std::vector<XLA_FFI_Buffer> buffers;
  buffers.reserve(args.size() + rets.size());
  for (std::vector<void*>* data : {&args, &rets}) {
    for (void*& each : *data) {
      buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr,
                         XLA_FFI_DataType_F32, each, 2, dims});
      each = &buffers.back();
    }
  }
  std::vector<XLA_FFI_ArgType> arg_types(args.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> ret_types(rets.size(), XLA_FFI_RetType_BUFFER);
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = xla.context().api;
  frame.ctx = xla.context().context;
  frame.stage = XLA_FFI_ExecutionStage_PREPARE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr,
                static_cast<int64_t>(args.size()), arg_types.data(),
                args.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr,
                static_cast<int64_t>(rets.size()), ret_types.data(),
                rets.data()};
  return handler(&frame);
}

TEST(RequestTest, WithZeroCopyMovesRequestAWindowOfTheirSlots) {
  for (bool zero_copy : {false, true}) {
    nccl::Sizes sizes = nccl::SizesFor(testing::kDims);
    sizes.zero_copy = zero_copy;
    std::vector<std::shared_ptr<nccl::NcclGroup>> groups;
    nccl::Connect(sizes, /*timeout_s=*/10, /*first_device=*/0, &groups);
    OpState state = {groups[0], MakeSite({}, "jit_step#0", 0, 0), Pairs()};
    Xla xla;
    xla.state = &state;
    float slots, other;
    const auto requested = [&] {
      std::vector<const void*> buffers;
      for (const Region& region : std::exchange(xla.regions, {})) {
        EXPECT_EQ(24u, region.num_bytes);
        buffers.push_back(region.buffer);
      }
      EXPECT_EQ(2u, std::exchange(xla.requested, {}).size());
      return buffers;
    };
    const std::vector<const void*> expected(zero_copy ? 1 : 0, &slots);
    EXPECT_EQ(nullptr, CallPrepare(ep_request_scatter, xla, {&other, &other},
                                   {&slots, &other}));
    EXPECT_EQ(expected, requested());
    EXPECT_EQ(nullptr, CallPrepare(ep_request_gather, xla,
                                   {&other, &slots, &other}, {&other, &slots}));
    EXPECT_EQ(expected, requested());
    testing::ForEachRank(groups.size(),
                         [&](int64_t rank) { (void)groups[rank]->Close(); });
  }
}

// ep_prepare asks the closed group for a size, before the group gets the call.
TEST(OpCallTest, AnErrorAfterFinalizeNamesTheOp) {
  const auto groups = nccl::ConnectAll(/*timeout_s=*/10);
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
  testing::ExpectIn(*message, {"was finalized"});
}

// Queries the traits of a handler as XLA does.
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

// A command buffer would record ops that load kernels, and would replay them on
// a stream that is not the stream of XLA's collectives.
TEST(TraitsTest, NoHandlerMayBeRecordedIntoCommandBuffers) {
  for (XLA_FFI_Handler* handler :
       {ep_prepare, ep_dispatch, ep_dispatch_bwd, ep_combine, ep_combine_bwd}) {
    EXPECT_EQ(0u, TraitsOf(handler));
  }
}

}  // namespace
}  // namespace ep
