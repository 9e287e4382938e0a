// SPDX-License-Identifier: Apache-2.0

// The values that the ranks of an exchange must agree on.

#ifndef EP_FFI_BACKENDS_HOST_TRANSPORT_SIGNATURE_H_
#define EP_FFI_BACKENDS_HOST_TRANSPORT_SIGNATURE_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace ep::host {

// The values that must be equal on all ranks for an exchange to make sense, and
// the sizes of the two arrays that each rank posts. They come from shapes and
// attributes, except the fingerprint of the routing. A signature is sent in
// messages as it is (wire.h).
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

  // Return where the second array starts in a segment, and where it ends.
  size_t second_offset() const;
  size_t staged_bytes() const;
  // Returns whether a segment of `bytes` can hold both arrays. Values that a
  // peer sent may be any numbers.
  bool FitsIn(size_t bytes) const;

  std::optional<Field> FirstDifference(const Signature& other) const;
  // Return the name of a field, and its value, as users know them.
  static const char* Name(Field field);
  std::string ValueOf(Field field) const;
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_TRANSPORT_SIGNATURE_H_
