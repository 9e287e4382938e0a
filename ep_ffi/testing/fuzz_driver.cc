// SPDX-License-Identifier: Apache-2.0

// Runs a fuzz target without a fuzzer, on seeds and repeatable mutants of them.
//
//   foo_fuzz_test [--iterations=n] [--seed=n] [file...]
//
// The target has libFuzzer's interface, so a coverage-guided fuzzer can run it.
// The target or a sanitizer aborts the process at a fault. The log names the
// file with the input that caused the fault. With files, the test runs only
// these inputs.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "ep_ffi/testing/fuzz.h"

namespace ep::testing {
namespace {

// Flags of the command line.
int64_t iterations = 1000;
uint64_t first_seed = 1;
std::vector<std::string> files;

// Opens a file for the current input, which remains after a crash.
int OpenLastInput() {
  const char* folder = std::getenv("TEST_UNDECLARED_OUTPUTS_DIR");
  const std::string path = std::string(folder ? folder : ".") + "/input";
  std::cout << "the current input is in " << path << std::endl;
  return open(path.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
}

bool Accepts(const std::string& input) {
  static const int last = OpenLastInput();
  EXPECT_EQ(ssize_t(input.size()), pwrite(last, input.data(), input.size(), 0));
  EXPECT_EQ(0, ftruncate(last, input.size()));
  return LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()),
                                input.size()) == 0;
}

// Numbers at which bounds and signs change.
constexpr int64_t kNumbers[] = {
    0,    1,     -1,        2,         3,         4,         8,
    16,   63,    64,        65,        255,       256,       4095,
    4096, 65536, INT32_MIN, INT32_MAX, INT64_MIN, INT64_MAX, UINT32_MAX};

class Mutator {
 public:
  // Makes half of the mutants from good seeds, which pass more checks.
  explicit Mutator(const std::vector<Seed>& seeds) {
    for (const Seed& seed : seeds) {
      seeds_.push_back(seed.bytes);
      if (seed.is_good) good_.push_back(seed.bytes);
    }
  }

  std::string Next() {
    const std::vector<std::string>& seeds = Below(2) ? good_ : seeds_;
    std::string input = seeds[Below(seeds.size())];
    for (int64_t n = Below(4); n >= 0; --n) Change(&input);
    return input;
  }

 private:
  uint64_t Below(uint64_t end) { return random_() % end; }

  void Change(std::string* input) {
    if (input->empty()) return input->push_back(Below(256));
    const size_t at = Below(input->size());
    switch (Below(8)) {
      case 0:
        return input->resize(at);
      case 1:
        return input->resize(input->size() + Below(64), Below(256));
      case 2:
        (*input)[at] = Below(256);
        return;
      case 3: {
        const std::string& other = seeds_[Below(seeds_.size())];
        return Overwrite(at, other.substr(Below(other.size() + 1)), input);
      }
      case 4:
        return Overwrite(at, input->substr(Below(input->size()), 1 + Below(64)),
                         input);
      case 5: {
        const int64_t number = kNumbers[Below(std::size(kNumbers))];
        const size_t width = size_t{1} << Below(4);
        return Overwrite(
            at / width * width,
            std::string(reinterpret_cast<const char*>(&number), width), input);
      }
      default:
        (*input)[at] ^= 1 << Below(8);
    }
  }

  // Overwrites bytes of `input`, up to the end of `input`.
  static void Overwrite(size_t at, const std::string& bytes,
                        std::string* input) {
    const size_t count = std::min(bytes.size(), input->size() - at);
    input->replace(at, count, bytes, 0, count);
  }

  std::vector<std::string> seeds_, good_;
  std::mt19937_64 random_{first_seed};
};

// Without good seeds, no mutant would pass the first checks.
TEST(FuzzTest, GoodSeedsAreAccepted) {
  for (const std::string& path : files) {
    std::ifstream file(path, std::ios::binary);
    EXPECT_TRUE(file) << path;
    Accepts({std::istreambuf_iterator<char>(file), {}});
  }
  if (!files.empty()) return;
  for (const Seed& seed : FuzzSeeds()) {
    EXPECT_EQ(seed.is_good, Accepts(seed.bytes)) << seed.name;
  }
}

TEST(FuzzTest, MutantsDoNoHarm) {
  if (!files.empty()) return;
  Mutator mutator(FuzzSeeds());
  int64_t accepted = 0;
  for (int64_t i = 0; i < iterations && !HasFailure(); ++i) {
    accepted += Accepts(mutator.Next());
  }
  std::cout << "accepted " << accepted << " of " << iterations << std::endl;
}

}  // namespace
}  // namespace ep::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const auto value = argument.c_str() + argument.find('=') + 1;
    if (argument.rfind("--iterations=", 0) == 0) {
      ep::testing::iterations = std::atoll(value);
    } else if (argument.rfind("--seed=", 0) == 0) {
      ep::testing::first_seed = std::atoll(value);
    } else {
      ep::testing::files.push_back(argument);
    }
  }
  return RUN_ALL_TESTS();
}
