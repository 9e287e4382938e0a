// SPDX-License-Identifier: Apache-2.0

#include "ep_ffi/handlers/interface.h"

#include "ep_ffi/core/export.h"

// ep/_src/native/ffi.py compares it before it calls anything else.
EP_EXPORT const char* ep_interface() { return EP_INTERFACE; }
