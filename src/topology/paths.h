// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "topology/topology.h"

namespace unisono::topology {

// Facts about a rank that are not in the topology file. Ranks without facts share one
// /dev/shm per host, and one NVLink fabric if the file shows NVLink between their hosts.
struct RankInfo {
  uint64_t shmDevice = 0;  // device number of /dev/shm; equal numbers on a host share memory
  uint64_t fabric = 0;     // NVLink fabric (cluster and clique) the GPU belongs to; 0: none

  bool operator==(const RankInfo&) const = default;
};

// What the user may set about paths. The names in comments are NCCL's variables.
struct PathSettings {
  bool p2pDisable = false;           // NCCL_P2P_DISABLE
  std::optional<PathType> p2pLevel;  // NCCL_P2P_LEVEL
  std::optional<bool> p2pRead;       // NCCL_P2P_READ_ENABLE
  bool shmDisable = false;           // NCCL_SHM_DISABLE
  std::optional<PathType> gdrLevel;  // NCCL_NET_GDR_LEVEL
  std::optional<bool> gdrRead;       // NCCL_NET_GDR_READ
  bool gdrC2c = true;                // NCCL_NET_GDR_C2C
  bool forceFlush = false;           // NCCL_NET_FORCE_FLUSH
  bool pxnDisable = false;           // NCCL_PXN_DISABLE
  bool pxnC2c = true;                // NCCL_PXN_C2C
  int p2pPxnLevel = 2;               // NCCL_P2P_PXN_LEVEL
  bool nvbDisable = false;           // NCCL_NVB_DISABLE
  bool multiNodeNvlink = true;       // NCCL_MNNVL_ENABLE
  std::map<int, RankInfo> ranks;     // by rank
  // Pairs of ranks (lower first) between which the driver (NVML) refuses P2P.
  std::set<std::pair<int, int>> p2pRefused;
  bool reportP2pRefused = true;  // NCCL_IGNORE_DISABLED_P2P=0

  bool operator==(const PathSettings&) const = default;
};

// The best path from one node to another.
struct Path {
  PathType type = PathType::dis;
  Bandwidth bandwidth = 0;
  int hops = 0;
  int via = -1;  // node that the path was sent through against the shortest way; -1: none
};

// One hop of a path: link `link` of node `node`.
struct Hop {
  int node = -1;
  int link = -1;
};

// The paths between all GPUs, NETs, CPUs and NVSwitches of a topology.
class PathTable {
 public:
  // Breadth-first from every node: fewest hops, and of equally many the most bandwidth. Passes
  // through a GPU only between two GPUs of one NVLink each. Then the rules: GPUs that may not
  // talk directly go through their CPU (or are NET apart where they share no memory), a GPU
  // reaches a far NIC through a GPU close to it (PXN), and a NIC that may not read GPU memory is
  // reached through the CPU.
  PathTable(const Topology& topology, const PathSettings& settings);

  // Both nodes are GPUs, NETs, CPUs or NVSwitches.
  const Path& path(int from, int to) const { return final_[finalIndex(from, to)]; }
  // Before the rules: what the wires alone give. `to` is a GPU, NET, CPU or NVSwitch.
  Path wirePath(int from, int to) const {
    const Wire& wire = wires_[wireIndex(from, to)];
    return {wire.type, wire.bandwidth, wire.hops, -1};
  }
  // The links of path(from, to), in order.
  std::vector<Hop> hops(int from, int to) const;

  // The NETs nearest to a GPU, or the GPUs nearest to a NET, by the wires and in node order: those
  // with the most bandwidth, and of these those with the best type.
  const std::vector<int>& nearest(int node) const { return near_[static_cast<size_t>(node)]; }

 private:
  struct Wire {
    Bandwidth bandwidth = 0;
    int nextLink = -1;  // link of the node that leads on towards the base
    int nextNode = -1;  // where that link leads
    int16_t hops = 0;
    PathType type = PathType::dis;
    bool chipLink = false;  // passes a chip-to-chip link
  };
  // For each link of each node, the place of the opposite link in the node that it leads to.
  using OppositeLinks = std::vector<std::vector<int>>;

  size_t base(int node) const {
    return static_cast<size_t>(baseNumber_[static_cast<size_t>(node)]);
  }
  size_t wireIndex(int from, int to) const { return base(to) * nodes_ + static_cast<size_t>(from); }
  size_t finalIndex(int from, int to) const { return base(to) * bases_ + base(from); }
  void spread(const Topology& topology, const PathSettings& settings, const OppositeLinks& opposite,
              int base);
  void findNearest(const Topology& topology);
  void divert(const Topology& topology, int from, int via, int to);
  void applyPeerRules(const Topology& topology, const PathSettings& settings);
  void applyNetRules(const Topology& topology, const PathSettings& settings);
  void appendWire(int from, int to, std::vector<Hop>& hops) const;

  size_t nodes_, bases_ = 0;
  std::vector<int> baseNumber_;  // by node: its number among those that paths lead to, or -1
  std::vector<Wire> wires_;      // [base][node]: from node to base
  std::vector<Path> final_;      // [base][base]
  std::vector<std::vector<int>> near_;
};

// The CPU nearest to a node; the first of equals; -1 if none can be reached.
int localCpu(const Topology& topology, const PathTable& paths, int node);
// How near a NET is to the GPU nearest to it, there and back.
PathType distanceToGpus(const Topology& topology, const PathTable& paths, int net);

}  // namespace unisono::topology
