// SPDX-License-Identifier: Apache-2.0
#include "base/system.h"

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

size_t pageBytes() {
  static const auto bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

}  // namespace unisono
