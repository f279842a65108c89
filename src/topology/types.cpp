// SPDX-License-Identifier: Apache-2.0
#include "topology/types.h"

#include <iterator>

namespace unisono::topology {

namespace {
constexpr std::string_view kNodeNames[] = {"GPU", "PCI", "NVS", "CPU", "NIC", "NET"};
constexpr std::string_view kLinkNames[] = {"LOC", "NVL", "C2C", "PCI", "SYS", "NET"};
constexpr std::string_view kPathNames[] = {"LOC", "NVL", "NVB", "C2C", "PIX", "PXB",
                                           "P2C", "PXN", "PHB", "SYS", "NET", "DIS"};
}  // namespace

std::string_view nameOf(NodeType type) {
  return kNodeNames[static_cast<int>(type)];
}
std::string_view nameOf(LinkType type) {
  return kLinkNames[static_cast<int>(type)];
}
std::string_view nameOf(PathType type) {
  return kPathNames[static_cast<int>(type)];
}

std::optional<PathType> pathTypeOf(std::string_view name) {
  int number = 0;
  for (const std::string_view known : kPathNames) {
    if (known == name) return static_cast<PathType>(number);
    ++number;
  }
  return std::nullopt;
}

std::optional<PathType> pathLevelOf(std::string_view text) {
  if (const auto named = pathTypeOf(text)) return named;
  constexpr PathType kNumbered[] = {PathType::loc, PathType::pix, PathType::pxb, PathType::phb};
  if (text.size() != 1 || text[0] < '0' || text[0] > '9') return std::nullopt;
  const size_t number = static_cast<size_t>(text[0] - '0');
  return number < std::size(kNumbered) ? kNumbered[number] : PathType::sys;
}

}  // namespace unisono::topology
