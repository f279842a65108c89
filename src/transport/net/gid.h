// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

// Which entry of a RoCE port's table of GIDs, its addresses, a connection uses.
namespace unisono::transport {

struct Gid {
  std::array<uint8_t, 16> bytes{};
  int roceVersion = 0;  // 0: unknown

  bool isIpv4() const;  // "::ffff:192.0.2.1"
};

struct GidRules {
  bool ipv6 = false;
  int roceVersion = 2;
  std::array<uint8_t, 16> network{};  // of the range, as a GID
  int prefixBits = 0;                 // of `network` that must agree; 0: no range
};

// Reads NCCL_IB_ADDR_FAMILY and NCCL_IB_ADDR_RANGE ("192.0.2.0/24"). A range that cannot be
// read is logged and ignored, as in NCCL.
GidRules parseGidRules(const std::string& family, const std::string& range, int roceVersion);

// The first entry of the family, range and RoCE version, unless it is link-local or unset; where
// there is none, the first of the family and range; else the first.
size_t chooseGid(std::span<const Gid> table, const GidRules& rules);

}  // namespace unisono::transport
