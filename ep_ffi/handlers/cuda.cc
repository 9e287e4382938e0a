// SPDX-License-Identifier: Apache-2.0

// Code for XLA:GPU: decodes a call's context, and implements the handlers of
// borrowed communicators (borrowed_communicator.h):
//
//   ep_request  runs in the Prepare stage of all ops and of ep_connect. XLA
//               then keeps the communicators while the program runs.
//   ep_connect  () -> ready [1]. Gives a group the communicator of its domain,
//               before the first op of the group.

#include <string_view>

#include "ep_ffi/core/registry.h"
#include "ep_ffi/handlers/op_call.h"

namespace ep {

bool DecodePlatform(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx,
                    ffi::DiagnosticEngine& diagnostic, OpCall* call) {
  auto run_id = ffi::CtxDecoding<ffi::RunId>::Decode(api, ctx, diagnostic);
  auto stream = ffi::CtxDecoding<ffi::PlatformStream<void*>>::Decode(
      api, ctx, diagnostic);
  if (!run_id || !stream) return false;
  call->run_id = run_id->run_id;
  call->stream = *stream;
  const Status found =
      FindCommunicator({api, ctx}, call->state->domains, &call->communicator);
  if (!found.ok()) diagnostic.Emit(found.message());
  return found.ok();
}

namespace {

Status RequestForDomains(const XlaContext& xla,
                         const ffi::Dictionary& attributes) {
  const auto mesh = attributes.get<ffi::Span<const int64_t>>("lent_mesh");
  const auto axis = attributes.get<int64_t>("lent_axis");
  if (!mesh || !axis) return Mismatch("lent_mesh or lent_axis");
  Domains domains;
  EP_RETURN_IF_ERROR(DecodeDomains(*mesh, *axis, &domains));
  return RequestCommunicators(xla, domains);
}

// Reads the op's attributes about domains, and ignores its other attributes.
ffi::Error Request(XlaContext xla, ffi::Dictionary attributes) {
  return ToError(CatchIn([&] { return RequestForDomains(xla, attributes); }));
}

auto BindRequest() { return ffi::Ffi::BindPrepare().Ctx<XlaContext>().Attrs(); }

Status GiveCommunicator(const XlaContext& xla, int32_t device,
                        std::string_view name, ffi::Span<const int64_t> mesh,
                        int64_t axis) {
  Domains domains;
  EP_RETURN_IF_ERROR(DecodeDomains(mesh, axis, &domains));
  void* communicator = nullptr;
  EP_RETURN_IF_ERROR(FindCommunicator(xla, domains, &communicator));
  if (!communicator) {
    return Status(Code::kFailedPrecondition,
                  "this XLA lends no communicators to ep, as it does from "
                  "jaxlib 0.11.2 on; unset EP_NCCL_COMMUNICATOR");
  }
  const auto group = Registry::Get().Find(std::string(name));
  if (!group) {
    return Status(Code::kFailedPrecondition, "the group was closed");
  }
  return group->Connect(device, communicator);
}

ffi::Error Connect(XlaContext xla, int32_t device, std::string_view group,
                   ffi::Span<const int64_t> lent_mesh, int64_t lent_axis,
                   ffi::Result<ffi::AnyBuffer>) {
  return ToError(CatchIn([&] {
    return GiveCommunicator(xla, device, group, lent_mesh, lent_axis);
  }));
}

auto BindConnect() {
  return ffi::Ffi::Bind()
      .Ctx<XlaContext>()
      .Ctx<ffi::DeviceOrdinal>()
      .Attr<std::string_view>("group")
      .Attr<ffi::Span<const int64_t>>("lent_mesh")
      .Attr<int64_t>("lent_axis")
      .Ret<ffi::AnyBuffer>();
}

}  // namespace
}  // namespace ep

EP_DEFINE_HANDLER(ep_request, ep::Request, ep::BindRequest());
EP_DEFINE_HANDLER(ep_connect, ep::Connect, ep::BindConnect());
