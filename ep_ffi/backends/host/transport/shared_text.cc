// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/transport/shared_text.h"

#include <cstring>
#include <new>

namespace ep::host {

SharedText::SharedText(size_t max_bytes) : max_bytes_(max_bytes) {
  const size_t bytes = sizeof(Header) + 2 * max_bytes;
  if (!Mapping::Create(kName, bytes, &memory_, &fd_).ok()) return;
  auto* header = new (memory_.data()) Header();
  header->max_bytes = max_bytes;
  std::memcpy(header->magic, "ep_text1", sizeof(header->magic));
}

void SharedText::Write(const std::string& text) {
  if (!memory_.data() || text.size() > max_bytes_) return;
  auto* header = reinterpret_cast<Header*>(memory_.data());
  const uint64_t number = header->number.load(std::memory_order_relaxed) + 1;
  const size_t buffer = number % 2;
  // The buffer has the text before the last. A reader that sees a byte of the
  // new text must also see that the last call changed the number. Processors
  // such as Arm's would let the bytes overtake the number.
  std::atomic_thread_fence(std::memory_order_release);
  std::memcpy(memory_.data() + sizeof(Header) + buffer * max_bytes_,
              text.data(), text.size());
  header->bytes[buffer] = text.size();
  header->number.store(number, std::memory_order_release);
}

}  // namespace ep::host
