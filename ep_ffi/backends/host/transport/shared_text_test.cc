// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/transport/shared_text.h"

#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <thread>
#include <vector>

#include "ep_ffi/core/str_cat.h"

namespace ep::host {
namespace {

// Opens the memory of the only text of this process as another process would;
// empty if there is none.
Fd Find() {
  Fd found;
  DIR* folder = opendir("/proc/self/fd");
  while (const dirent* entry = readdir(folder)) {
    const std::string path = StrCat("/proc/self/fd/", entry->d_name);
    char target[64] = {};
    (void)!readlink(path.c_str(), target, sizeof(target) - 1);
    if (std::strstr(target, StrCat("/memfd:", SharedText::kName).c_str())) {
      found = Fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    }
  }
  closedir(folder);
  return found;
}

uint64_t Number(const Fd& fd, off_t at) {
  uint64_t number = 0;
  EXPECT_EQ(8, pread(fd.get(), &number, sizeof(number), at));
  return number;
}

// Reads as shared_text.h says.
std::string Read(const Fd& fd) {
  while (true) {
    const uint64_t number = Number(fd, 8), max_bytes = Number(fd, 16);
    const uint64_t buffer = number % 2;
    std::string text(Number(fd, 24 + 8 * buffer), ' ');
    if (text.size() > max_bytes) continue;
    EXPECT_EQ(
        static_cast<ssize_t>(text.size()),
        pread(fd.get(), text.data(), text.size(), 40 + buffer * max_bytes));
    std::atomic_thread_fence(std::memory_order_acquire);
    if (Number(fd, 8) == number) return text;
  }
}

TEST(SharedTextTest, AReaderGetsTheLastText) {
  SharedText text(10);
  const Fd fd = Find();
  ASSERT_GE(fd.get(), 0);
  EXPECT_EQ("", Read(fd));
  text.Write("one");
  EXPECT_EQ("one", Read(fd));
  text.Write("number two");
  EXPECT_EQ("number two", Read(fd));
  text.Write("number three");  // too long
  EXPECT_EQ("number two", Read(fd));
  char magic[8];
  EXPECT_EQ(8, pread(fd.get(), magic, 8, 0));
  EXPECT_EQ("ep_text1", std::string(magic, 8));
}

TEST(SharedTextTest, NobodyElseCanChangeIt) {
  const SharedText text(10);
  const Fd fd = Find();
  struct stat status;
  ASSERT_EQ(0, fstat(fd.get(), &status));
  EXPECT_EQ(0600u, status.st_mode & 0777);
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  EXPECT_EQ(F_SEAL_SHRINK | F_SEAL_GROW, seals & 6);
}

TEST(SharedTextTest, ItEndsWithItsOwner) {
  {
    const SharedText text(10);
  }
  EXPECT_LT(Find().get(), 0);
}

TEST(SharedTextTest, NoReaderSeesPartsOfTwoTexts) {
  SharedText text(1 << 12);
  const Fd fd = Find();
  std::atomic<bool> is_done{false};
  std::thread writer([&] {
    for (int i = 0; i < 20000; ++i) {
      text.Write(std::string(1 + i % (1 << 12), static_cast<char>(i)));
    }
    is_done = true;
  });
  while (!is_done) {
    const std::string read = Read(fd);
    const char c = static_cast<char>(read.size() - 1);
    EXPECT_EQ(std::string(read.size(), c), read);
  }
  writer.join();
}

}  // namespace
}  // namespace ep::host
