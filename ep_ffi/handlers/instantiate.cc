// SPDX-License-Identifier: Apache-2.0

// The instantiate handler of all ops. XLA calls the handler once per op of an
// executable. The handler finds the op's group and keeps the group alive.

#include <string_view>
#include <utility>

#include "ep_ffi/core/registry.h"
#include "ep_ffi/handlers/op_call.h"

XLA_FFI_REGISTER_ENUM_ATTR_DECODING(ep::Tail);
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ep::Layer,  //
    StructMember<int64_t>("top_k"), StructMember<int64_t>("alignment"),
    StructMember<int64_t>("capacity"), StructMember<bool>("drop"),
    StructMember<ep::Tail>("tail"), StructMember<int64_t>("fingerprint"),
    StructMember<bool>("checked"), StructMember<int64_t>("wire"));

namespace ep {
namespace {

ffi::ErrorOr<std::unique_ptr<OpState>> Instantiate(
    std::string_view group, std::string_view group_config,
    std::string_view program, int64_t position, Layer layer,
    std::string_view layer_name, ffi::Span<const int64_t> lent_mesh,
    int64_t lent_axis) {
  std::unique_ptr<OpState> state;
  const Status status = CatchIn([&] {
    Binding binding = Registry::Get().Bind(std::string(group),
                                           std::string(program), position);
    if (!binding.group) {
      return Status(
          Code::kFailedPrecondition,
          StrCat("layer \"", layer_name, "\" uses the group \"", group,
                 "\", which is not live in this process; call ep_bootstrap "
                 "before the program is compiled, and ep_finalize after it "
                 "has run for the last time"));
    }
    if (binding.config != group_config) {
      return Status(
          Code::kFailedPrecondition,
          StrCat("layer \"", layer_name, "\" was compiled for a group \"",
                 group, "\" of ", group_config,
                 ", but the live group of this name is of ", binding.config,
                 "; bootstrap the group as it was for that program, or compile "
                 "the program for this one"));
    }
    Domains domains;
    EP_RETURN_IF_ERROR(DecodeDomains(lent_mesh, lent_axis, &domains));
    layer.name = layer_name;
    state = std::make_unique<OpState>(
        OpState{std::move(binding.group),
                MakeSite(std::move(layer), std::string(program), position,
                         binding.clone),
                std::move(domains)});
    return Status();
  });
  if (!status.ok()) return ffi::Unexpected(ToError(status));
  TsanEdge::NewStates().Release();
  return state;
}

auto BindInstantiate() {
  return ffi::Ffi::Bind<ffi::ExecutionStage::kInstantiate>()
      .Attr<std::string_view>("group")
      .Attr<std::string_view>("group_config")
      .Attr<std::string_view>("program")
      .Attr<int64_t>("position")
      .Attr<Layer>("layer")
      .Attr<std::string_view>("layer_name")
      .Attr<ffi::Span<const int64_t>>("lent_mesh")
      .Attr<int64_t>("lent_axis");
}

}  // namespace
}  // namespace ep

EP_DEFINE_HANDLER(ep_instantiate, ep::Instantiate, ep::BindInstantiate());

ep::ffi::TypeId ep::OpState::id = {};
const ep::ffi::TypeInfo ep::OpState::info =
    ep::ffi::MakeTypeInfo<ep::OpState>();

EP_EXPORT void* ep_op_state_type_id() { return &ep::OpState::id; }
EP_EXPORT const void* ep_op_state_type_info() { return &ep::OpState::info; }
