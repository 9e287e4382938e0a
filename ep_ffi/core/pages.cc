// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/core/pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace ep {
namespace {

// In bytes. On arm64 with pages of 64 KiB, huge pages are larger, and the
// kernel ignores our advice for arrays without one.
constexpr int64_t kHugePage = 2 << 20;

// The huge pages that lie entirely in an array.
struct HugePages {
  HugePages(std::byte* data, int64_t bytes) {
    const auto skipped = -reinterpret_cast<uintptr_t>(data) & (kHugePage - 1);
    this->data = data + skipped;
    const int64_t rest = bytes - static_cast<int64_t>(skipped);
    this->bytes = std::max<int64_t>(0, rest / kHugePage * kHugePage);
  }

  std::byte* data;
  int64_t bytes;
};

// Returns pages to the kernel, which will zero them. Returns false if MADV_FREE
// refuses: for pages of files and for shared pages.
bool ReturnToKernel(const HugePages& pages) {
  return madvise(pages.data, pages.bytes, MADV_FREE) == 0 &&
         madvise(pages.data, pages.bytes, MADV_DONTNEED) == 0;
}

// Reads a byte of each page, so that the kernel maps its page of zeros.
void MapZeros(const HugePages& pages) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  for (int64_t at = 0; at < pages.bytes; at += page) {
    (void)*static_cast<volatile std::byte*>(pages.data + at);
  }
}

}  // namespace

void PreferHugePages(std::byte* data, int64_t bytes) {
  const HugePages pages(data, bytes);
  // In a kernel without huge pages, the call fails and changes nothing.
  if (pages.bytes > 0) (void)madvise(pages.data, pages.bytes, MADV_HUGEPAGE);
}

void WriteZeros(std::byte* data, int64_t bytes) {
  const HugePages pages(data, bytes);
  if (pages.bytes == 0 || !ReturnToKernel(pages)) {
    std::memset(data, 0, bytes);
    return;
  }
  PreferHugePages(pages.data, pages.bytes);
  MapZeros(pages);
  std::byte* end = pages.data + pages.bytes;
  std::memset(data, 0, pages.data - data);
  std::memset(end, 0, data + bytes - end);
}

}  // namespace ep
