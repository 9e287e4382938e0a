// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/core/str_cat.h"

#include <gtest/gtest.h>

#include <clocale>
#include <cstdint>
#include <limits>

namespace ep {
namespace {

TEST(StrCatTest, JoinsTexts) {
  EXPECT_EQ("", StrCat());
  EXPECT_EQ("abcd, ", StrCat("a", std::string("b"), std::string_view("cde", 2),
                             ',', ' '));
}

TEST(StrCatTest, WritesWholeNumbers) {
  EXPECT_EQ("-7 0 1", StrCat(-7, ' ', false, ' ', true));
  EXPECT_EQ("-9223372036854775808",
            StrCat(std::numeric_limits<int64_t>::min()));
  EXPECT_EQ("18446744073709551615",
            StrCat(std::numeric_limits<uint64_t>::max()));
}

// Messages quote durations: timeout_s = 1.5 s.
TEST(StrCatTest, WritesFractionsAsAStreamWould) {
  EXPECT_EQ("1 1.5 0.1 1e-09 inf",
            StrCat(1.0, ' ', 1.5f, ' ', 0.1, ' ', 1e-9, ' ',
                   std::numeric_limits<double>::infinity()));
}

TEST(StrCatTest, WritesFractionsAlikeInEveryLocale) {
  // A program may have set any locale; few are installed on every machine.
  for (const char* name : {"de_DE.UTF-8", "de_DE.utf8", "fr_FR.UTF-8", "C"}) {
    if (!std::setlocale(LC_ALL, name)) continue;
    EXPECT_EQ("0.5", StrCat(0.5));
  }
  struct Comma : std::numpunct<char> {
    char do_decimal_point() const override { return ','; }
  };
  const std::locale before =
      std::locale::global(std::locale(std::locale(), new Comma));
  EXPECT_EQ("0.5", StrCat(0.5));
  std::locale::global(before);
}

}  // namespace
}  // namespace ep
