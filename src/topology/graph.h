// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "topology/topology.h"

namespace unisono::topology {

// The shapes of channels. The numbers are those of graph files.
enum class Pattern : int {
  balancedTree = 1,  // a chain; the network's traffic is shared between its first two GPUs
  splitTree = 2,     // a chain; the first GPU receives from the network, the second sends
  tree = 3,          // a chain; all network traffic at its first GPU
  ring = 4,
  nvls = 5,           // one GPU gathers what the NVSwitch reduces
  collnetDirect = 6,  // one GPU gathers what all others send it
};
std::string_view nameOf(Pattern pattern);  // "ring"

// One channel. GPUs and ports are given by their numbers in the topology (Topology::nodes).
struct Channel {
  std::vector<int> gpus;  // in order; NVLS: the head; CollNet direct: the head first
  int netIn = -1;         // port it receives from; -1 without network
  int netOut = -1;        // port it sends to

  bool operator==(const Channel&) const = default;
};

// How data flow for one pattern on one machine.
struct ChannelGraph {
  Pattern pattern = Pattern::ring;
  std::vector<Channel> channels;
  Bandwidth speedIntra = 0;            // of one channel inside the machine
  Bandwidth speedInter = 0;            // of one channel to and from the network
  PathType typeIntra = PathType::loc;  // the farthest path used between GPUs
  PathType typeInter = PathType::loc;  // the farthest path used between a GPU and a port
  bool sameChannels = false;           // all channels visit the GPUs in one order
  int crossNic = 0;  // 0: a channel leaves by the port it enters; 1: by any; 2: pairs alternate
  double latencyInterUs = 0;  // of the network

  Bandwidth totalIntra() const { return speedIntra * static_cast<Bandwidth>(channels.size()); }
  Bandwidth totalInter() const { return speedInter * static_cast<Bandwidth>(channels.size()); }
};

// One line per channel: "0: NET/1 > 0 1 2 3 > NET/1", after a line of speeds and types.
std::string describeGraph(const ChannelGraph& graph, const Topology& topology);

}  // namespace unisono::topology
