// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/transport/wire.h"

#include <algorithm>
#include <cstring>

#include "ep_ffi/core/status.h"

namespace ep::host {

std::string Encode(Message message, const std::string& text) {
  message.text_bytes = std::min(text.size(), kMaxText);
  std::string bytes(reinterpret_cast<const char*>(&message), sizeof(message));
  return bytes.append(text, 0, message.text_bytes);
}

bool Decode(const char* bytes, size_t size, Message* message,
            std::string* text) {
  if (size < sizeof(*message)) return false;
  std::memcpy(message, bytes, sizeof(*message));
  if (message->text_bytes != size - sizeof(*message)) return false;
  if (message->type > Message::kBye) return false;
  // A failure without an error would complete ops that have not run.
  if (message->type == Message::kFail &&
      (message->code <= static_cast<int32_t>(Code::kOk) ||
       message->code > static_cast<int32_t>(Code::kInternal))) {
    return false;
  }
  text->assign(bytes + sizeof(*message), message->text_bytes);
  return true;
}

std::string JoinNames(const std::string& layer, const std::string& program) {
  std::string text;
  text.reserve(layer.size() + 1 + program.size());
  return text.append(layer).append(1, '\0').append(program);
}

void SplitNames(const std::string& text, std::string* layer,
                std::string* program) {
  const size_t end = std::min(text.find('\0'), text.size());
  layer->assign(text, 0, end);
  program->assign(text, std::min(end + 1, text.size()), std::string::npos);
}

socklen_t AddressOf(const std::string& name, sockaddr_un* address) {
  *address = {};
  address->sun_family = AF_UNIX;
  // An abstract name begins with a 0.
  const size_t size = std::min(name.size(), sizeof(address->sun_path) - 1);
  std::memcpy(address->sun_path + 1, name.data(), size);
  return offsetof(sockaddr_un, sun_path) + 1 + size;
}

}  // namespace ep::host
