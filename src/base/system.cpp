// SPDX-License-Identifier: Apache-2.0
#include "base/system.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <fstream>
#include <sstream>

namespace unisono {

std::string hostName() {
  char name[256] = {};
  ::gethostname(name, sizeof(name) - 1);
  return name;
}

std::string processName() {
  return "process " + std::to_string(::getpid()) + " on host " + hostName();
}

uint64_t pidNamespace() {
  struct stat status {};
  return ::stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

// While a process is a zombie its other threads may still run.
bool hasEnded(pid_t process) {
  if (::kill(process, 0) != 0 && errno == ESRCH) return true;
  std::ifstream file(fmt::format("/proc/{}/stat", process));
  std::string text;
  std::getline(file, text);
  const size_t name = text.rfind(')');
  if (name == std::string::npos) return false;
  std::istringstream fields(text.substr(name + 1));
  char state = '\0';
  fields >> state;
  constexpr int kBeforeThreads = 16;
  long value = 0;
  for (int field = 0; field < kBeforeThreads; field++) fields >> value;
  long threads = 0;
  return (state == 'Z' || state == 'X') && fields >> threads && threads <= 1;
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
