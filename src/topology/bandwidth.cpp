// SPDX-License-Identifier: Apache-2.0
#include "topology/bandwidth.h"

#include <algorithm>
#include <charconv>

namespace unisono::topology {

Bandwidth nvlinkBandwidth(int sm) {
  if (sm >= 100) return 40100;
  if (sm >= 90) return 20600;
  if (sm == 86) return 12000;
  if (sm >= 70) return 20000;
  if (sm >= 60) return 18000;
  return 20000;
}

Bandwidth pciBandwidth(std::string_view speed, int width) {
  constexpr int kDefaultWidth = 16, kDefaultLane = 60;
  if (width <= 0 || width > 32) width = kDefaultWidth;
  // Giga-transfers a second and the usable speed of one lane in units of 100 Mb/s.
  struct Generation {
    double transfers;
    int lane;
  };
  static constexpr Generation kGenerations[] = {{2.5, 15}, {5, 30},   {8, 60},
                                                {16, 120}, {32, 240}, {64, 480}};
  int lane = kDefaultLane;
  double transfers = 0;
  const auto [end, error] = std::from_chars(speed.data(), speed.data() + speed.size(), transfers);
  if (error == std::errc() &&
      std::string_view(end, speed.data() + speed.size()).starts_with(" GT/s")) {
    for (const Generation& generation : kGenerations) {
      if (generation.transfers == transfers) lane = generation.lane;
    }
  }
  return static_cast<Bandwidth>(width) * lane * 1000 / 80;
}

Bandwidth cpuLinkBandwidth(CpuArchitecture architecture, CpuVendor vendor, int model) {
  constexpr int kSkylake = 0x55, kSapphireRapids = 0x8f, kEmeraldRapids = 0xcf, kYongfeng = 0x5b;
  switch (architecture) {
    case CpuArchitecture::power:
      return 32000;
    case CpuArchitecture::arm:
      return 6000;
    case CpuArchitecture::unknown:
      return 6000;
    case CpuArchitecture::x86:
      break;
  }
  switch (vendor) {
    case CpuVendor::intel:
      if (model >= kEmeraldRapids) return 40000;
      if (model >= kSapphireRapids) return 22000;
      if (model >= kSkylake) return 10000;
      return 6000;
    case CpuVendor::amd:
      return 16000;
    case CpuVendor::zhaoxin:
      return model == kYongfeng ? 9000 : 6000;
    case CpuVendor::unknown:
      return 5000;
  }
  return 5000;
}

Bandwidth netBandwidth(long long megabits) {
  constexpr long long kUnknown = 10'000;
  return std::max(1LL, (megabits > 0 ? megabits : kUnknown) / 8);
}

}  // namespace unisono::topology
