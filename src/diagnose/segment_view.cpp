// SPDX-License-Identifier: Apache-2.0
#include "diagnose/segment_view.h"

#include <fmt/format.h>

#include <cstring>

namespace unisono::diagnose {

bool isTables(std::byte* segment) {
  const ProcessHead& head = headOf(segment);
  return std::memcmp(head.magic, kMagic, sizeof(kMagic)) == 0 && head.layout == kTableLayout;
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
