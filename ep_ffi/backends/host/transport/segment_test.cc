// SPDX-License-Identifier: Apache-2.0

// Tests shared memory.

#include "ep_ffi/backends/host/transport/segment.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

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

}  // namespace
}  // namespace ep::host
