// SPDX-License-Identifier: Apache-2.0

// Shared memory in which a process stages rows for its peers.
//
// A segment is an anonymous memfd, without a name that could be left behind or
// guessed. Only this user may open it (mode 0600), and peers can map it only
// for reading. Its size is sealed, so that no peer can cause a SIGBUS. The
// kernel frees a segment with its last mapping, however a process ends.

#ifndef EP_FFI_BACKENDS_HOST_TRANSPORT_SEGMENT_H_
#define EP_FFI_BACKENDS_HOST_TRANSPORT_SEGMENT_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "ep_ffi/backends/host/transport/fd.h"
#include "ep_ffi/core/mutex.h"
#include "ep_ffi/core/status.h"

namespace ep::host {

// A mapped range of a memfd.
class Mapping {
 public:
  Mapping() = default;
  Mapping(std::byte* data, size_t bytes) : data_(data), bytes_(bytes) {}
  Mapping(Mapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Mapping();

  // Creates anonymous memory of a sealed size that only this process can map
  // for writing.
  static Status Create(size_t bytes, Mapping* out, Fd* out_fd);

  // Maps a peer's segment for reading. Fails unless the peer sealed its size.
  static Status OpenPeer(const Fd& fd, Mapping* out);

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

struct Segment {
  uint64_t id;
  Mapping memory;
  std::vector<int32_t> readers;  // processes that still read it
};

// The segments of this process. One staged op uses a whole segment. Sizes are
// powers of two, so that segments are easy to reuse. Untouched pages use no
// memory, so the peak memory grows with the ops in flight.
//
// Thread-safe. The lock guards the sets of segments and their readers, but not
// the rows in the segments. Messages order the accesses to rows, on Arm as
// well, because the kernel locks a socket's queue: a process sends kPost after
// it has written the rows, and a reader sends kRelease after it has read them.
class SegmentPool {
 public:
  // Returns a free or a new segment of at least `bytes`. Each of `readers`
  // releases the segment once. Sets `*new_fd` to the descriptor of a new
  // segment, which the peers need, else to an empty Fd.
  Status Acquire(size_t bytes, const std::vector<int32_t>& readers,
                 Segment** out, Fd* new_fd);

  // Releases a segment for a reader. Returns false if the process is not a
  // reader of the segment, so that no peer can free a segment that others read.
  bool Release(int32_t process, uint64_t id);

 private:
  Mutex mutex_;
  // All segments by id.
  std::map<uint64_t, std::unique_ptr<Segment>> segments_ EP_GUARDED_BY(mutex_);
  // The free segments by size.
  std::multimap<size_t, Segment*> free_ EP_GUARDED_BY(mutex_);
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_TRANSPORT_SEGMENT_H_
