// SPDX-License-Identifier: Apache-2.0
#include "transport/net/gid.h"

#include <arpa/inet.h>

#include <algorithm>
#include <charconv>

#include "base/log.h"

namespace unisono::transport {
namespace {

constexpr int kIpv4Bits = 32, kIpv6Bits = 128;
constexpr std::array<uint8_t, 12> kIpv4Prefix = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};

bool isInRange(const Gid& gid, const GidRules& rules) {
  for (int bit = 0; bit < rules.prefixBits; bit++) {
    const auto byte = static_cast<size_t>(bit / 8);
    const int mask = 0x80 >> (bit % 8);
    if (((gid.bytes[byte] ^ rules.network[byte]) & mask) != 0) return false;
  }
  return true;
}

// Neither unset nor link-local (fe80::/64).
bool isRoutable(const Gid& gid) {
  constexpr std::array<uint8_t, 8> kLinkLocal = {0xfe, 0x80};
  const auto isZero = [](uint8_t byte) { return byte == 0; };
  return !std::all_of(gid.bytes.begin(), gid.bytes.end(), isZero) &&
         !std::equal(kLinkLocal.begin(), kLinkLocal.end(), gid.bytes.begin());
}

}  // namespace

bool Gid::isIpv4() const {
  return std::equal(kIpv4Prefix.begin(), kIpv4Prefix.end(), bytes.begin());
}

GidRules parseGidRules(const std::string& family, const std::string& range, int roceVersion) {
  GidRules rules;
  rules.ipv6 = family == "AF_INET6";
  rules.roceVersion = roceVersion;
  if (range.empty()) return rules;
  const size_t slash = range.find('/');
  const std::string address = range.substr(0, slash);
  int bits = -1;
  if (slash != std::string::npos) {
    const char* end = range.data() + range.size();
    const auto result = std::from_chars(range.data() + slash + 1, end, bits);
    if (result.ec != std::errc() || result.ptr != end) bits = -1;
  }
  const int width = rules.ipv6 ? kIpv6Bits : kIpv4Bits;
  if (!rules.ipv6) {
    std::copy(kIpv4Prefix.begin(), kIpv4Prefix.end(), rules.network.begin());
  }
  uint8_t* const bytes = rules.network.data() + (rules.ipv6 ? 0 : kIpv4Prefix.size());
  if (bits < 0 || bits > width ||
      ::inet_pton(rules.ipv6 ? AF_INET6 : AF_INET, address.c_str(), bytes) != 1) {
    warnOnce(fmt::format(
        "NCCL_IB_ADDR_RANGE is ignored: \"{}\" is not a range of {} addresses, such "
        "as {}. NCCL_IB_ADDR_FAMILY chooses the family",
        range, rules.ipv6 ? "IPv6" : "IPv4", rules.ipv6 ? "2001:db8::/32" : "192.0.2.0/24"));
    return rules;
  }
  rules.prefixBits = kIpv6Bits - width + bits;
  return rules;
}

size_t chooseGid(std::span<const Gid> table, const GidRules& rules) {
  const auto matches = [&](const Gid& gid) {
    return gid.isIpv4() != rules.ipv6 && isInRange(gid, rules);
  };
  const auto best = std::find_if(table.begin(), table.end(), [&](const Gid& gid) {
    return matches(gid) && isRoutable(gid) && gid.roceVersion == rules.roceVersion;
  });
  if (best != table.end()) return static_cast<size_t>(best - table.begin());
  const auto next = std::find_if(table.begin(), table.end(), matches);
  return next == table.end() ? 0 : static_cast<size_t>(next - table.begin());
}

}  // namespace unisono::transport
