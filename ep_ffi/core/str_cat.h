// SPDX-License-Identifier: Apache-2.0

// StrCat concatenates texts and numbers. Truncated shortens a text.

#ifndef EP_FFI_CORE_STR_CAT_H_
#define EP_FFI_CORE_STR_CAT_H_

#include <cstddef>
#include <locale>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>

namespace ep {
namespace internal {

template <typename Part>
void Append(const Part& part, std::string* out) {
  if constexpr (std::is_convertible_v<const Part&, std::string_view>) {
    out->append(std::string_view(part));
  } else if constexpr (std::is_same_v<Part, char>) {
    out->push_back(part);
  } else if constexpr (std::is_floating_point_v<Part>) {
    // std::to_string would format fractions in the program's locale.
    std::ostringstream stream;
    stream.imbue(std::locale::classic());
    stream << part;
    out->append(stream.str());
  } else {
    out->append(std::to_string(+part));
  }
}

}  // namespace internal

// Concatenates all parts. Formats numbers as "%d" or "%g" in the "C" locale.
template <typename... Parts>
std::string StrCat(const Parts&... parts) {
  std::string out;
  (internal::Append(parts, &out), ...);
  return out;
}

// Returns the first bytes of a UTF-8 text, at most `max_bytes` and without a
// part of a character.
inline std::string Truncated(const std::string& text, size_t max_bytes) {
  if (text.size() <= max_bytes) return text;
  size_t end = max_bytes;
  while (end > 0 && (text[end] & 0xc0) == 0x80) --end;  // inside a character
  return text.substr(0, end);
}

}  // namespace ep

#endif  // EP_FFI_CORE_STR_CAT_H_
