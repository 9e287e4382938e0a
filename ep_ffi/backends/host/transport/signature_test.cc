// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/transport/signature.h"

#include <gtest/gtest.h>

#include <set>

namespace ep::host {
namespace {

TEST(SignatureTest, EveryFieldHasANameOfItsOwn) {
  std::set<std::string> names;
  for (int f = 0; f < Signature::kNumFields; ++f) {
    names.insert(Signature::Name(static_cast<Signature::Field>(f)));
  }
  EXPECT_EQ(size_t{Signature::kNumFields}, names.size());
}

TEST(SignatureTest, AnyValueOfAPeerHasText) {
  Signature s;
  for (int64_t value : {int64_t{-1}, int64_t{0}, int64_t{1}, INT64_MAX}) {
    for (int f = 0; f < Signature::kNumFields; ++f) {
      s.values[f] = value;
      EXPECT_NE("", s.ValueOf(static_cast<Signature::Field>(f)));
    }
  }
  EXPECT_EQ("float32",
            (s[Signature::kDType] = 0, s.ValueOf(Signature::kDType)));
  EXPECT_EQ("zero", (s[Signature::kTail] = 1, s.ValueOf(Signature::kTail)));
}

TEST(SignatureTest, TheSecondArrayIsAligned) {
  Signature s;
  s[Signature::kFirstBytes] = 65;
  s[Signature::kSecondBytes] = 3;
  EXPECT_EQ(128u, s.second_offset());
  EXPECT_EQ(131u, s.staged_bytes());
}

TEST(SignatureTest, BothArraysMustFitIntoASegment) {
  Signature s;
  s[Signature::kFirstBytes] = 65;
  s[Signature::kSecondBytes] = 3;
  EXPECT_TRUE(s.FitsIn(131));
  EXPECT_FALSE(s.FitsIn(130));
  for (Signature::Field size :
       {Signature::kFirstBytes, Signature::kSecondBytes}) {
    for (int64_t value : {int64_t{-1}, int64_t{132}, INT64_MAX, INT64_MIN}) {
      Signature other = s;
      other[size] = value;
      EXPECT_FALSE(other.FitsIn(131)) << value;
    }
  }
}

}  // namespace
}  // namespace ep::host
