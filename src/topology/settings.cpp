// SPDX-License-Identifier: Apache-2.0
#include "topology/settings.h"

#include <fmt/format.h>

#include "base/error.h"

namespace unisono::topology {
namespace {

std::optional<PathType> levelOf(const std::string& text, const char* variable) {
  if (text.empty()) return std::nullopt;
  const std::optional<PathType> level = pathLevelOf(text);
  if (!level) {
    throw invalidArgument("{}={} is not a path type", variable, text)
        .remedy(fmt::format("Set {} to LOC, NVL, PIX, PXB, PHB or SYS, or unset it", variable));
  }
  return level;
}

std::optional<bool> switchOf(int64_t value) {
  return value < 0 ? std::nullopt : std::optional(value != 0);
}

}  // namespace

PathSettings pathSettingsOf(const Settings& settings) {
  PathSettings paths;
  paths.p2pDisable = settings.p2pDisable;
  paths.p2pLevel = levelOf(settings.p2pLevel, "NCCL_P2P_LEVEL");
  paths.reportP2pRefused = settings.ignoreDisabledP2p == 0;
  paths.p2pRead = switchOf(settings.p2pRead);
  paths.shmDisable = settings.shmDisable;
  paths.gdrLevel = levelOf(settings.gdrLevel, "NCCL_NET_GDR_LEVEL");
  paths.gdrRead = switchOf(settings.gdrRead);
  paths.gdrC2c = settings.gdrC2c;
  paths.forceFlush = settings.forceFlush;
  paths.pxnDisable = settings.pxnDisable;
  paths.pxnC2c = settings.pxnC2c;
  paths.p2pPxnLevel = static_cast<int>(settings.p2pPxnLevel);
  paths.nvbDisable = settings.nvbDisable;
  paths.multiNodeNvlink = settings.multiNodeNvlink != 0;
  return paths;
}

SearchSettings searchSettingsOf(const Settings& settings) {
  SearchSettings search;
  search.crossNic = static_cast<int>(settings.crossNic);
  search.collnet = settings.collnet > 0;
  return search;
}

}  // namespace unisono::topology
