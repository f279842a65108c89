// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "topology/graph.h"
#include "topology/machine.h"

namespace unisono::topology {

// Every property of a channel graph that does not hold on a machine, one sentence each; none for a
// valid graph. Independent of the search: it recomputes the paths.
//   - a ring or tree visits every GPU once; heads of NVLS and CollNet direct are different GPUs;
//   - channels use the network where there is one, and leave by the port they may leave by;
//   - no path is farther than the graph claims;
//   - no link and no port carries more than it can at the claimed speeds. A chain (all trees)
//     counts in its own direction: what flows against it is counted by the other half of the
//     speed, as in NCCL's figures;
//   - no channel shares its port while a port as fast and as near serves two less and could take
//     it with a third of all links to spare (rings and trees that leave by the port they enter);
//   - channels are alike if the graph says so.
std::vector<std::string> validate(const ChannelGraph& graph, const Machine& machine);

}  // namespace unisono::topology
