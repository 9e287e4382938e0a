// SPDX-License-Identifier: Apache-2.0

// A text that other processes of this user can read, even while this process is
// stopped or Python is blocked. `python -m ep stuck` reads the text.
//
// The memory is a sealed, anonymous memfd of mode 0600, which the kernel frees
// when the process ends. A reader finds the memfd among the descriptors of the
// process in /proc, which the kernel shows to the same user only. The layout of
// the memory (all numbers have 64 bits):
//
//   "ep_text1"
//   the number n of written texts
//   the size of each of the two buffers, in bytes
//   the sizes of the texts in buffer 0 and buffer 1, in bytes
//   buffer 0, buffer 1
//
// Text n is in buffer n % 2. The text is valid until n changes, because the
// writer writes the next text to the other buffer. So a reader gets a text even
// if the process is stopped while it writes.

#ifndef EP_FFI_BACKENDS_HOST_TRANSPORT_SHARED_TEXT_H_
#define EP_FFI_BACKENDS_HOST_TRANSPORT_SHARED_TEXT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "ep_ffi/backends/host/transport/fd.h"
#include "ep_ffi/backends/host/transport/segment.h"

namespace ep::host {

// Not thread-safe.
class SharedText {
 public:
  static constexpr char kName[] = "ep_status";  // of the memfd

  // Texts have at most `max_bytes`. If this process can get no memory or no
  // descriptor, `Write` does nothing.
  explicit SharedText(size_t max_bytes);

  size_t max_bytes() const { return max_bytes_; }

  // Replaces the text. No effect if `text` is too long.
  void Write(const std::string& text);

 private:
  struct Header {
    char magic[8];
    std::atomic<uint64_t> number;
    uint64_t max_bytes;
    uint64_t bytes[2];
  };

  const size_t max_bytes_;
  Fd fd_;
  Mapping memory_;  // empty if there is no memory
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_TRANSPORT_SHARED_TEXT_H_
