// SPDX-License-Identifier: Apache-2.0

// Messages between the processes of a group, which peers.h sends on sockets.
//
// A message comes from another process, so no value in it is trusted. `Decode`
// checks the form of a message, and engine/exchanges.cc checks the values
// against the group.

#ifndef EP_FFI_BACKENDS_HOST_TRANSPORT_MESSAGES_H_
#define EP_FFI_BACKENDS_HOST_TRANSPORT_MESSAGES_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "ep_ffi/backends/host/movers/job.h"

namespace ep::host {

// The name of a launch in one process; see engine/launches.h.
struct Launch {
  uint64_t site_id;  // see Site::id
  int64_t run_id;
  int64_t number;
};

// The fixed part of a message, which `text_bytes` bytes of text follow. Types:
//
//   kSegment  a new segment of the sender; carries its descriptor
//   kPost     a rank of the sender has posted its rows in a segment
//   kRelease  the sender has read a segment of the receiver
//   kFail     a run failed on the sender, and fails on the receiver
//   kBye      the sender closes its group, perhaps for a reason; the last
//             message
struct Message {
  enum Type : uint32_t { kSegment, kPost, kRelease, kFail, kBye };

  Type type;
  uint32_t text_bytes;
  int32_t code;          // kFail
  int32_t domain, rank;  // kPost
  Launch launch;         // kPost, kFail: as the sender names it
  int64_t position;      // kPost: index of the op in its program
  uint64_t segment;      // kSegment, kPost, kRelease: the owner's id
  Signature signature;   // kPost
};

inline constexpr size_t kMaxText = 4096;  // bytes of text in a message
inline constexpr size_t kMaxMessage = sizeof(Message) + kMaxText;

// Returns the bytes of a message. Truncates the text to kMaxText bytes.
std::string Encode(Message message, const std::string& text);

// Join and split the text of kPost: the names of the op's layer and program,
// separated by a zero byte.
std::string JoinNames(const std::string& layer, const std::string& program);
void SplitNames(const std::string& text, std::string* layer,
                std::string* program);

// Decodes a message. Returns false unless `Encode` can make these bytes, the
// type is known, and the code of a kFail is an error.
bool Decode(const char* bytes, size_t size, Message* message,
            std::string* text);

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_TRANSPORT_MESSAGES_H_
