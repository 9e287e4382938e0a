// SPDX-License-Identifier: Apache-2.0

// Operations on whole memory pages.
//
// XLA gives most ops newly mapped memory. The kernel zeroes each page at its
// first access, which takes longer than copying an op's rows to the page.

#ifndef EP_FFI_CORE_PAGES_H_
#define EP_FFI_CORE_PAGES_H_

#include <cstddef>
#include <cstdint>

namespace ep {

// Asks the kernel to use huge pages for an array: 1 page fault instead of 512.
void PreferHugePages(std::byte* data, int64_t bytes);

// Fills an array with zeros. Huge pages of private anonymous memory become the
// kernel's page of zeros, which takes no memory until someone writes to it.
//
// The pages are mapped. XLA's loops read rows with masked vector instructions,
// and such an instruction takes 100 times as long on a page that is not mapped,
// even if its mask is zero. It does not map the page, so each read is slow.
void WriteZeros(std::byte* data, int64_t bytes);

}  // namespace ep

#endif  // EP_FFI_CORE_PAGES_H_
