// SPDX-License-Identifier: Apache-2.0

// The op of a post, as messages name it.
//
// Every post says which op it is of, for the case that something fails. So a
// post carries numbers and names, of which a message makes a text when it needs
// one.

#ifndef EP_FFI_BACKENDS_HOST_ENGINE_POSTED_OP_H_
#define EP_FFI_BACKENDS_HOST_ENGINE_POSTED_OP_H_

#include <cstdint>
#include <string>

#include "ep_ffi/backends/host/transport/wire.h"
#include "ep_ffi/core/backend.h"

namespace ep::host {

struct PostedOp {
  Op op = {};  // any number, if a peer sent it
  Launch launch = {};
  int64_t position = 0;     // of the op in its program
  bool is_checked = false;  // whether the layer is; false for a peer's post
  std::string layer;
  std::string program;

  // Returns the name of the op: ep_dispatch(layer "moe_3"). In checked mode it
  // includes the step, i.e. how often the program was launched before.
  std::string Name() const;
  // Returns its name, step and place: what is needed where ranks are compared.
  std::string FullName() const;
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_ENGINE_POSTED_OP_H_
