// SPDX-License-Identifier: Apache-2.0

// Runs once per op of a compiled program: finds the op's group and keeps it
// alive as long as the executable.

#ifndef EP_FFI_HANDLERS_INSTANTIATE_H_
#define EP_FFI_HANDLERS_INSTANTIATE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "ep_ffi/core/hash.h"
#include "ep_ffi/core/registry.h"
#include "ep_ffi/handlers/handover.h"
#include "ep_ffi/handlers/op_call.h"

namespace ep {

inline ffi::ErrorOr<std::unique_ptr<OpState>> Instantiate(
    std::string_view group, std::string_view group_config,
    std::string_view program, std::string_view layer, int64_t position,
    int64_t top_k, int64_t alignment, int64_t capacity, bool drop, int64_t tail,
    int64_t config, bool checked) {
  Binding binding =
      Registry::Get().Bind(std::string(group), std::string(program), position);
  if (!binding.group) {
    return ffi::Unexpected(ToError(Status(
        Code::kFailedPrecondition,
        StrCat("layer \"", layer, "\" uses the group \"", group,
               "\", which is not live in this process; call ep_bootstrap "
               "before the program is compiled, and ep_finalize after it "
               "has run for the last time"))));
  }
  if (binding.config != group_config) {
    return ffi::Unexpected(ToError(Status(
        Code::kFailedPrecondition,
        StrCat("layer \"", layer, "\" was compiled for a group \"", group,
               "\" of ", group_config, ", but the live group of this name is ",
               "of ", binding.config,
               "; bootstrap the group as it was for that program, or compile "
               "the program for this one"))));
  }
  const auto name = static_cast<int64_t>(Hash(std::string(program)));
  auto state = std::make_unique<OpState>(OpState{
      std::move(binding.group),
      Site{Layer{std::string(layer), top_k, alignment, capacity, drop,
                 static_cast<Tail>(tail), config, checked},
           position, binding.clone, Hash({name, position, binding.clone}),
           std::string(program)}});
  Handover::OfNewStates().ToXla();
  return state;
}

inline auto BindInstantiate() {
  return ffi::Ffi::Bind<ffi::ExecutionStage::kInstantiate>()
      .Attr<std::string_view>("group")
      .Attr<std::string_view>("group_config")
      .Attr<std::string_view>("program")
      .Attr<std::string_view>("layer")
      .Attr<int64_t>("position")
      .Attr<int64_t>("top_k")
      .Attr<int64_t>("alignment")
      .Attr<int64_t>("capacity")
      .Attr<bool>("drop")
      .Attr<int64_t>("tail")
      .Attr<int64_t>("config")
      .Attr<bool>("checked");
}

}  // namespace ep

#endif  // EP_FFI_HANDLERS_INSTANTIATE_H_
