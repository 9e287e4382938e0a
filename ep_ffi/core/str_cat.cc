// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/core/str_cat.h"

#include <charconv>
#include <locale>
#include <sstream>

namespace ep::internal {
namespace {

template <typename Number>
void AppendWhole(Number number, std::string* out) {
  char text[32];
  out->append(text, std::to_chars(text, text + sizeof(text), number).ptr);
}

}  // namespace

void AppendInteger(int64_t number, std::string* out) {
  AppendWhole(number, out);
}

void AppendUnsigned(uint64_t number, std::string* out) {
  AppendWhole(number, out);
}

void AppendFraction(double number, std::string* out) {
  // std::snprintf would use the program's locale. Only failures, which may take
  // the time that a stream takes, have fractions.
  std::ostringstream stream;
  stream.imbue(std::locale::classic());
  stream << number;
  out->append(stream.str());
}

}  // namespace ep::internal
