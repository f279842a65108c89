// SPDX-License-Identifier: Apache-2.0
#include "base/system.h"

#include <fmt/format.h>
#include <unistd.h>

namespace unisono {

std::string hostName() {
  char name[256] = {};
  ::gethostname(name, sizeof(name) - 1);
  return name;
}

std::string processName() {
  return "process " + std::to_string(::getpid()) + " on host " + hostName();
}

std::string expandFileName(std::string_view pattern, int rank) {
  std::string name;
  for (size_t i = 0; i < pattern.size(); i++) {
    const char letter = pattern[i] == '%' && i + 1 < pattern.size() ? pattern[i + 1] : '\0';
    const bool isKnown = letter == 'h' || letter == 'p' || (letter == 'r' && rank >= 0);
    if (!isKnown) {
      name += pattern[i];
      continue;
    }
    name += letter == 'h' ? hostName() : std::to_string(letter == 'p' ? ::getpid() : rank);
    i++;
  }
  return name;
}

std::string quoteJson(std::string_view text) {
  std::string result = "\"";
  for (const char letter : text) {
    if (letter == '"' || letter == '\\') {
      result += '\\';
      result += letter;
    } else if (static_cast<unsigned char>(letter) < 0x20) {
      result += fmt::format("\\u{:04x}", static_cast<unsigned char>(letter));
    } else {
      result += letter;
    }
  }
  return result + '"';
}

size_t pageBytes() {
  static const auto bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

}  // namespace unisono
