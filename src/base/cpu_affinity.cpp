// SPDX-License-Identifier: Apache-2.0
#include "base/cpu_affinity.h"

#include <charconv>

#include "base/log.h"

namespace unisono {
namespace {

constexpr int kCoresOfWord = 32;

cpu_set_t parseMask(std::string_view mask) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  for (int first = 0; !mask.empty(); first += kCoresOfWord) {
    const size_t comma = mask.rfind(',');
    const std::string_view word = comma == std::string_view::npos ? mask : mask.substr(comma + 1);
    uint32_t bits = 0;
    std::from_chars(word.data(), word.data() + word.size(), bits, 16);
    for (int bit = 0; bit < kCoresOfWord && first + bit < CPU_SETSIZE; bit++) {
      if ((bits >> bit & 1) != 0) CPU_SET(static_cast<size_t>(first + bit), &cores);
    }
    mask = mask.substr(0, comma == std::string_view::npos ? 0 : comma);
  }
  return cores;
}

}  // namespace

ScopedCpuAffinity::ScopedCpuAffinity(std::string_view mask, bool ignoreOwn) {
  if (::sched_getaffinity(0, sizeof before_, &before_) != 0) return;
  cpu_set_t wanted = parseMask(mask);
  if (!ignoreOwn) CPU_AND(&wanted, &wanted, &before_);
  if (CPU_COUNT(&wanted) == 0) return;
  changed_ = ::sched_setaffinity(0, sizeof wanted, &wanted) == 0;
  logInfo("Threads that are started now run on {} cores of mask {}", CPU_COUNT(&wanted), mask);
}

ScopedCpuAffinity::~ScopedCpuAffinity() {
  if (changed_) ::sched_setaffinity(0, sizeof before_, &before_);
}

}  // namespace unisono
