#include "ep_ffi/backends/host/wire.h"

#include <algorithm>
#include <cstring>

#include "ep_ffi/core/hash.h"
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
  // A failure that is none would complete ops that have not run.
  if (message->type == Message::kFail &&
      (message->code <= static_cast<int32_t>(Code::kOk) ||
       message->code > static_cast<int32_t>(Code::kInternal))) {
    return false;
  }
  text->assign(bytes + sizeof(*message), message->text_bytes);
  return true;
}

Hello MakeHello(const std::string& secret, int32_t process) {
  Hello hello = {};
  hello.process = process;
  std::memcpy(hello.secret, secret.data(),
              std::min(secret.size(), sizeof(hello.secret)));
  return hello;
}

socklen_t AddressOf(const std::string& secret, int32_t process,
                    sockaddr_un* address) {
  const std::string name = StrCat("ep_ffi-", Hash(secret), "-", process);
  *address = {};
  address->sun_family = AF_UNIX;
  std::memcpy(address->sun_path + 1, name.data(), name.size());
  return offsetof(sockaddr_un, sun_path) + 1 + name.size();
}

}  // namespace ep::host
