#include "ep_ffi/backends/host/segment.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ep_ffi/backends/host/pages.h"

#ifndef F_SEAL_FUTURE_WRITE  // Linux 5.1
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace ep::host {
namespace {

constexpr size_t kSmallest = 64 << 10;

}  // namespace

Mapping::~Mapping() {
  if (data_) munmap(data_, bytes_);
}

Status Mapping::OpenPeer(int fd, Mapping* out) {
  struct stat info;
  const int seals = fcntl(fd, F_GET_SEALS);
  if (fstat(fd, &info) != 0 || info.st_size <= 0 || seals < 0 ||
      (seals & F_SEAL_SHRINK) == 0) {
    return Status(Code::kInternal, "a peer shared memory that is not sealed");
  }
  void* data = mmap(nullptr, info.st_size, PROT_READ, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) {
    return Status(
        Code::kResourceExhausted,
        StrCat("cannot map ", info.st_size,
               " bytes of a peer's shared memory: ", strerror(errno)));
  }
  *out = Mapping(static_cast<std::byte*>(data), info.st_size);
  return Status();
}

Segment* SegmentPool::Acquire(size_t bytes, int32_t readers, int* new_fd) {
  *new_fd = -1;
  std::lock_guard<std::mutex> lock(mutex_);
  auto fit = free_.lower_bound(bytes);
  if (fit != free_.end() && fit->first <= 4 * (bytes + kSmallest)) {
    Segment* segment = fit->second;
    free_.erase(fit);
    segment->readers = readers;
    return segment;
  }

  size_t size = kSmallest;
  while (size < bytes) size *= 2;
  const int fd = memfd_create("ep_ffi", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return nullptr;
  void* data = MAP_FAILED;
  if (fchmod(fd, 0600) == 0 && ftruncate(fd, size) == 0) {
    data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  if (data == MAP_FAILED ||
      fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    if (data != MAP_FAILED) munmap(data, size);
    close(fd);
    return nullptr;
  }
  // Where the kernel is too old for this seal, peers of the same user could
  // map the segment to write; they never do.
  (void)fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE);

  const uint64_t id = segments_.size();
  auto segment = std::make_unique<Segment>();
  segment->id = id;
  segment->memory = Mapping(static_cast<std::byte*>(data), size);
  segment->readers = readers;
  *new_fd = fd;
  return segments_.emplace(id, std::move(segment)).first->second.get();
}

HostMemory SegmentPool::Memory() {
  std::lock_guard<std::mutex> lock(mutex_);
  HostMemory memory;
  for (const auto& entry : segments_) {
    const Mapping& mapping = entry.second->memory;
    memory.reserved += mapping.bytes();
    memory.resident += ResidentBytes(mapping.data(), mapping.bytes());
  }
  return memory;
}

bool SegmentPool::Release(uint64_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = segments_.find(id);
  if (found == segments_.end() || found->second->readers == 0) return false;
  Segment* segment = found->second.get();
  if (--segment->readers == 0) {
    free_.emplace(segment->memory.bytes(), segment);
  }
  return true;
}

}  // namespace ep::host
