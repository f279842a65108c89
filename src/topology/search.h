// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "topology/graph.h"
#include "topology/graph_xml.h"
#include "topology/machine.h"

namespace unisono::topology {

// Bounds and switches of the search. The names in comments are NCCL's variables.
struct SearchSettings {
  int crossNic = 2;          // NCCL_CROSS_NIC: 0 never, 1 always, 2 where it gives more
  int maxRingChannels = 32;  // before channels are doubled for the sake of more blocks
  int maxChannels = 64;
  bool collnet = false;  // the network reduces, and the user wants it
  bool nvls = true;      // NVLink multicast is there, and the user wants it
  // Graphs that the user gives (NCCL_GRAPH_FILE); those with channels are taken as they are.
  std::vector<NamedGraph> given;
  // Moves that the search may make: in one try, in one where all channels are alike, at one speed.
  // 0 takes 8192, 1024 and 16 tries, and more where one pass through all channels and GPUs needs
  // it.
  long long triesSteps = 0;
  long long sameChannelsSteps = 0;
  long long speedSteps = 0;
};

// What is wanted of one graph.
struct GraphRequest {
  Pattern pattern = Pattern::ring;
  int minChannels = 1;
  int maxChannels = 32;
  bool collnet = false;
};

// Finds channels for one pattern: as many as possible at the highest speed. Tries speeds from high
// to low and, at each, from strict to lax: all channels alike, then not; a plainer tree (from
// Hopper on); a farther path between GPUs; a farther path to ports; leaving by another port. Then
// copies the channels where that helps, and raises speeds again. Each speed has
// a budget of moves. A ring or a tree always comes out, at worst one plain chain at 0.001
// GB/s; NVLS and CollNet come out empty where the machine cannot.
ChannelGraph searchGraph(const Machine& machine, const GraphRequest& request,
                         const SearchSettings& settings);

// The graphs of a machine, searched or given. A tree that is searched has as many channels as the
// ring.
struct GraphSet {
  ChannelGraph ring, tree, collnetChain, collnetDirect, nvls;
};
GraphSet searchGraphs(const Machine& machine, const SearchSettings& settings);

}  // namespace unisono::topology
