// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "topology/join.h"
#include "topology/search.h"

// What `unisono topo` shows: a machine with its paths and channels, as plain data.
namespace unisono::topo {

// What the user asks for in addition to the machine.
struct ViewSettings {
  int nodes = 1;         // machines like this one in the communicator
  int ranksPerNode = 0;  // the first GPUs of each machine are in it; 0: all
  topology::PathSettings paths;
  topology::SearchSettings search;
  topology::JoinSettings join;
  std::string graphFile, graphText;  // NCCL_GRAPH_FILE and its text; empty: none
};

// GPUs that reach each other without the network: a node of the communicator.
struct Domain {
  topology::Machine machine;  // what the channels run on: without ports if it is all there is
  topology::GraphSet graphs;
};

struct View {
  std::string source;  // file, preset or "this machine"
  int nodes = 1;
  topology::Machine whole;            // everything that the machine has
  std::vector<Domain> domains;        // nearly always one
  topology::Joined joined;            // of all ranks: those of the first machine come first
  std::vector<std::string> notes;     // oddities, and links that a given graph overbooks
  std::vector<std::string> warnings;  // what is probably wrong with the machine, see findWarnings
};

// The view of a communicator that uses every GPU of the machines. Throws Error for a machine that
// has no complete GPU, for a bad graph file and for more ranks than can be joined here.
View makeView(const topology::XmlTopology& file, const ViewSettings& settings);

// A graph of a domain with its name for options and JSON: "ring", "tree", "collnet_chain",
// "collnet_direct", "nvls".
struct NamedChannels {
  std::string_view name;
  topology::GraphId id;
  const topology::ChannelGraph* graph;
  const topology::Topology* topology;  // of the graph's numbers
};
std::vector<NamedChannels> graphsOf(const Domain& domain);

// The node of `view.whole` that is `index` of a domain's topology.
int wholeIndex(const View& view, const topology::Topology& domain, int index);

// Finds the node that a user's text names: "GPU/3", "gpu3" or "3" (a GPU), "NET/0", "mlx5_1", a bus
// id, or any other name that the tree prints. Throws Error(invalidArgument) that lists the names.
int findNode(const topology::Topology& topology, const std::string& text);

// Lists what is probably not as its owner wants it: nodes that no network connects, NET ports that
// no ring uses, a tree with less than half of the ring's bandwidth, GPUs without NVLink among
// others that have it.
std::vector<std::string> findWarnings(const View& view);

// Whether to show the channels of the whole communicator, which are long for many nodes.
enum class JoinedPart : bool { hide, show };

std::string treeText(const View& view, JoinedPart joined);
// The paths among GPUs and NET ports. Nodes with the same paths share a line.
std::string pathsText(const topology::Machine& machine);
std::string whyText(const View& view, const std::string& from, const std::string& to);
std::string jsonText(const View& view, JoinedPart joined);
// Draws the machine with the channels of one graph; `pattern` is a name of graphsOf. Throws
// Error(invalidArgument) for another name, or for a graph without channels.
std::string svgText(const View& view, std::string_view pattern);

// "1 GPU", "2 GPUs"
std::string counted(size_t count, std::string_view what);
// "0-3, 6"
std::string rangesText(const std::vector<int>& numbers);
// Names nodes of one type by their numbers: "GPU/0-3, 6"; with several hosts "GPU/0-17:0-3".
std::string namesText(const topology::Topology& topology, const std::vector<int>& nodes);
// "8 channels x 48 GB/s = 384 GB/s"
std::string totalText(size_t channels, topology::Bandwidth speed);
// The GPUs of a channel in order: "0 1 2 3"; with several hosts "h0: 0 1 2 3 | h1: 0 1 2 3".
std::string orderText(const topology::Topology& topology, const topology::Channel& channel);
// Groups equal channels, as lists of their numbers in the order of the first of each.
std::vector<std::vector<int>> equalChannels(const topology::ChannelGraph& graph);
// Replaces control characters and bytes that are not UTF-8 by escapes such as \x1b, so that names
// from files are safe on a terminal and in XML.
std::string printable(std::string_view text);
// Breaks a line at spaces, preferably before a bar, so that it has at most so many columns. Later
// lines are indented.
std::string wrapped(const std::string& line, size_t indent, size_t columns = 118);

// The GPUs of a channel that receive from and send to the network.
struct NetworkGpus {
  int receives, sends;
};
NetworkGpus networkGpus(topology::Pattern pattern, const topology::Channel& channel);

}  // namespace unisono::topo
