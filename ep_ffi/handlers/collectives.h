// SPDX-License-Identifier: Apache-2.0

// Structs of XLA's c_api.h and collectives_c_api.h in jaxlib 0.11.2, which our
// FFI headers lack. Newer versions append fields.

#ifndef EP_FFI_HANDLERS_COLLECTIVES_H_
#define EP_FFI_HANDLERS_COLLECTIVES_H_

#include <cstddef>
#include <cstdint>

#include "xla/ffi/api/c_api.h"

namespace ep {

struct Extension {
  size_t struct_size;
  int64_t type;
  int32_t major_version;
  int32_t minor_version;
  const Extension* next;
};

struct FindExtensionArgs {
  size_t struct_size;
  void* extension_start;
  XLA_FFI_ExecutionContext* context;
  int64_t type;
  const Extension* extension;  // output
};
using FindExtension = XLA_FFI_Error*(FindExtensionArgs*);

struct ReplicaGroup {
  const int64_t* ids;
  size_t size;
};

// The first fields of the arguments of all functions.
struct Clique {
  size_t struct_size;
  void* extension_start;
  int32_t group_mode;
  const ReplicaGroup* groups;
  size_t num_groups;
  int64_t communication_id;
};

struct CommunicatorRequest {
  Clique clique;
};

struct CommunicatorGet {
  Clique clique;
  void* communicator;  // output
};

struct Collectives;
template <typename Args>
using Function = XLA_FFI_Error*(const Collectives* self, Args*);

struct Collectives {
  Extension base;
  void* state;
  Function<CommunicatorRequest>* request_communicator;
  Function<CommunicatorGet>* get_communicator;
};

struct ErrorDetailsArgs {
  size_t struct_size;
  void* extension_start;
  XLA_FFI_Error* error;
  const char* message;      // output
  XLA_FFI_Error_Code code;  // output
};

}  // namespace ep

#endif  // EP_FFI_HANDLERS_COLLECTIVES_H_
