// The C functions of every backend, called from ep/_src through ctypes.

#include <cstdint>
#include <memory>

#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/export.h"
#include "ep_ffi/core/registry.h"

EP_EXPORT int32_t ep_group_is_live(const char* name) {
  return ep::Registry::Get().Has(name);
}

// Closes a group; executables that are bound to it now get errors. No effect
// if there is none of this name.
EP_EXPORT void ep_group_close(const char* name) {
  std::shared_ptr<ep::Group> group = ep::Registry::Get().Remove(name);
  if (group) group->Close();
}
