// SPDX-License-Identifier: Apache-2.0

// Tests the shared parts of the handlers, and borrowed communicators with a
// fake of XLA's function table and extension.

#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <new>
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
XLA_FFI_Error* ep_request(XLA_FFI_CallFrame*);
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
  Collectives collectives = {
      {sizeof(Collectives), 129, 0, 1, nullptr}, this, Request, Get};
  Api api = {};
  std::vector<Places> requested;
  int communicator = 0;
  bool fails = false;
  bool throws = false;  // as if a function that the handler calls threw

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
    api.base.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) {
      return new XLA_FFI_Error{args->message};
    };
    api.find = [](FindExtensionArgs* args) -> XLA_FFI_Error* {
      EXPECT_EQ(sizeof(FindExtensionArgs), args->struct_size);
      const Xla* xla = reinterpret_cast<Xla*>(args->context);
      if (xla->throws) throw std::bad_alloc();
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
  for (const Status& status :
       {RequestCommunicators(xla.context(), Pairs()),
        FindCommunicator(xla.context(), Pairs(), &communicator)}) {
    testing::ExpectFailure({Code::kInternal, {": no clique"}}, status);
  }
  EXPECT_EQ(nullptr, communicator);
}

// All ops have these two attributes, whatever their buffers are.
TEST(RequestTest, RequestsTheCommunicatorsThatTheAttributesDescribe) {
  Xla xla;
  Places mesh = {2, 2};
  int64_t axis = 1;
  XLA_FFI_Scalar scalar = {XLA_FFI_DataType_S64, &axis};
  XLA_FFI_Array array = {XLA_FFI_DataType_S64, mesh.size(), mesh.data()};
  XLA_FFI_ByteSpan names[] = {{"lent_axis", 9}, {"lent_mesh", 9}};
  XLA_FFI_ByteSpan* name_of[] = {&names[0], &names[1]};
  XLA_FFI_AttrType types[] = {XLA_FFI_AttrType_SCALAR, XLA_FFI_AttrType_ARRAY};
  void* values[] = {&scalar, &array};
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = xla.context().api;
  frame.ctx = xla.context().context;
  frame.stage = XLA_FFI_ExecutionStage_PREPARE;
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, 2, types, name_of, values};
  EXPECT_EQ(nullptr, ep_request(&frame));
  EXPECT_EQ((std::vector<Places>{{0, 1}, {2, 3}}), xla.requested);
  // XLA would not catch an exception.
  xla.throws = true;
  const std::unique_ptr<XLA_FFI_Error> error(ep_request(&frame));
  ASSERT_NE(nullptr, error);
  testing::ExpectIn(error->message, {"bad_alloc"});
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
