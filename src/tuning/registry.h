// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

#include "tuning/names.h"

// What the library can run, and why it cannot run the rest. An algorithm or a protocol that is
// implemented is entered in registry.cpp.
namespace unisono::tuning {

// Why an algorithm does not carry a call with a protocol.
enum class Exclusion : uint8_t {
  none,
  operation,       // the algorithm does not do this operation
  protocol,        // the algorithm does not use this protocol
  notImplemented,  // the library does not have it yet
  onlyForced,      // the library has it, but does not choose it
  oneRank,         // there is nothing to transfer
  oneNode,         // it joins nodes, and there is one
  severalNodes,    // it works inside one node
  ranksPerNode,    // PAT: not one rank per node
  unequalNodes,    // its rails need the same number of ranks on each node, and two
  patDisabled,
  noMulticast,
  noCollnet,
  networkOperation,  // the network does not do it, or not with this type and operator
  noSwitch,          // CollNet direct needs NVSwitches
  tooManyRanks,      // on a node
  noChannels,        // the search found none
  unreachable,       // some ranks cannot map each other's memory
  farPorts,          // LL128: adapters cannot reach memory of the GPU
  splitLines,        // LL128: stores of 128 bytes may arrive in pieces
  tooLarge,          // for its buffers
  type,              // multicast does not reduce this type
  reduction,         // nor this operator
  order,             // UNISONO_DETERMINISTIC: it reduces in orders of its own
  notMeasured,       // this machine has no estimate
  tuner,             // the tuner plug-in ruled it out
};
std::string_view reasonOf(Exclusion exclusion);

// Which combinations there is code for.
struct Registry {
  using Table = bool[kCollectives][device::kAlgorithms][device::kProtocols];
  Table implemented = {};
  // Carries calls where nothing in `implemented` is allowed, or where its times were measured.
  Table onlyForced = {};
  bool formulasOnly = false;  // of the cost model, without what was measured for this library

  bool has(Operation operation, Algorithm algorithm, Protocol protocol) const {
    return implemented[static_cast<int>(operation)][static_cast<int>(algorithm)]
                      [static_cast<int>(protocol)];
  }
  bool hasForced(Operation operation, Algorithm algorithm, Protocol protocol) const {
    return onlyForced[static_cast<int>(operation)][static_cast<int>(algorithm)]
                     [static_cast<int>(protocol)];
  }
};
// What this library runs now.
const Registry& libraryRegistry();
// All that NCCL has, to see what its formulas would choose.
const Registry& ncclRegistry();

// Says whether an algorithm can do an operation with a protocol at all: `operation`, `protocol` or
// `none`.
Exclusion definitionOf(Operation operation, Algorithm algorithm, Protocol protocol);

}  // namespace unisono::tuning
