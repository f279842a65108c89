// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/interfaces.h"

#include <ifaddrs.h>
#include <net/if.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <memory>
#include <tuple>

#include "base/error.h"
#include "base/log.h"

namespace unisono::bootstrap {
namespace {

constexpr size_t kMostInterfaces = 16;

struct Filter {
  bool exclude = false;
  bool exact = false;
  std::vector<std::string_view> names;

  explicit Filter(std::string_view text) {
    if (text.starts_with('^')) {
      exclude = true;
      text.remove_prefix(1);
    }
    if (text.starts_with('=')) {
      exact = true;
      text.remove_prefix(1);
    }
    while (!text.empty()) {
      size_t comma = std::min(text.find(','), text.size());
      if (comma > 0) names.push_back(text.substr(0, comma));
      text.remove_prefix(std::min(comma + 1, text.size()));
    }
  }

  bool lists(std::string_view name) const {
    return std::any_of(names.begin(), names.end(), [&](std::string_view wanted) {
      return exact ? name == wanted : name.starts_with(wanted);
    });
  }
  bool accepts(std::string_view name) const { return names.empty() || lists(name) != exclude; }
  // Naming interfaces overrides the order of preference; excluding some does not.
  bool ranks() const { return names.empty() || exclude; }
};

int preference(const NetworkInterface& interface) {
  if (interface.name.starts_with("ib")) return 0;
  if (interface.loopback || interface.name.starts_with("lo")) return 3;
  if (interface.name.starts_with("docker")) return 2;
  if (interface.name.starts_with("virbr")) return 4;
  return 1;
}

// Of a netmask, whose ones come first.
int countBits(const sockaddr* mask) {
  if (mask == nullptr) return 0;
  int bits = 0;
  for (const uint8_t byte : fromSystem(mask).bytes) bits += std::popcount(byte);
  return bits;
}

bool hasInSubnet(const NetworkInterface& interface, const Address& address) {
  const Address& own = interface.address;
  if (interface.subnetBits == 0 || own.family != address.family || own.scope != address.scope) {
    return false;
  }
  for (int bit = 0; bit < interface.subnetBits; bit++) {
    const auto byte = static_cast<size_t>(bit / 8);
    if (((own.bytes[byte] ^ address.bytes[byte]) >> (7 - bit % 8) & 1) != 0) return false;
  }
  return true;
}

// Null where it tells nothing.
const NetworkInterface* findHinted(const std::vector<NetworkInterface>& interfaces,
                                   AddressFamily family, std::string_view hint) {
  if (hint.empty()) return nullptr;
  try {
    const Address address = parseAddress(hint, family, "NCCL_COMM_ID");
    const auto found = std::ranges::find_if(interfaces, [&](const NetworkInterface& interface) {
      return interface.up && hasInSubnet(interface, address);
    });
    return found == interfaces.end() ? nullptr : &*found;
  } catch (const Error& error) {
    logInfo("NCCL_COMM_ID does not tell which interface to use: {}", error.what());
    return nullptr;
  }
}

int familyOrder(const Address& address) {
  if (address.family == AddressFamily::ipv4) return 0;
  return address.isLinkLocal() ? 2 : 1;
}

std::string describe(const std::vector<NetworkInterface>& interfaces) {
  std::string text;
  for (const NetworkInterface& interface : interfaces) {
    text += fmt::format("{}{} {}{}", text.empty() ? "" : ", ", interface.name,
                        interface.address.text(), interface.up ? "" : " (down)");
  }
  return text.empty() ? "none" : text;
}

}  // namespace

std::vector<NetworkInterface> listInterfaces() {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) throw systemError(errno, "getifaddrs");
  std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(first, &::freeifaddrs);
  std::vector<NetworkInterface> result;
  for (const ifaddrs* entry = first; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr) continue;
    Address address = fromSystem(entry->ifa_addr);
    if (address.family == AddressFamily::any) continue;
    // As with NCCL, an interface without a carrier counts as down.
    constexpr unsigned kUp = IFF_UP | IFF_RUNNING;
    result.push_back({entry->ifa_name, address, (entry->ifa_flags & kUp) == kUp,
                      (entry->ifa_flags & IFF_LOOPBACK) != 0, countBits(entry->ifa_netmask)});
  }
  return result;
}

const NetworkInterface& chooseInterface(const std::vector<NetworkInterface>& interfaces,
                                        std::string_view filterText, AddressFamily family) {
  const Filter filter(filterText);
  auto key = [&](const NetworkInterface& interface) {
    return std::make_tuple(filter.ranks() ? preference(interface) : 0,
                           familyOrder(interface.address));
  };
  const NetworkInterface* best = nullptr;
  for (const NetworkInterface& interface : interfaces) {
    if (!interface.up || !filter.accepts(interface.name)) continue;
    if (family != AddressFamily::any && interface.address.family != family) continue;
    if (best == nullptr || key(interface) < key(*best)) best = &interface;
  }
  if (best == nullptr) {
    throw invalidUsage("No network interface matches NCCL_SOCKET_IFNAME=\"{}\"{}; available: {}",
                       filterText,
                       family == AddressFamily::any    ? ""
                       : family == AddressFamily::ipv4 ? " with an IPv4 address"
                                                       : " with an IPv6 address",
                       describe(interfaces))
        .remedy("Set NCCL_SOCKET_IFNAME to an interface that every rank can reach");
  }
  return *best;
}

std::vector<NetworkInterface> chooseInterfaces(const std::vector<NetworkInterface>& interfaces,
                                               std::string_view filterText, AddressFamily family,
                                               std::string_view hint) {
  const Filter filter(filterText);
  const NetworkInterface& best = chooseInterface(interfaces, filterText, family);
  if (filterText.empty() && preference(best) > 0) {
    const NetworkInterface* hinted = findHinted(interfaces, family, hint);
    if (hinted != nullptr) return {*hinted};
  }
  std::vector<NetworkInterface> chosen;
  for (const NetworkInterface& interface : interfaces) {
    if (!interface.up || !filter.accepts(interface.name)) continue;
    if (filter.ranks() && preference(interface) != preference(best)) continue;
    if (family != AddressFamily::any && interface.address.family != family) continue;
    const auto known = std::find_if(chosen.begin(), chosen.end(), [&](const auto& other) {
      return other.name == interface.name;
    });
    if (known == chosen.end()) {
      chosen.push_back(interface);
    } else if (familyOrder(interface.address) < familyOrder(known->address)) {
      *known = interface;
    }
  }
  if (filter.ranks() && !best.address.isLinkLocal()) {
    std::erase_if(chosen, [](const auto& each) { return each.address.isLinkLocal(); });
  }
  chosen.resize(std::min(chosen.size(), kMostInterfaces));
  return chosen;
}

Address localizeScope(const Address& address, const std::vector<NetworkInterface>& interfaces,
                      std::string_view filter) {
  if (!address.isLinkLocal()) return address;
  Address result = address;
  std::vector<NetworkInterface> linkLocal;
  for (const NetworkInterface& interface : interfaces) {
    if (!interface.address.isLinkLocal()) continue;
    if (interface.address.sameHostPart(address)) {
      result.scope = interface.address.scope;
      return result;
    }
    linkLocal.push_back(interface);
  }
  result.scope = chooseInterface(linkLocal, filter, AddressFamily::ipv6).address.scope;
  return result;
}

}  // namespace unisono::bootstrap
