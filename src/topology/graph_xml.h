// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "topology/graph.h"
#include "topology/xml_tree.h"

// Graph files in NCCL's format (NCCL_GRAPH_FILE, NCCL_GRAPH_DUMP_FILE).
namespace unisono::topology {

// The numbers that graph files give to graphs.
enum class GraphId : int { ring = 0, tree = 1, collnetChain = 2, nvls = 3, collnetDirect = 4 };

struct NamedGraph {
  GraphId id = GraphId::ring;
  ChannelGraph graph;
};

struct GraphSet;
// All graphs of a machine with their numbers, in the order of NCCL's dumps.
std::vector<NamedGraph> namedGraphs(const GraphSet& graphs);

// GPUs and ports are written as their dev, hexadecimal with 0x as NCCL does since 2.27; on several
// hosts the host's number stands in the eight bits above 56.
std::string writeGraphs(const std::vector<NamedGraph>& graphs, const Topology& topology);

// Reads graphs for a machine; ports are passed over where it has none left. Numbers without 0x are
// decimal, or hexadecimal where the file has one with a letter. Throws Error(invalidArgument)
// "SOURCE:LINE: cause" for a file that is not a graph file, names GPUs or ports that the topology
// lacks, visits a GPU twice or not at all, gives another number of channels than it has, a pattern
// that is not of the graph's number, or channels without speed. What the links carry is not looked
// at
// (`validate` does that).
std::vector<NamedGraph> parseGraphs(std::string_view text, std::string_view source,
                                    const Topology& topology, const XmlLimits& limits = {});

}  // namespace unisono::topology
