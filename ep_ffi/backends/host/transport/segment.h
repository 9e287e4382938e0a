// SPDX-License-Identifier: Apache-2.0

// Shared memory in which a process stages rows for its peers.
//
// A segment is an anonymous memfd: it has no name that could be left behind or
// guessed, only this user may open it (mode 0600), peers can map it only to
// read, and its size is sealed, so that no peer can make another fault (see the
// threat model in handshake.h). The kernel frees it with its last mapping,
// however a process ends.

#ifndef EP_FFI_BACKENDS_HOST_TRANSPORT_SEGMENT_H_
#define EP_FFI_BACKENDS_HOST_TRANSPORT_SEGMENT_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "ep_ffi/backends/host/transport/fd.h"
#include "ep_ffi/core/backend.h"
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

  // Makes anonymous memory of a size that nobody can change, of which only this
  // process has a writable mapping. `name` is for /proc.
  static Status Create(const char* name, size_t bytes, Mapping* out,
                       Fd* out_fd);

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
  std::vector<int32_t> readers;  // processes that have not released it yet
};

// The segments that this process owns. One staged op takes a whole segment:
// sizes are powers of two, and memory is only resident where it was touched,
// so reuse is simple and the peak follows the ops in flight.
//
// Thread-safe. The lock keeps each segment either free or with readers that
// have not released it; the rows in it are not guarded.
class SegmentPool {
 public:
  // Finds a free segment of at least `bytes`, which each of `readers` releases
  // once. If it was made for this, `*new_fd` is its descriptor, which the peers
  // need; else it is empty.
  Status Acquire(size_t bytes, const std::vector<int32_t>& readers,
                 Segment** out, Fd* new_fd);

  HostMemory Memory();

  // Notes that a process is done. Returns false unless it is a reader: no peer
  // can free what others still read.
  bool Release(int32_t process, uint64_t id);

 private:
  Mutex mutex_;
  // By id.
  std::map<uint64_t, std::unique_ptr<Segment>> segments_ EP_GUARDED_BY(mutex_);
  // By size.
  std::multimap<size_t, Segment*> free_ EP_GUARDED_BY(mutex_);
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_TRANSPORT_SEGMENT_H_
