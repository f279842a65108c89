// SPDX-License-Identifier: Apache-2.0
#include "diagnose/segment_view.h"

#include <fmt/format.h>

#include <cstring>

namespace unisono::diagnose {

bool isTables(std::byte* segment) {
  const ProcessHead& head = headOf(segment);
  return std::memcmp(head.magic, kMagic, sizeof(kMagic)) == 0 && head.layout == kTableLayout;
}

std::map<std::string, std::string> readSettings(const ProcessHead& head) {
  const uint32_t version = head.settingsVersion.load(kAcquire);
  std::map<std::string, std::string> settings;
  std::string line;
  for (const std::atomic<char>& letter : head.settings) {
    const char next = letter.load(kAcquire);
    if (next == '\0') break;
    line += next;
    if (next != '\n') continue;
    const size_t sign = line.find('=');
    if (sign != std::string::npos) {
      settings[line.substr(0, sign)] = line.substr(sign + 1, line.size() - sign - 2);
    }
    line.clear();
  }
  const bool isWhole = version % 2 == 0 && head.settingsVersion.load(kAcquire) == version;
  return isWhole ? settings : std::map<std::string, std::string>();
}

std::string waitElsewhere(std::byte* segment, const RankView& rank, int64_t now) {
  constexpr int64_t kBriefly = 200'000'000;
  std::string text;
  forEachTable(segment, [&](const CallTable& table) {
    if (!text.empty() || table.device.load(std::memory_order_acquire) != rank.device) return;
    const RankView other = readView(headOf(segment), table, now);
    if (other.id == rank.id) return;
    const Call* current = other.current();
    if (current == nullptr || now - other.waitsSince(*current) < kBriefly) return;
    text = fmt::format("{} of communicator {} ({} ranks) as rank {}", describe(*current),
                       other.name.empty() ? "without a name" : other.name, other.ranks, other.rank);
  });
  return text;
}

}  // namespace unisono::diagnose
