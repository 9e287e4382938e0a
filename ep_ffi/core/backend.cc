// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/core/backend.h"

#include <iterator>
#include <utility>

#include "ep_ffi/core/hash.h"
#include "ep_ffi/core/str_cat.h"

namespace ep {

const char* OpName(Op op) {
  constexpr const char* kNames[] = {"ep_prepare", "ep_dispatch", "ep_combine",
                                    "ep_dispatch_bwd", "ep_combine_bwd"};
  const auto i = static_cast<uint32_t>(op);  // a peer may send any number
  return i < std::size(kNames) ? kNames[i] : "ep_unknown";
}

std::string OpName(Op op, const std::string& layer) {
  return StrCat(OpName(op), "(layer \"", layer, "\")");
}

Site MakeSite(Layer layer, std::string program, int64_t position,
              int64_t clone) {
  const uint64_t id =
      Hash({static_cast<int64_t>(Hash(program)), position, clone});
  return {std::move(layer), std::move(program), position, clone, id};
}

int64_t ByteWidth(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

}  // namespace ep
