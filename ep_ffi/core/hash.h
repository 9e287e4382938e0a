// SPDX-License-Identifier: Apache-2.0

// A variant of the FNV-1a hash, over 64-bit words instead of bytes.

#ifndef EP_FFI_CORE_HASH_H_
#define EP_FFI_CORE_HASH_H_

#include <cstdint>
#include <initializer_list>
#include <string>

namespace ep {

constexpr uint64_t kHashSeed = 0xcbf29ce484222325;

inline uint64_t Hash(uint64_t seed, int64_t word) {
  return (seed ^ static_cast<uint64_t>(word)) * 0x100000001b3;
}

inline uint64_t Hash(std::initializer_list<int64_t> words) {
  uint64_t hash = kHashSeed;
  for (int64_t word : words) hash = Hash(hash, word);
  return hash;
}

inline uint64_t Hash(const std::string& text) {
  uint64_t hash = kHashSeed;
  for (char c : text) hash = Hash(hash, static_cast<unsigned char>(c));
  return hash;
}

}  // namespace ep

#endif  // EP_FFI_CORE_HASH_H_
