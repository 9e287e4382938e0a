// SPDX-License-Identifier: Apache-2.0

// Runs a fuzz target without a fuzzer: on its seeds, and on mutants of the
// seeds, which are the same in every run.
//
//   foo_fuzz_test [--iterations=n] [--seed=n] [file...]
//
// The target has libFuzzer's form, so that a fuzzer that learns can run it too.
// It, or a sanitizer, aborts the process when it finds a fault; the input is
// then in the file that the log names. Given files, the test runs these alone.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "ep_ffi/testing/fuzz.h"

namespace ep::testing {
namespace {

using Input = std::vector<uint8_t>;

Input ToInput(const Seed& seed) {
  return Input(seed.bytes.begin(), seed.bytes.end());
}

// Flags of the command line.
int64_t iterations = 1000;
uint64_t seed = 1;
std::vector<std::string> files;

Input Read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file) << path;
  return Input(std::istreambuf_iterator<char>(file), {});
}

// Keeps the current input in a file, which outlives a crash.
class LastInput {
 public:
  LastInput() {
    const char* folder = std::getenv("TEST_UNDECLARED_OUTPUTS_DIR");
    const std::string path = std::string(folder ? folder : ".") + "/input";
    fd_ = open(path.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    std::cout << "each input is first in " << path << std::endl;
  }

  void Save(const Input& input) {
    EXPECT_EQ(ssize_t(input.size()),
              pwrite(fd_, input.data(), input.size(), 0));
    EXPECT_EQ(0, ftruncate(fd_, input.size()));
  }

 private:
  int fd_;
};

bool Accepts(const Input& input) {
  static LastInput* last = new LastInput();
  last->Save(input);
  return LLVMFuzzerTestOneInput(input.data(), input.size()) == 0;
}

// Numbers at which bounds and signs change.
constexpr int64_t kNumbers[] = {
    0,    1,     -1,        2,         3,         4,         8,
    16,   63,    64,        65,        255,       256,       4095,
    4096, 65536, INT32_MIN, INT32_MAX, INT64_MIN, INT64_MAX, UINT32_MAX};

class Mutator {
 public:
  // Takes half of the mutants from good seeds, since these pass more checks.
  explicit Mutator(const std::vector<Seed>& seeds) {
    for (const Seed& seed : seeds) {
      seeds_.push_back(ToInput(seed));
      if (seed.is_good) good_.push_back(seeds_.back());
    }
  }

  Input Next() {
    const std::vector<Input>& seeds = Below(2) ? good_ : seeds_;
    Input input = seeds[Below(seeds.size())];
    for (int64_t n = Below(4); n >= 0; --n) Change(&input);
    return input;
  }

 private:
  uint64_t Below(uint64_t end) { return random_() % end; }

  void Change(Input* input) {
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
        const Input& other = seeds_[Below(seeds_.size())];
        const size_t from = Below(other.size() + 1);
        return Overwrite(at, &other[0] + from, other.size() - from, input);
      }
      case 4: {
        const size_t from = Below(input->size());
        const Input part(input->begin() + from, input->end());
        return Overwrite(at, part.data(), 1 + Below(64), input, part.size());
      }
      case 5: {
        const int64_t number = kNumbers[Below(std::size(kNumbers))];
        const size_t width = size_t{1} << Below(4);
        return Overwrite(at / width * width, &number, width, input);
      }
      default:
        (*input)[at] ^= 1 << Below(8);
    }
  }

  static void Overwrite(size_t at, const void* bytes, size_t count,
                        Input* input, size_t available = SIZE_MAX) {
    count = std::min({count, available, input->size() - at});
    if (count > 0) std::memcpy(input->data() + at, bytes, count);
  }

  std::vector<Input> seeds_, good_;
  std::mt19937_64 random_{seed};
};

// Without good seeds no mutant would pass the first checks.
TEST(FuzzTest, GoodSeedsAreAccepted) {
  for (const std::string& path : files) Accepts(Read(path));
  if (!files.empty()) return;
  for (const Seed& seed : FuzzSeeds()) {
    EXPECT_EQ(seed.is_good, Accepts(ToInput(seed))) << seed.name;
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

bool Parse(const char* argument, const char* flag, int64_t* value) {
  const size_t length = std::strlen(flag);
  if (std::strncmp(argument, flag, length) != 0) return false;
  *value = std::atoll(argument + length);
  return true;
}

}  // namespace
}  // namespace ep::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    int64_t value;
    if (ep::testing::Parse(argv[i], "--iterations=", &value)) {
      ep::testing::iterations = value;
    } else if (ep::testing::Parse(argv[i], "--seed=", &value)) {
      ep::testing::seed = value;
    } else {
      ep::testing::files.push_back(argv[i]);
    }
  }
  return RUN_ALL_TESTS();
}
