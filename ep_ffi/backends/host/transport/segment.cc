// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/transport/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>

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

Status Mapping::Create(size_t bytes, Mapping* out, Fd* out_fd) {
  // The name appears in /proc.
  Fd fd(memfd_create("ep_ffi", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  void* data = MAP_FAILED;
  if (fd.get() >= 0 && fchmod(fd.get(), 0600) == 0 &&
      ftruncate(fd.get(), bytes) == 0) {
    data =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  }
  if (data == MAP_FAILED) {
    return SystemError(StrCat("cannot share ", bytes, " bytes of memory"));
  }
  Mapping mapping(static_cast<std::byte*>(data), bytes);
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    return SystemError("cannot seal shared memory");
  }
  // Kernels before Linux 5.1 lack this seal. There, peers of the same user
  // could map the memory for writing, but our code never does.
  (void)fcntl(fd.get(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE);
  *out = std::move(mapping);
  *out_fd = std::move(fd);
  return Status();
}

Status Mapping::OpenPeer(const Fd& fd, Mapping* out) {
  // Calls lseek, because fstat needs glibc 2.33; see older_runtimes.cc.
  const off_t bytes = lseek(fd.get(), 0, SEEK_END);
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (bytes <= 0 || seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return Status(Code::kInternal, "a peer shared memory that is not sealed");
  }
  void* data = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) {
    return SystemError(
        StrCat("cannot map ", bytes, " bytes of a peer's memory"));
  }
  *out = Mapping(static_cast<std::byte*>(data), bytes);
  return Status();
}

Status SegmentPool::Acquire(size_t bytes, const std::vector<int32_t>& readers,
                            Segment** out, Fd* new_fd) {
  *new_fd = Fd();
  MutexLock lock(mutex_);
  auto fit = free_.lower_bound(bytes);
  if (fit != free_.end() && fit->first <= 4 * (bytes + kSmallest)) {
    *out = fit->second;
    free_.erase(fit);
    (*out)->readers = readers;
    return Status();
  }

  size_t size = kSmallest;
  while (size < bytes) size *= 2;
  auto segment = std::make_unique<Segment>();
  EP_RETURN_IF_ERROR(Mapping::Create(size, &segment->memory, new_fd));
  segment->id = segments_.size();
  segment->readers = readers;
  *out = segment.get();
  segments_.emplace(segment->id, std::move(segment));
  return Status();
}

bool SegmentPool::Release(int32_t process, uint64_t id) {
  MutexLock lock(mutex_);
  auto found = segments_.find(id);
  if (found == segments_.end()) return false;
  Segment* segment = found->second.get();
  std::vector<int32_t>& readers = segment->readers;
  const auto reader = std::find(readers.begin(), readers.end(), process);
  if (reader == readers.end()) return false;
  readers.erase(reader);
  if (readers.empty()) free_.emplace(segment->memory.bytes(), segment);
  return true;
}

}  // namespace ep::host
