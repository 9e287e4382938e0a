// SPDX-License-Identifier: Apache-2.0

// StrCat: one string made of texts and numbers.

#ifndef EP_FFI_CORE_STR_CAT_H_
#define EP_FFI_CORE_STR_CAT_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

namespace ep {
namespace internal {

// Append a number as "%d" or "%g" would print it in the locale "C".
void AppendInteger(int64_t number, std::string* out);
void AppendUnsigned(uint64_t number, std::string* out);
void AppendFraction(double number, std::string* out);

// Appends a text, a character or a number.
template <typename Part>
void Append(const Part& part, std::string* out) {
  if constexpr (std::is_convertible_v<const Part&, std::string_view>) {
    out->append(std::string_view(part));
  } else if constexpr (std::is_same_v<Part, char>) {
    out->push_back(part);
  } else if constexpr (std::is_floating_point_v<Part>) {
    AppendFraction(part, out);
  } else if constexpr (std::is_signed_v<decltype(+part)>) {
    AppendInteger(+part, out);
  } else {
    AppendUnsigned(+part, out);
  }
}

}  // namespace internal

// Concatenates texts and numbers. As cheap as appending to one string, so that
// it also serves where each call of an op pays for it.
template <typename... Parts>
std::string StrCat(const Parts&... parts) {
  std::string out;
  (internal::Append(parts, &out), ...);
  return out;
}

}  // namespace ep

#endif  // EP_FFI_CORE_STR_CAT_H_
