// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/transport/signature.h"

#include <initializer_list>

#include "ep_ffi/core/backend.h"

namespace ep::host {
namespace {

constexpr size_t kAlign = 64;

constexpr const char* kNames[Signature::kNumFields] = {
    "the op",
    "num_experts",
    "tokens per rank",
    "top_k",
    "hidden size",
    "dtype",
    "capacity",
    "alignment",
    "overflow",
    "tail",
    "wire",
    "the configuration of the layer (a hash of it)",
    "weights",
    "the routing (a hash of it)",
    "bytes of rows",
    "bytes of weights"};

// Returns a name, or the number if it has none; a peer may send any number.
std::string OneOf(std::initializer_list<const char*> names, int64_t value) {
  return 0 <= value && value < static_cast<int64_t>(names.size())
             ? names.begin()[value]
             : std::to_string(value);
}

}  // namespace

size_t Signature::second_offset() const {
  return (values[kFirstBytes] + kAlign - 1) / kAlign * kAlign;
}

size_t Signature::staged_bytes() const {
  return second_offset() + values[kSecondBytes];
}

bool Signature::FitsIn(size_t bytes) const {
  for (const Field size : {kFirstBytes, kSecondBytes}) {
    if (values[size] < 0 || values[size] > static_cast<int64_t>(bytes)) {
      return false;
    }
  }
  return staged_bytes() <= bytes;
}

std::optional<Signature::Field> Signature::FirstDifference(
    const Signature& other) const {
  for (int f = 0; f < kNumFields; ++f) {
    if (values[f] != other.values[f]) return static_cast<Field>(f);
  }
  return std::nullopt;
}

const char* Signature::Name(Field field) { return kNames[field]; }

std::string Signature::ValueOf(Field field) const {
  const int64_t value = values[field];
  switch (field) {
    case kOp:
      return OpName(static_cast<Op>(value));
    case kDType:
      return OneOf({"float32", "bfloat16", "float16"}, value);
    case kDrop:
      return OneOf({"error", "drop"}, value);
    case kTail:
      return OneOf({"unspecified", "zero", "NaN"}, value);
    case kWire:
      return OneOf({"None", "fp8_block128", "mxfp8"}, value);
    case kWeighted:
      return OneOf({"none", "given"}, value);
    default:
      return std::to_string(value);
  }
}

}  // namespace ep::host
