// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

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
  direct,   // every rank stores what a peer needs into that peer's memory, in one hop
  twoShot,  // all-reduce as a direct reduce-scatter and a direct all-gather in one launch
};
inline constexpr int kAlgorithms = 9;
inline constexpr int kNcclAlgorithms = 7;

// Numbered as NCCL_PROTO_*.
enum class Protocol : uint8_t { ll = 0, ll128, simple };
inline constexpr int kProtocols = 3;

// What the kernel for collectives has: every one of these algorithms with every one of these
// protocols.
template <Algorithm... kList>
struct AlgorithmList {};
template <Protocol... kList>
struct ProtocolList {};
using CollectiveAlgorithms = AlgorithmList<Algorithm::ring>;
using CollectiveProtocols = ProtocolList<Protocol::simple>;

}  // namespace unisono::device
