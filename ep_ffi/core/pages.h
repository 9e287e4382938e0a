// SPDX-License-Identifier: Apache-2.0

// Requests to the kernel that cost less than touching each page of an array.
//
// XLA gives most ops fresh memory, which the kernel fills with zeros a page at
// a time when it is first touched. That takes longer than our rows do.

#ifndef EP_FFI_CORE_PAGES_H_
#define EP_FFI_CORE_PAGES_H_

#include <cstddef>
#include <cstdint>

namespace ep {

// Asks for huge pages where an array of this size is about to be written: one
// fault in place of 512.
void PreferHugePages(std::byte* data, int64_t bytes);

// Writes zeros. Where whole pages are anonymous memory of this process, it
// returns them to the kernel instead: a page that is read is filled with zeros
// then, and one that is not read takes no memory.
void WriteZeros(std::byte* data, int64_t bytes);

// Returns how many bytes are resident of an array that begins with a page.
int64_t ResidentBytes(std::byte* data, int64_t bytes);

}  // namespace ep

#endif  // EP_FFI_CORE_PAGES_H_
