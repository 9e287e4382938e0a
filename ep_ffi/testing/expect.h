// SPDX-License-Identifier: Apache-2.0

// What tests expect of a status.

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

// A failure's code, and parts of its message.
struct Failure {
  Code code;
  std::vector<std::string> parts = {};
};

inline void ExpectFailure(const Failure& expected, const Status& status) {
  EXPECT_EQ(expected.code, status.code()) << status.message();
  for (const std::string& part : expected.parts) {
    EXPECT_NE(std::string::npos, status.message().find(part))
        << "no \"" << part << "\" in: " << status.message();
  }
}

}  // namespace ep::testing

#endif  // EP_FFI_TESTING_EXPECT_H_
