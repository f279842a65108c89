// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <vector>

#include "topology/graph.h"

namespace unisono::topology {

// The edges that a tree over the nodes has at one node (TreeLinks: up, down[0], down[1]).
enum class TreeEdge : uint8_t { parent, child0, child1 };

// The place in a node's chain of `count` GPUs of the GPU that serves an edge of the tree.
int treeEdgePlace(Pattern pattern, TreeEdge edge, int count);

bool isTree(Pattern pattern);
// Whether a channel is one GPU that gathers from all others, not a chain.
bool hasHead(Pattern pattern);

// Bandwidth that a channel takes on one path.
struct PathUse {
  enum class Kind : uint8_t { gpuToGpu, gpuToPort, portToGpu, gpuToSwitch, switchToGpu };

  Kind kind = Kind::gpuToGpu;
  int from = -1, to = -1;  // GPUs and ports as the channel numbers them; -1: the NVSwitches
  Bandwidth speed = 0;

  bool isNetwork() const { return kind == Kind::gpuToPort || kind == Kind::portToGpu; }
};

// What channels of one pattern take on which paths. The search, which reserves it move by move, and
// everything that checks, balances or explains channels ask here.
class ChannelTraffic {
 public:
  // `gpus` are all GPUs of the machine, numbered as the channels number theirs. They must outlive
  // this.
  ChannelTraffic(Pattern pattern, Bandwidth speedIntra, Bandwidth speedInter,
                 std::span<const int> gpus)
      : pattern_(pattern), speedIntra_(speedIntra), speedInter_(speedInter), gpus_(gpus) {}

  // From the channel's port to its first GPU.
  PathUse enter(const Channel& channel) const;
  // From the GPU before `place` to the one at it.
  PathUse step(const Channel& channel, int place) const;
  // From the GPU at `place` to the channel's port; the speed is 0 if that GPU sends nothing there.
  PathUse leave(const Channel& channel, int place) const;
  // The last path of a ring that does not leave the machine.
  PathUse close(const Channel& channel) const;
  // Between the head and the NVSwitches or all other GPUs: an NVLS head gathers one share from
  // each GPU and moves the result as well.
  std::vector<PathUse> head(const Channel& channel) const;

  // All of the above that a complete channel has.
  std::vector<PathUse> all(const Channel& channel) const;

 private:
  Bandwidth speedToNetwork(int place) const;

  Pattern pattern_;
  Bandwidth speedIntra_, speedInter_;
  std::span<const int> gpus_;
};

}  // namespace unisono::topology
