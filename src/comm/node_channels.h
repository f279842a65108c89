// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "comm/agreement.h"
#include "comm/node_machine.h"
#include "topology/join.h"
#include "transport/connector.h"

// From the machine that a rank runs on to its place in the channels of its node.
namespace unisono::comm {

struct NodePlace {
  topology::RankPlace place;   // what this rank tells the others in the all-gather of places
  transport::PeerLinks links;  // of all pairs of ranks of this node
  std::string cpuAffinity;     // cores near this rank's GPU, see cpuAffinityOf; may be empty
  std::string portAffinity;    // the same of its port
  std::vector<int> ports;      // by which the channels of rings leave the node; may be empty
  std::vector<int> headPorts;  // those of channels of which this rank is the head
  std::vector<transport::DirectAccess> direct;  // of the rank's GPU and each port, by number
};

// The search is made once for all ranks of this process that ask for the same machine. Throws as
// nodeMachine does, Error(invalidArgument) for a graph file or a setting that cannot be used, and
// Error(invalidUsage) if the user's settings leave no path between two ranks.
// `ports` as for nodeMachine.
NodePlace findPlace(const std::vector<RankFacts>& ranks, const Hosts& hosts, int rank,
                    const Settings& settings, const Ports& ports = {});

}  // namespace unisono::comm
