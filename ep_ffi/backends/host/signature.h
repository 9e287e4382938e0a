// SPDX-License-Identifier: Apache-2.0

// What the ranks of an exchange must agree on.

#ifndef EP_FFI_BACKENDS_HOST_SIGNATURE_H_
#define EP_FFI_BACKENDS_HOST_SIGNATURE_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace ep::host {

// What must be equal on all ranks for an exchange to make sense, and the sizes
// of what they post. All values come from shapes and attributes, except the
// fingerprint of the routing.
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
    kConfig,
    kWeighted,
    kRouting,
    kFirstBytes,
    kSecondBytes,
    kNumFields,
  };
  int64_t values[kNumFields] = {};

  int64_t operator[](Field field) const { return values[field]; }
  int64_t& operator[](Field field) { return values[field]; }

  // Where the second array starts in a segment, and where it ends.
  size_t second_offset() const;
  size_t staged_bytes() const;
  // Returns whether a segment of `bytes` can hold both arrays. Values that a
  // peer sent may be any numbers.
  bool FitsIn(size_t bytes) const;

  std::optional<Field> FirstDifference(const Signature& other) const;
  static const char* Name(Field field);    // as users know it
  std::string ValueOf(Field field) const;  // the same
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_SIGNATURE_H_
