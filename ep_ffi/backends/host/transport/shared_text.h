// SPDX-License-Identifier: Apache-2.0

// A text that other processes of the same user can read, also while this
// process is stopped or Python is blocked. `python -m ep stuck` is the reader.
//
// The memory is a sealed, anonymous memfd of mode 0600. It ends with the
// process. A reader finds it among the descriptors of the process in /proc,
// which the kernel shows to the same user only. It has these bytes, in which
// numbers are of 64 bits:
//
//   "ep_text1"
//   the number n of texts that were written
//   the size in bytes of each of two buffers
//   the size of the text in buffer 0, and that in buffer 1
//   buffer 0, buffer 1
//
// Text n is whole in buffer n % 2 until n has changed, because the next text
// goes to the other buffer. So a process that is stopped while it writes still
// has a text to read.

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

  // Texts have at most `max_bytes`. If the system has no memory or descriptor
  // for them, nothing is written.
  explicit SharedText(size_t max_bytes);

  size_t max_bytes() const { return max_bytes_; }

  // Replaces the text. No effect if it is too long.
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
  Mapping memory_;  // empty if there is none
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_TRANSPORT_SHARED_TEXT_H_
