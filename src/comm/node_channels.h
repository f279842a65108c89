#pragma once

#include <string>
#include <vector>

#include "comm/agreement.h"
#include "topology/join.h"
#include "topology/xml.h"

// From the machine that a rank runs on to its place in the channels of its node.
namespace unisono::comm {

// A GPU of this node that the communicator uses.
struct NodeDevice {
  topology::BusId busId;
  int computeCapability;
  bool reachesPeers;  // all others of the communicator directly
  std::vector<int> ranks;
};

// The GPUs of the node of `rank`, by bus id.
std::vector<NodeDevice> devicesOfNode(const std::vector<RankFacts>& ranks, int rank);

// The machine that `devices` are in: the file of UNISONO_HOST_TOPOLOGY, else GPUs with NVLink to
// NVSwitches (PCI alone if they do not reach each other), merged into the file of NCCL_TOPO_FILE.
// Throws Error(invalidArgument) for files that cannot be read, Error(invalidUsage) for a device
// that the file lacks.
topology::XmlTopology nodeTopology(const Settings& settings,
                                   const std::vector<NodeDevice>& devices);

// What `rank` tells the others in the all-gather of places. The search is made once for all ranks
// of this process that ask for the same machine. Throws as nodeTopology does, and
// Error(invalidArgument) for a graph file or a setting that cannot be used.
topology::RankPlace findPlace(const std::vector<RankFacts>& ranks, int rank,
                              const Settings& settings);

}  // namespace unisono::comm
