// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "topology/checks.h"
#include "topology/paths.h"
#include "topology/topology.h"

namespace unisono::topology {

// A topology with its paths and the settings they follow from: what the search works on.
struct Machine {
  Topology topology;
  PathSettings settings;
  PathTable paths;

  Machine(Topology graph, PathSettings rules)
      : topology(std::move(graph)), settings(std::move(rules)), paths(topology, settings) {}

  const Path& path(int from, int to) const { return paths.path(from, to); }
};

// The machine as one rank of a communicator sees it: the GPUs of the communicator (those with a
// rank) that this rank reaches without the network, and no NICs where that is all `rankCount`
// ranks. `rank` -1 takes the rank of the first GPU; `rankCount` 0 keeps the NICs. Throws
// Error(invalidArgument) if the topology has no such rank.
Machine trimMachine(const Topology& topology, const PathSettings& settings, int rank,
                    int rankCount);

// The most that one path carries to any other GPU (to any NIC, where there are NICs), and the
// most that goes in and out of one GPU: bounds of a channel's speed and of all channels' sum.
struct BandwidthBounds {
  Bandwidth widestPath = 0;
  Bandwidth widestGpu = 0;
};
BandwidthBounds bandwidthBounds(const Machine& machine);

// The cores that a rank's threads should run on: the CPU affinity of its GPU's NUMA node, as the
// file words it (hexadecimal words of 32 cores, the last holds core 0). Empty if unknown.
std::string cpuAffinityOf(const Machine& machine, int rank);
// The same of the port nearest to its GPU, for the thread that moves data through it; of the GPU if
// there is no port.
std::string portAffinityOf(const Machine& machine, int rank);

// The tree of the machine with the bandwidth of every link, as text.
std::string describeTopology(const Machine& machine);
// The path type and bandwidth of every pair of GPUs and of GPUs and NICs, as a table.
std::string describePaths(const Machine& machine);

}  // namespace unisono::topology
