// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

// The names that a choice, a work item and a kernel table share.
namespace unisono::device {

// Numbered as NCCL_ALGO_* of NCCL's tuner plug-ins, then ours.
enum class Algorithm : uint8_t {
  tree = 0,  // double binary trees
  ring,
  collNetDirect,
  collNetChain,
  nvls,
  nvlsTree,
  pat,
  direct,      // every rank stores what a peer needs into that peer's memory, in one hop
  twoShot,     // all-reduce as a direct reduce-scatter and a direct all-gather in one launch
  directTree,  // all-reduce: direct inside nodes, trees along rails between them
};
inline constexpr int kAlgorithms = 10;
inline constexpr int kNcclAlgorithms = 7;

// As NCCL spells it; empty for a number that is none.
constexpr std::string_view nameOf(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::tree:
      return "Tree";
    case Algorithm::ring:
      return "Ring";
    case Algorithm::collNetDirect:
      return "CollNetDirect";
    case Algorithm::collNetChain:
      return "CollNetChain";
    case Algorithm::nvls:
      return "NVLS";
    case Algorithm::nvlsTree:
      return "NVLSTree";
    case Algorithm::pat:
      return "PAT";
    case Algorithm::direct:
      return "Direct";
    case Algorithm::twoShot:
      return "TwoShot";
    case Algorithm::directTree:
      return "DirectTree";
  }
  return "";
}
static_assert(nameOf(static_cast<Algorithm>(kAlgorithms)).empty(),
              "kAlgorithms is the number of algorithms");

// Numbered as NCCL_PROTO_*.
enum class Protocol : uint8_t { ll = 0, ll128, simple };
inline constexpr int kProtocols = 3;
inline constexpr int kNcclProtocols = 3;

constexpr std::string_view nameOf(Protocol protocol) {
  switch (protocol) {
    case Protocol::ll:
      return "LL";
    case Protocol::ll128:
      return "LL128";
    case Protocol::simple:
      return "Simple";
  }
  return "";
}
static_assert(nameOf(static_cast<Protocol>(kProtocols)).empty(),
              "kProtocols is the number of protocols");

// Every one of these algorithms has a kernel with every one of these protocols.
template <Algorithm... kList>
struct AlgorithmList {};
template <Protocol... kList>
struct ProtocolList {};
using CollectiveAlgorithms = AlgorithmList<Algorithm::tree, Algorithm::ring>;
using CollectiveProtocols = ProtocolList<Protocol::ll, Protocol::ll128, Protocol::simple>;

// Whether collectives that reduce nothing have a kernel of their own. Rings over LL128 gather and
// broadcast faster with pairs of lines, and a kernel that could do both would reduce up to a tenth
// slower (docs/results/2026-11-26-h100x2.md).
constexpr bool hasCopyKernel(Algorithm algorithm, Protocol protocol) {
  return algorithm == Algorithm::ring && protocol == Protocol::ll128;
}

// Calls visit.template operator()<algorithm, protocol, copies>() for each of these kernels.
template <typename Visit>
constexpr void forEachCollectiveKernel(const Visit& visit) {
  auto visitKernels = [&]<Algorithm kAlgorithm, Protocol kProtocol>() {
    visit.template operator()<kAlgorithm, kProtocol, false>();
    if constexpr (hasCopyKernel(kAlgorithm, kProtocol)) {
      visit.template operator()<kAlgorithm, kProtocol, true>();
    }
  };
  auto visitAlgorithm = [&]<Algorithm kAlgorithm, Protocol... kList>(ProtocolList<kList...>) {
    (visitKernels.template operator()<kAlgorithm, kList>(), ...);
  };
  [&]<Algorithm... kList>(AlgorithmList<kList...>) {
    (visitAlgorithm.template operator()<kList>(CollectiveProtocols()), ...);
  }
  (CollectiveAlgorithms());
}

// The algorithm whose code carries another one: a CollNet chain is a tree in which the network is
// the parent of one rank of each node, and rails have trees of their own.
constexpr Algorithm codeOf(Algorithm algorithm) {
  const bool isTree = algorithm == Algorithm::collNetChain || algorithm == Algorithm::directTree;
  return isTree ? Algorithm::tree : algorithm;
}

// Works of one rank alone are run by the kernel of these.
inline constexpr Algorithm kLocalAlgorithm = Algorithm::ring;
inline constexpr Protocol kLocalProtocol = Protocol::simple;

// Whether it needs multicast addresses.
constexpr bool usesMulticast(Algorithm algorithm) {
  return algorithm == Algorithm::nvls || algorithm == Algorithm::nvlsTree;
}
// Whether heads reduce for the ranks of their node (device/multicast.h).
constexpr bool usesHeads(Algorithm algorithm) {
  return usesMulticast(algorithm) || algorithm == Algorithm::collNetDirect;
}

// Thread groups that a block is split into.
constexpr int groupsOf(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::tree:
    case Algorithm::collNetChain:
    case Algorithm::directTree:
      return 2;  // one reduces up while the other broadcasts down
    case Algorithm::collNetDirect:
    case Algorithm::nvls:
    case Algorithm::nvlsTree:
      return 3;  // device/multicast.h
    default:
      return 1;
  }
}

// The threads of a channel's block: workers, and the warps that wait and post for them. A block
// that is split has the latter in each group.
inline constexpr int kWarpThreads = 32;
inline constexpr int kWorkerThreads = 512;
inline constexpr int kServiceThreads = 2 * kWarpThreads;
inline constexpr int kChannelThreads = kWorkerThreads + kServiceThreads;
// Whether a block has warps that only wait and post. Protocols of lines poll for credits seldom and
// release nothing.
constexpr bool hasServiceWarps(Protocol protocol) {
  return protocol == Protocol::simple;
}
constexpr int serviceThreads(Protocol protocol) {
  return hasServiceWarps(protocol) ? kServiceThreads : 0;
}
// At most, of a block for collectives. A multiprocessor has 4 parts with registers of their own: 16
// warps have 128 registers a thread, which protocols of lines need, 18 warps have 96.
constexpr int maxChannelThreads(Protocol protocol) {
  return protocol == Protocol::simple ? kChannelThreads : 16 * kWarpThreads;
}

// The bytes of data in a slot.
constexpr uint32_t payloadOf(Protocol protocol, uint32_t slotBytes) {
  switch (protocol) {
    case Protocol::ll:
      return slotBytes / 2;  // lines of 8 bytes of data and 8 of flag
    case Protocol::ll128:
      return slotBytes / 128 * 120;  // lines of 120 bytes of data and 8 of flag
    case Protocol::simple:
      break;
  }
  return slotBytes;
}
// The bytes of a slot that `payload` bytes of data take.
constexpr uint32_t occupiedBytesOf(Protocol protocol, uint32_t payload) {
  switch (protocol) {
    case Protocol::ll:
      return (payload + 7) / 8 * 16;
    case Protocol::ll128:
      return (payload + 119) / 120 * 128;
    case Protocol::simple:
      break;
  }
  return payload;
}

}  // namespace unisono::device
