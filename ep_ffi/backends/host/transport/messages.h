// SPDX-License-Identifier: Apache-2.0

// Messages between the processes of a group, which peers.h sends on sockets.
//
// A message comes from another process, so no value in it is trusted. `Decode`
// checks the form of a message, and engine/exchange.cc checks the values
// against the group.

#ifndef EP_FFI_BACKENDS_HOST_TRANSPORT_MESSAGES_H_
#define EP_FFI_BACKENDS_HOST_TRANSPORT_MESSAGES_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace ep::host {

// The values that must be equal on all ranks of an exchange, with the sizes of
// the two arrays that each rank posts. All values except the hash of the
// routing come from shapes and attributes. Messages contain the struct's bytes.
struct Signature {
  enum Field {
    kOp,
    kExperts,
    kTokens,
    kTopK,
    kWidth,
    kDType,
    kCapacity,
    kAlignment,
    kDrop,
    kTail,
    kWire,
    kFingerprint,
    kWeighted,
    kRouting,
    kFirstBytes,
    kSecondBytes,
    kNumFields,
  };
  int64_t values[kNumFields] = {};

  int64_t operator[](Field field) const { return values[field]; }
  int64_t& operator[](Field field) { return values[field]; }

  // Return the offset of the second array in a segment, and the total bytes.
  size_t second_offset() const;
  size_t staged_bytes() const;
  // Returns whether both arrays fit into a segment of `bytes`. Also works for
  // invalid values from a peer.
  bool FitsIn(size_t bytes) const;

  std::optional<Field> FirstDifference(const Signature& other) const;
  // Return the name and the value of a field, for error messages.
  static const char* Name(Field field);
  std::string ValueOf(Field field) const;
};

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
