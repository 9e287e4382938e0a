// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/engine/contribution.h"

#include <cstring>

#include "ep_ffi/core/backend.h"

namespace ep::host {
namespace {

bool HasChoices(const Signature& signature) {
  return signature[Signature::kOp] == static_cast<int64_t>(Op::kPrepare);
}

void Copy(std::byte* to, const void* from, int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

}  // namespace

void StageArrays(const Contribution& contribution, std::byte* segment) {
  const Signature& signature = contribution.signature;
  std::byte* second = segment + signature.second_offset();
  if (contribution.stage) return contribution.stage(segment, second);
  const auto& [rows, choices] = contribution.arrays;
  const bool has_choices = HasChoices(signature);
  const void* from_first = rows.rows;
  const void* from_second = rows.weights;
  if (has_choices) {
    from_first = choices.starts;
    from_second = choices.order;
  }
  Copy(segment, from_first, signature[Signature::kFirstBytes]);
  Copy(second, from_second, signature[Signature::kSecondBytes]);
}

Arrays StagedArrays(const Signature& signature, const std::byte* segment) {
  const std::byte* second = segment + signature.second_offset();
  Arrays arrays;
  if (HasChoices(signature)) {
    arrays.choices = {reinterpret_cast<const int32_t*>(segment),
                      reinterpret_cast<const int32_t*>(second)};
    return arrays;
  }
  arrays.rows.rows = segment;
  if (signature[Signature::kWeighted]) {
    arrays.rows.weights = reinterpret_cast<const float*>(second);
  }
  return arrays;
}

}  // namespace ep::host
