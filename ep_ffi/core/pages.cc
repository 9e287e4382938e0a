// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/core/pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace ep {
namespace {

// In bytes. On arm64 with pages of 64 KiB, huge pages are larger, and the
// kernel ignores our advice for arrays without one.
constexpr int64_t kHugePage = 2 << 20;

// Below this many bytes, a system call takes longer than writing zeros.
constexpr int64_t kLeastToReturn = 256 << 10;

// The pages that lie entirely in an array.
struct Pages {
  Pages(std::byte* data, int64_t bytes, int64_t page) {
    const int64_t skipped = -reinterpret_cast<uintptr_t>(data) & (page - 1);
    if (bytes < skipped) return;
    this->data = data + skipped;
    this->bytes = (bytes - skipped) / page * page;
  }

  std::byte* data = nullptr;
  int64_t bytes = 0;
};

// Returns pages to the kernel, which will zero them. Returns false if MADV_FREE
// refuses: for pages of files and for shared pages.
bool ReturnToKernel(const Pages& pages) {
  return madvise(pages.data, pages.bytes, MADV_FREE) == 0 &&
         madvise(pages.data, pages.bytes, MADV_DONTNEED) == 0;
}

}  // namespace

void PreferHugePages(std::byte* data, int64_t bytes) {
  const Pages pages(data, bytes, kHugePage);
  // In a kernel without huge pages, the call fails and changes nothing.
  if (pages.bytes > 0) (void)madvise(pages.data, pages.bytes, MADV_HUGEPAGE);
}

void WriteZeros(std::byte* data, int64_t bytes) {
  const Pages pages(data, bytes, sysconf(_SC_PAGESIZE));
  if (pages.bytes < kLeastToReturn || !ReturnToKernel(pages)) {
    std::memset(data, 0, bytes);
    return;
  }
  const std::byte* end = pages.data + pages.bytes;
  std::memset(data, 0, pages.data - data);
  std::memset(pages.data + pages.bytes, 0, data + bytes - end);
}

int64_t ResidentBytes(std::byte* data, int64_t bytes) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  std::vector<unsigned char> pages((bytes + page - 1) / page);
  if (mincore(data, bytes, pages.data()) != 0) return 0;
  return page * std::count_if(pages.begin(), pages.end(),
                              [](unsigned char status) { return status & 1; });
}

}  // namespace ep
