// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/engine/posted_op.h"

#include "ep_ffi/core/status.h"

namespace ep::host {
namespace {

std::string NameOf(const PostedOp& op, bool with_step) {
  std::string name = OpName(op.op, op.layer);
  if (with_step) name += StrCat(", step ", op.launch.number);
  return name;
}

}  // namespace

std::string PostedOp::Name() const { return NameOf(*this, is_checked); }

std::string PostedOp::FullName() const {
  return StrCat(NameOf(*this, /*with_step=*/true), " of \"", program, "\", op ",
                position);
}

}  // namespace ep::host
