// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "topology/channel_traffic.h"
#include "topology/graph.h"
#include "topology/machine.h"

namespace unisono::topology {

// A path as the search uses it: the links it loads, as positions in one array of free bandwidths.
struct Route {
  struct Load {
    int link = -1;     // directed link
    int reverse = -1;  // its other direction, where traffic there is slowed down too; or -1
    uint8_t reverseEighths = 0;
    bool pci = false;
  };

  PathType type = PathType::dis;
  Bandwidth bandwidth = 0;
  int hops = 0;
  bool intelPeer = false;  // two GPUs talk through an Intel CPU: PCI links carry less
  std::vector<Load> loads;
};

// What is still free on every directed link.
class LinkBudget {
 public:
  LinkBudget() = default;
  explicit LinkBudget(std::vector<Bandwidth> links) : links_(std::move(links)) {}

  // Takes `speed` from all links of a route, or from none if one has too little.
  bool take(const Route& route, Bandwidth speed);
  void giveBack(const Route& route, Bandwidth speed);

 private:
  size_t load(const Route& route, Bandwidth speed, size_t count);

  std::vector<Bandwidth> links_;
};

// What the search reads of a machine, prepared once: GPUs and ports by position (their place
// among the nodes of their type), routes between them, and orders of preference.
class SearchSpace {
 public:
  explicit SearchSpace(const Machine& machine);

  const Machine& machine() const { return machine_; }
  int gpuCount() const { return gpus_; }
  int netCount() const { return nets_; }
  bool hasSwitch() const { return hasSwitch_; }
  int lowestSm() const { return lowestSm_; }
  // The positions of all GPUs.
  const std::vector<int>& gpus() const { return gpuPositions_; }
  int gpuNode(int gpu) const { return gpuNodes_[static_cast<size_t>(gpu)]; }
  int netNode(int net) const { return netNodes_[static_cast<size_t>(net)]; }
  const NetInfo& net(int net) const { return machine_.topology.node(netNode(net)).net; }

  const Route& gpuToGpu(int from, int to) const { return between_[at(from, to, gpus_)]; }
  const Route& gpuToNet(int gpu, int net) const { return toNet_[at(gpu, net, nets_)]; }
  const Route& netToGpu(int net, int gpu) const { return fromNet_[at(gpu, net, nets_)]; }
  const Route& gpuToSwitch(int gpu) const { return toSwitch_[static_cast<size_t>(gpu)]; }
  const Route& switchToGpu(int gpu) const { return fromSwitch_[static_cast<size_t>(gpu)]; }
  // The path that a channel uses, and the opposite one.
  const Route& routeOf(const PathUse& use) const;
  const Route& oppositeOf(const PathUse& use) const;

  // What each directed link carries, by link number.
  const std::vector<Bandwidth>& linkBandwidth() const { return linkBandwidth_; }
  // Ports of one adapter port (several NETs may share it) draw on one bandwidth.
  int portOf(int net) const { return ports_[static_cast<size_t>(net)]; }
  const std::vector<Bandwidth>& portBandwidth() const { return portBandwidth_; }

  // What all links together carry out of a GPU that lead to other GPUs by paths up to `limit`.
  Bandwidth outOf(int gpu, PathType limit) const;

  // GPUs nearest to a port.
  const std::vector<int>& localGpus(int net) const { return localGpus_[static_cast<size_t>(net)]; }
  // Ports worth trying with paths up to `limit`: of one GPU, or of all (gpu -1). The nearest come
  // first, starting at the GPU's own share of them.
  std::vector<int> netsFor(int gpu, PathType limit) const;

  // The GPUs to try after `gpu`, best first: with `towardsNet` > 0 those nearest to port `net`
  // first, < 0 the farthest first, 0 only by the path between the GPUs. Below an NVSwitch only
  // neighbours in order are returned, `previousToo` on both sides.
  enum class Neighbours { next, nextThenPrevious, previousThenNext };
  std::vector<int> nextGpus(int gpu, int net, int towardsNet, Neighbours neighbours) const;

 private:
  static size_t at(int row, int column, int columns) {
    return static_cast<size_t>(row) * static_cast<size_t>(columns) + static_cast<size_t>(column);
  }
  Route makeRoute(int from, int to) const;

  const Machine& machine_;
  int gpus_ = 0, nets_ = 0;
  bool hasSwitch_ = false;
  int lowestSm_ = 0;
  std::vector<int> gpuPositions_, gpuNodes_, netNodes_;
  std::vector<int> firstLink_;  // number of each node's first link
  std::vector<Bandwidth> linkBandwidth_;
  std::vector<Route> between_, toNet_, fromNet_, toSwitch_, fromSwitch_;
  std::vector<int> ports_;
  std::vector<Bandwidth> portBandwidth_, pciOut_;
  std::vector<std::vector<int>> localGpus_, localNets_;
};

}  // namespace unisono::topology
