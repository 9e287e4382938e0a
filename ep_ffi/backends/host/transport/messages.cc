// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/transport/messages.h"

#include <algorithm>
#include <cstring>

#include "ep_ffi/core/status.h"

namespace ep::host {

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
