// SPDX-License-Identifier: Apache-2.0

// Tests shared memory: segments of rows, and shared texts.

#include "ep_ffi/backends/host/transport/segment.h"

#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "ep_ffi/backends/host/transport/shared_text.h"
#include "ep_ffi/core/str_cat.h"
#include "ep_ffi/testing/expect.h"

namespace ep::host {
namespace {

// A new segment, and its descriptor for peers.
class NewSegment : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(pool_.Acquire(1000, /*readers=*/{1, 2}, &segment_, &fd_).ok());
    ASSERT_GE(fd_.get(), 0);
  }

  Segment* Acquire(size_t bytes, Fd* new_fd) {
    Segment* segment = nullptr;
    EXPECT_TRUE(pool_.Acquire(bytes, /*readers=*/{1}, &segment, new_fd).ok());
    return segment;
  }

  SegmentPool pool_;
  Segment* segment_;
  Fd fd_;
};

TEST_F(NewSegment, APeerReadsTheOwnersBytes) {
  ASSERT_GE(segment_->memory.bytes(), 1000u);
  Mapping peer;
  ASSERT_TRUE(Mapping::OpenPeer(fd_, &peer).ok());
  EXPECT_EQ(segment_->memory.bytes(), peer.bytes());
  std::strcpy(reinterpret_cast<char*>(segment_->memory.data()), "rows");
  EXPECT_STREQ("rows", reinterpret_cast<char*>(peer.data()));
}

TEST_F(NewSegment, OnlyTheOwnerCanWrite) {
  EXPECT_EQ(MAP_FAILED, mmap(nullptr, 1000, PROT_READ | PROT_WRITE, MAP_SHARED,
                             fd_.get(), 0));
  EXPECT_EQ(-1, write(fd_.get(), "x", 1));
}

TEST_F(NewSegment, NobodyCanChangeItsSize) {
  EXPECT_EQ(-1, ftruncate(fd_.get(), 0));
  EXPECT_EQ(-1, ftruncate(fd_.get(), 1 << 30));
}

TEST_F(NewSegment, OnlyThisUserMayOpenIt) {
  struct stat info;
  ASSERT_EQ(0, fstat(fd_.get(), &info));
  EXPECT_EQ(0600u, info.st_mode & 0777);
}

TEST_F(NewSegment, IsReusedAfterAllReadersReleasedIt) {
  Fd new_fd;
  EXPECT_TRUE(pool_.Release(1, segment_->id));
  EXPECT_NE(segment_, Acquire(1000, &new_fd));
  EXPECT_TRUE(pool_.Release(2, segment_->id));
  EXPECT_EQ(segment_, Acquire(2000, &new_fd));
  EXPECT_EQ(-1, new_fd.get());
}

TEST_F(NewSegment, AReaderCannotReleaseItForAnother) {
  Fd new_fd;
  EXPECT_TRUE(pool_.Release(1, segment_->id));
  EXPECT_FALSE(pool_.Release(1, segment_->id));
  EXPECT_FALSE(pool_.Release(3, segment_->id));
  EXPECT_FALSE(pool_.Release(2, 12345));
  EXPECT_NE(segment_, Acquire(1000, &new_fd));
}

TEST_F(NewSegment, ALargeSegmentIsNotUsedForFewBytes) {
  Fd new_fd;
  const Segment* large = Acquire(64 << 20, &new_fd);
  ASSERT_TRUE(pool_.Release(1, large->id));
  EXPECT_NE(large, Acquire(100, &new_fd));
  EXPECT_EQ(large, Acquire(60 << 20, &new_fd));
}

TEST(SegmentTest, RejectsOtherDescriptorsOfPeers) {
  const Fd fd(memfd_create("unsealed", MFD_ALLOW_SEALING));
  ASSERT_EQ(0, ftruncate(fd.get(), 4096));
  Mapping mapping;
  EXPECT_FALSE(Mapping::OpenPeer(fd, &mapping).ok());
  ASSERT_EQ(0, fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK));
  EXPECT_TRUE(Mapping::OpenPeer(fd, &mapping).ok());

  int fds[2];
  ASSERT_EQ(0, pipe(fds));
  const Fd reader(fds[0]), writer(fds[1]);
  EXPECT_FALSE(Mapping::OpenPeer(reader, &mapping).ok());
  EXPECT_FALSE(Mapping::OpenPeer(Fd(), &mapping).ok());
}

TEST(SegmentTest, ReportsLackOfMemory) {
  SegmentPool pool;
  Segment* segment;
  Fd fd;
  testing::ExpectFailure({Code::kResourceExhausted, {"recv_capacity_per_rank"}},
                         pool.Acquire(size_t{1} << 50, {1}, &segment, &fd));
  EXPECT_EQ(-1, fd.get());
}

// Opens the memory of this process's only shared text, as another process does.
// Returns an empty Fd if there is none.
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

// Reads the text as shared_text.h describes.
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

TEST(SharedTextTest, AReaderNeverSeesPartsOfTwoTexts) {
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
