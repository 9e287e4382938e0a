// SPDX-License-Identifier: Apache-2.0

// Functions that format JSON.

#ifndef EP_FFI_CORE_JSON_H_
#define EP_FFI_CORE_JSON_H_

#include <cstdio>
#include <iomanip>
#include <locale>
#include <sstream>
#include <string>

namespace ep {

inline std::string Quoted(const std::string& text) {
  std::string out = "\"";
  for (const unsigned char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (c >= ' ') {
      out += static_cast<char>(c);
      continue;
    }
    char escaped[8];
    std::snprintf(escaped, sizeof(escaped), "\\u%04x", c);
    out += escaped;
  }
  return out + '"';
}

// Returns a JSON list of the items, each formatted by `format`.
template <typename Items, typename Format>
std::string List(const Items& items, Format format) {
  std::string out;
  for (const auto& item : items) out += (out.empty() ? "" : ",") + format(item);
  return "[" + out + "]";
}

inline std::string Seconds(double time) {
  std::ostringstream text;  // snprintf would use the program's locale
  text.imbue(std::locale::classic());
  text << std::fixed << std::setprecision(7) << time;
  return text.str();
}

}  // namespace ep

#endif  // EP_FFI_CORE_JSON_H_
