// SPDX-License-Identifier: Apache-2.0

// Functions that check a status in a test.

#ifndef EP_FFI_TESTING_EXPECT_H_
#define EP_FFI_TESTING_EXPECT_H_

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "ep_ffi/core/status.h"

namespace ep::testing {

inline void ExpectOk(const Status& status) {
  EXPECT_TRUE(status.ok()) << status.message();
}

// The code of a failure, and parts of its message.
struct Failure {
  Code code;
  std::vector<std::string> parts = {};
};

// Expects that a text has all these words.
inline void ExpectIn(const std::string& text,
                     const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    EXPECT_NE(std::string::npos, text.find(word))
        << "no \"" << word << "\" in: " << text;
  }
}

// Expects a failure whose message has all these words.
inline void ExpectWords(const std::vector<std::string>& words,
                        const Status& status) {
  EXPECT_FALSE(status.ok());
  ExpectIn(status.message(), words);
}

inline void ExpectFailure(const Failure& expected, const Status& status) {
  EXPECT_EQ(expected.code, status.code()) << status.message();
  ExpectWords(expected.parts, status);
}

}  // namespace ep::testing

#endif  // EP_FFI_TESTING_EXPECT_H_
