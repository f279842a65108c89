// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "comm/agreement.h"
#include "topology/join.h"
#include "transport/connector.h"

// From the machine that a rank runs on to its place in the channels of its node.
namespace unisono::comm {

struct NodePlace {
  topology::RankPlace place;   // what this rank tells the others in the all-gather of places
  transport::PeerLinks links;  // of all pairs of ranks of this node
  std::string cpuAffinity;     // cores near this rank's GPU, see cpuAffinityOf; may be empty
};

// The search is made once for all ranks of this process that ask for the same machine. Throws as
// nodeMachine does, Error(invalidArgument) for a graph file or a setting that cannot be used, and
// Error(invalidUsage) if the user's settings leave no path between two ranks.
NodePlace findPlace(const std::vector<RankFacts>& ranks, int rank, const Settings& settings);

}  // namespace unisono::comm
