// The C functions of every backend, called from ep/_src through ctypes.

#include <cstdint>
#include <memory>

#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/export.h"
#include "ep_ffi/core/registry.h"

EP_EXPORT int32_t ep_group_is_live(const char* name) {
  return ep::Registry::Get().Find(name) != nullptr;
}

// Bytes of EpHandle.mem, or -1 if there is no group of this name.
EP_EXPORT int64_t ep_group_mem_bytes(const char* name, int64_t num_tokens,
                                     int64_t top_k, int64_t alignment,
                                     int64_t capacity) {
  const std::shared_ptr<ep::Group> group = ep::Registry::Get().Find(name);
  if (!group) return -1;
  ep::Layer layer = {};
  layer.top_k = top_k;
  layer.alignment = alignment;
  layer.capacity = capacity;
  return group->MemBytes(layer, num_tokens);
}

// Closes a group; executables that are bound to it now get errors. No effect
// if there is none of this name.
EP_EXPORT void ep_group_close(const char* name) {
  std::shared_ptr<ep::Group> group = ep::Registry::Get().Remove(name);
  if (group) group->Close();
}
