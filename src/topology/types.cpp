#include "topology/types.h"

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

}  // namespace unisono::topology
