// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/core/pages.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

namespace ep {
namespace {

constexpr std::byte kOld{0x5c};
constexpr int64_t kBytes = 8 << 20;

const int64_t kPage = sysconf(_SC_PAGESIZE);

// Mapped memory that is full of old bytes.
class Memory {
 public:
  explicit Memory(int flags, int fd = -1)
      : data_(static_cast<std::byte*>(
            mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, flags, fd, 0))) {
    std::fill(data_, data_ + kBytes, kOld);
  }
  ~Memory() { munmap(data_, kBytes); }

  std::byte* data() { return data_; }

  // Expects that [begin, end) is zero, and the rest as it was.
  void ExpectZeros(int64_t begin, int64_t end) const {
    const auto count = [&](int64_t from, int64_t to, std::byte value) {
      return std::count(data_ + from, data_ + to, value);
    };
    EXPECT_EQ(begin, count(0, begin, kOld));
    EXPECT_EQ(end - begin, count(begin, end, std::byte{0}));
    EXPECT_EQ(kBytes - end, count(end, kBytes, kOld));
  }

 private:
  std::byte* data_;
};

TEST(PagesTest, ZerosCanHaveAnySizeAndPlace) {
  for (int64_t begin : {int64_t{0}, int64_t{1}, kPage - 1, kPage, kPage + 1}) {
    for (int64_t bytes : {int64_t{0}, int64_t{1}, kPage - 1, kPage, kPage + 1,
                          int64_t{1} << 20, (int64_t{4} << 20) + 3}) {
      Memory memory(MAP_PRIVATE | MAP_ANONYMOUS);
      WriteZeros(memory.data() + begin, bytes);
      memory.ExpectZeros(begin, begin + bytes);
    }
  }
}

TEST(PagesTest, ZerosTakeNoMemory) {
  Memory memory(MAP_PRIVATE | MAP_ANONYMOUS);
  WriteZeros(memory.data() + 1, kBytes - 2);
  EXPECT_EQ(2 * kPage, ResidentBytes(memory.data(), kBytes));
}

// If its pages were returned to the kernel, they would come back with the bytes
// of the other mapping.
TEST(PagesTest, ZerosReachMemoryThatIsShared) {
  const int fd = memfd_create("pages_test", MFD_CLOEXEC);
  ASSERT_EQ(0, ftruncate(fd, kBytes));
  for (int flags : {MAP_SHARED, MAP_PRIVATE}) {
    Memory other(MAP_SHARED, fd), memory(flags, fd);
    WriteZeros(memory.data() + 1, kBytes - 2);
    memory.ExpectZeros(1, kBytes - 1);
    if (flags == MAP_SHARED) other.ExpectZeros(1, kBytes - 1);
  }
  close(fd);
}

TEST(PagesTest, ZerosReachMemoryThatIsLocked) {
  Memory memory(MAP_PRIVATE | MAP_ANONYMOUS);
  ASSERT_EQ(0, mlock(memory.data() + kBytes / 2, kPage));
  WriteZeros(memory.data() + 1, kBytes - 2);
  memory.ExpectZeros(1, kBytes - 1);
}

TEST(PagesTest, HugePagesChangeNoBytes) {
  Memory memory(MAP_PRIVATE | MAP_ANONYMOUS);
  for (int64_t bytes : {int64_t{0}, kPage, kBytes}) {
    PreferHugePages(memory.data(), bytes);
    PreferHugePages(memory.data() + 3, std::max<int64_t>(0, bytes - 3));
  }
  memory.ExpectZeros(0, 0);
  std::fill(memory.data(), memory.data() + kBytes, kOld);
  WriteZeros(memory.data() + kPage, kBytes / 2);
  memory.ExpectZeros(kPage, kPage + kBytes / 2);
}

}  // namespace
}  // namespace ep
