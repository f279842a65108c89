// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "tuning/names.h"

// What the user allows through NCCL_ALGO and NCCL_PROTO. Pure.
namespace unisono::tuning {

// Plain data without padding: ranks exchange it.
struct Allowed {
  struct Lists {
    uint16_t algorithms = (1 << device::kAlgorithms) - 1;  // bit: device::Algorithm
    uint8_t protocols = (1 << device::kProtocols) - 1;     // bit: device::Protocol
    uint8_t forced = 0;                                    // protocols that a list names
    bool operator==(const Lists&) const = default;
  };
  std::array<Lists, kCollectives> of;  // by device::Operation

  bool operator==(const Allowed&) const = default;
  bool allows(Operation operation, Algorithm algorithm) const {
    return (lists(operation).algorithms >> static_cast<int>(algorithm) & 1) != 0;
  }
  bool allows(Operation operation, Protocol protocol) const {
    return (lists(operation).protocols >> static_cast<int>(protocol) & 1) != 0;
  }
  // Whether the user asked for the protocol by its name, which overrules the library's caution.
  bool forces(Operation operation, Protocol protocol) const {
    return (lists(operation).forced >> static_cast<int>(protocol) & 1) != 0;
  }
  const Lists& lists(Operation operation) const { return of[static_cast<size_t>(operation)]; }
};

// Parses NCCL_ALGO and NCCL_PROTO, where empty allows all. The syntax is that of NCCL 2.28: names
// of any case, separated by commas, which a leading ^ excludes. "allreduce:" in front of a list
// makes it the list of that operation alone, in place of the one for all operations. Semicolons
// separate lists, of which only the first may lack the operation. Empty names and lists are
// skipped. In addition to NCCL's algorithms there are ours. Unlike in NCCL, a list that excludes
// others does not force LL128 where its lines may be split. Anything else throws
// Error(invalidUsage) that lists what is accepted.
Allowed parseAllowed(std::string_view algorithms, std::string_view protocols);

// What both allow.
Allowed intersect(const Allowed& a, const Allowed& b);

}  // namespace unisono::tuning
