// SPDX-License-Identifier: Apache-2.0

// C functions for every backend. ep/_src/native/ffi.py calls them.

#include <cstdint>
#include <memory>

#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/export.h"
#include "ep_ffi/core/registry.h"
#include "ep_ffi/core/status.h"

namespace {

// Calls `call` with the live group of this name. Fails if there is none.
template <typename Call>
int32_t OnGroup(const char* name, char* error, int64_t error_bytes, Call call) {
  return ep::Export(error, error_bytes, [&] {
    const std::shared_ptr<ep::Group> group = ep::Registry::Get().Find(name);
    if (group) return call(*group);
    return ep::Status(ep::Code::kFailedPrecondition,
                      ep::StrCat("there is no live group \"", name,
                                 "\"; call ep_bootstrap first"));
  });
}

}  // namespace

EP_EXPORT int32_t ep_interface_version() { return ep::kInterfaceVersion; }

// Computes the size of EpHandle.mem in bytes (Group::MemBytes).
EP_EXPORT int32_t ep_group_mem_bytes(const char* name, int64_t num_tokens,
                                     int64_t top_k, int64_t alignment,
                                     int64_t capacity, int64_t* out,
                                     char* error, int64_t error_bytes) {
  return OnGroup(name, error, error_bytes, [&](ep::Group& group) {
    ep::Layer layer = {};
    layer.top_k = top_k;
    layer.alignment = alignment;
    layer.capacity = capacity;
    return group.MemBytes(layer, num_tokens, out);
  });
}

// Waits for the device. Fails if the device found a fault that no op reported.
EP_EXPORT int32_t ep_group_check(const char* name, char* error,
                                 int64_t error_bytes) {
  return OnGroup(name, error, error_bytes,
                 [&](ep::Group& group) { return group.Check(); });
}

// Closes a group. Executables that are bound to the group then fail. No effect
// if no group has this name.
EP_EXPORT int32_t ep_group_close(const char* name, char* error,
                                 int64_t error_bytes) {
  return ep::Export(error, error_bytes, [&] {
    const std::shared_ptr<ep::Group> group = ep::Registry::Get().Remove(name);
    return group ? group->Close() : ep::Status();
  });
}

// Releases a group, which closes when the last executable that is bound to it
// is destroyed. No effect if no group has this name.
EP_EXPORT int32_t ep_group_release(const char* name, char* error,
                                   int64_t error_bytes) {
  return ep::Export(error, error_bytes, [&] {
    ep::Registry::Get().Release(name);
    return ep::Status();
  });
}

EP_EXPORT int32_t ep_group_close_released(char* error, int64_t error_bytes) {
  return ep::Export(error, error_bytes, [&] {
    ep::Registry::Get().CloseReleased();
    return ep::Status();
  });
}
