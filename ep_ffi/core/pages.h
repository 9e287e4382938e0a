// SPDX-License-Identifier: Apache-2.0

// Operations on whole pages.
//
// XLA gives most ops fresh memory. The kernel zeroes each page at its first
// access, which takes longer than copying our rows.

#ifndef EP_FFI_CORE_PAGES_H_
#define EP_FFI_CORE_PAGES_H_

#include <cstddef>
#include <cstdint>

namespace ep {

// Asks the kernel for huge pages for an array: one page fault instead of 512.
void PreferHugePages(std::byte* data, int64_t bytes);

// Writes zeros. It returns whole pages of private anonymous memory to the
// kernel, which zeroes such a page at its next access; unread pages take no
// memory.
void WriteZeros(std::byte* data, int64_t bytes);

// Returns the resident bytes of an array that begins at a page border.
int64_t ResidentBytes(std::byte* data, int64_t bytes);

}  // namespace ep

#endif  // EP_FFI_CORE_PAGES_H_
