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
#include "ep_ffi/core/status.h"

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
  std::string Name() const { return NameOf(/*with_step=*/is_checked); }
  // Returns its name, step and place: what is needed where ranks are compared.
  std::string FullName() const {
    return StrCat(NameOf(/*with_step=*/true), " of \"", program, "\", op ",
                  position);
  }

 private:
  std::string NameOf(bool with_step) const {
    std::string name = OpName(op, layer);
    if (with_step) name += StrCat(", step ", launch.number);
    return name;
  }
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_ENGINE_POSTED_OP_H_
