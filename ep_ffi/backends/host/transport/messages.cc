// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/transport/messages.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>

#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/status.h"

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

// Returns the name of a value, or the number if the value has no name.
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

std::string Encode(Message message, const std::string& text) {
  const std::string fitting = Truncated(text, kMaxText);
  message.text_bytes = fitting.size();
  return std::string(reinterpret_cast<const char*>(&message), sizeof(message)) +
         fitting;
}

bool Decode(const char* bytes, size_t size, Message* message,
            std::string* text) {
  if (size < sizeof(*message)) return false;
  std::memcpy(message, bytes, sizeof(*message));
  if (message->text_bytes != size - sizeof(*message)) return false;
  if (message->type > Message::kBye) return false;
  // A kFail with code kOk would complete ops that have not run.
  if (message->type == Message::kFail &&
      (message->code <= static_cast<int32_t>(Code::kOk) ||
       message->code > static_cast<int32_t>(Code::kInternal))) {
    return false;
  }
  text->assign(bytes + sizeof(*message), message->text_bytes);
  return true;
}

std::string JoinNames(const std::string& layer, const std::string& program) {
  return StrCat(layer, '\0', program);
}

void SplitNames(const std::string& text, std::string* layer,
                std::string* program) {
  const size_t end = std::min(text.find('\0'), text.size());
  layer->assign(text, 0, end);
  program->assign(text, std::min(end + 1, text.size()), std::string::npos);
}

}  // namespace ep::host
