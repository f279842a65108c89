// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "topology/channel_traffic.h"
#include "topology/search.h"

// From the channels of every node to those of a communicator. Pure, and the same on every rank.
namespace unisono::topology {

inline constexpr int kMostChannels = 64;
// Of one rank, for messages; and those to which messages of other ranks are aligned.
inline constexpr int kMostMessagePorts = 8, kMostAlignedPorts = 64;

// A graph but for its channels. Plain data; the meaning is that of ChannelGraph.
struct GraphFacts {
  int32_t pattern, channels, typeIntra, typeInter, sameChannels, crossNic;
  Bandwidth speedIntra, speedInter;
  int64_t latencyInterNs = 0;

  bool operator==(const GraphFacts&) const = default;
};

// What the cost model needs to know of a machine besides its graphs. Plain data.
struct MachineFacts {
  static constexpr int32_t kMixed = -1;  // machines that differ

  int32_t cpuArchitecture = 0, cpuVendor = 0;  // CpuArchitecture and CpuVendor, or kMixed
  int32_t lowestSm = 0, highestSm = 0;         // of the GPUs of the communicator
  int32_t switches = 0;                        // 1: there are NVSwitches
  int32_t unused = 0;

  bool operator==(const MachineFacts&) const = default;
};
MachineFacts machineFactsOf(const Topology& topology);

// What a rank tells all others of itself and its node. Plain data of fixed size. A rank tells only
// its own place in the channels; the ranks of a node together tell the channels.
struct RankPlace {
  uint64_t node;  // equal on the ranks that reach each other without the network
  GraphFacts ring, tree, collnetChain, collnetDirect, nvls;
  MachineFacts machine;
  // By channel: how many ranks of the node come before this one.
  std::array<uint16_t, kMostChannels> ringPosition, treePosition, collnetPosition;
  uint64_t collnetHeadOf, nvlsHeadOf;  // bit c: the head of channel c
  // By channel: the rank of the node through which this one sends to others (PXN), plus 1; 0: none.
  std::array<int32_t, kMostChannels> forwarders;
  // Of messages between hosts: the numbers of the rank's own ports plus 1, which its channels take
  // in turn; 0 after the last one.
  std::array<int32_t, kMostMessagePorts> messagePorts;
  // By the number of the receiver's port: the rank of the node, plus 1, that sends through the port
  // of the same number on this host; 0: the rank sends through its own ports.
  std::array<int32_t, kMostAlignedPorts> messageForwarders;
};

// The place of a rank in the graphs of its node. `ranksOf` lists for each node of the topology that
// the graphs are of the ranks that use it, in order: none for other nodes than GPUs, several where
// ranks share a GPU (they follow each other, and the first is the head where the GPU is one).
// Leaves RankPlace::machine to the caller.
RankPlace placeOf(const GraphSet& graphs, const std::vector<std::vector<int>>& ranksOf, int rank,
                  uint64_t node);

struct JoinSettings {
  int minChannels = 1;
  int maxChannels = kMostChannels;
};

// Neighbours of a rank in a tree: the two that the network leads to, and the next of the chain.
struct TreePlace {
  int up = -1;
  std::vector<int> down;  // at most three
};

// The place of member `index` in one of two trees (0 or 1) over `members`, which are ranks
// (topology/double_tree.h).
TreePlace doubleTreePlace(const std::vector<int>& members, int index, int tree);

// The channels of a communicator. Nodes are in the order of their first rank, in all channels.
class Joined {
 public:
  int ranks() const { return static_cast<int>(nodeOf_.size()); }
  int nodes() const { return static_cast<int>(start_.size()) - 1; }
  int channels() const { return channels_; }
  int nodeOf(int rank) const { return nodeOf_[static_cast<size_t>(rank)]; }

  // The channel of the nodes' graphs that a channel was made of, on a node.
  int sourceOf(int channel, int node) const;

  // All ranks in the order of a channel's ring.
  const std::vector<int>& ringOrder(int channel) const;
  int ringNext(int channel, int rank) const;
  int ringPrevious(int channel, int rank) const;

  // Channels alternate between two trees over the nodes, see doubleTree.
  int treeOf(int channel) const;
  // All ranks, node by node in the order of each node's chain, and the shape that a node gives it.
  const std::vector<int>& treeOrder(int channel) const {
    return trees_[static_cast<size_t>(channel) % trees_.size()];
  }
  Pattern treePattern(int node) const { return treePattern_[static_cast<size_t>(node)]; }
  TreePlace treePlace(int channel, int rank) const;

  // CollNet, where every node can: the chain of each channel inside a node starts at its head.
  int collnetChannels() const { return static_cast<int>(collnet_.size()); }
  std::span<const int> collnetChain(int channel, int node) const;
  // Heads of CollNet direct and NVLS by [head][node], as many as the node with the fewest has.
  const std::vector<std::vector<int>>& collnetHeads() const { return collnetHeads_; }
  const std::vector<std::vector<int>>& nvlsHeads() const { return nvlsHeads_; }
  // The place of a head in the tree (0 or 1) of all nodes' heads of its number; nothing for a rank
  // that is not that head of its node.
  TreePlace nvlsTreePlace(int head, int tree, int rank) const;

  // The graphs as the weakest node has them: fewest channels, lowest speeds, farthest types.
  const GraphFacts& ring() const { return ring_; }
  const GraphFacts& tree() const { return tree_; }
  const GraphFacts& collnetDirect() const { return collnetDirect_; }
  const GraphFacts& collnetChain() const { return collnetGraph_; }
  const GraphFacts& nvls() const { return nvls_; }
  // Of all nodes together: the widest range of GPUs, switches where all nodes have them.
  const MachineFacts& machine() const { return machine_; }
  int ranksOf(int node) const {
    return start_[static_cast<size_t>(node) + 1] - start_[static_cast<size_t>(node)];
  }

 private:
  friend class Joiner;

  std::span<const int> slice(const std::vector<int>& order, int node) const;
  int neighbour(int channel, int rank, int step) const;
  int edgeRank(int channel, int node, TreeEdge edge) const;

  int channels_ = 0;
  bool alternate_ = false;            // rings come in pairs that change over from node to node
  std::vector<int> nodeOf_;           // by rank
  std::vector<int> start_;            // node k holds places start_[k] to start_[k+1] of each order
  std::vector<Pattern> treePattern_;  // by node
  std::vector<std::vector<int>> rings_, trees_, collnet_;  // by source channel
  std::vector<std::vector<int>> collnetHeads_, nvlsHeads_;
  GraphFacts ring_{}, tree_{}, collnetGraph_{}, collnetDirect_{}, nvls_{};
  MachineFacts machine_;
};

// Joins the nodes. Rings enter and leave a node once. Channels are doubled, so that both trees are
// used and more blocks are busy; twice where several nodes have few and fast ones; then bounded by
// the settings, the most winning. Time and memory grow with the number of ranks. Throws
// Error(invalidUsage) that names two ranks where ranks of one node found different channels.
Joined join(std::span<const RankPlace> places, const JoinSettings& settings);

// Hashes of the decisions, one for each field, to find ranks that decided differently.
struct JoinedHash {
  uint64_t nodes, graphs, channels, rings, trees, collnet, nvls;
};
JoinedHash hashOf(const Joined& joined);
// The name of the first field that differs; empty if none does.
std::string_view firstDifference(const JoinedHash& a, const JoinedHash& b);

}  // namespace unisono::topology
