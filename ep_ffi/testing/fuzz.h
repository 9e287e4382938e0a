// SPDX-License-Identifier: Apache-2.0

// The functions that a fuzz target defines and fuzz_driver.cc calls.

#ifndef EP_FFI_TESTING_FUZZ_H_
#define EP_FFI_TESTING_FUZZ_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ep::testing {

struct Seed {
  std::string name;
  std::string bytes;
  bool is_good = true;  // whether the target accepts the input
};

// Returns the inputs that the driver mutates.
std::vector<Seed> FuzzSeeds();

template <typename T>
std::string BytesOf(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()),
          values.size() * sizeof(T)};
}

}  // namespace ep::testing

// Runs an input. Returns -1 if the target refuses the input, else 0.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

#endif  // EP_FFI_TESTING_FUZZ_H_
