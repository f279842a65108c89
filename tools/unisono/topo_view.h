#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "topology/join.h"
#include "topology/search.h"

// What `unisono topo` shows: a machine with its paths and channels, as plain data.
namespace unisono::topo {

// What is asked, beside the machine.
struct ViewSettings {
  int nodes = 1;  // machines like this one in the communicator
  topology::PathSettings paths;
  topology::SearchSettings search;
  topology::JoinSettings join;
  std::string graphFile, graphText;  // NCCL_GRAPH_FILE and what it holds; empty: none
};

// GPUs that reach each other without the network: a node of the communicator.
struct Domain {
  topology::Machine machine;  // what the channels run on: without ports if it is all there is
  topology::GraphSet graphs;
};

struct View {
  std::string source;  // file, preset or "this machine"
  int nodes = 1;
  topology::Machine whole;         // everything that the machine has
  std::vector<Domain> domains;     // nearly always one
  topology::Joined joined;         // of all ranks: those of the first machine come first
  std::vector<std::string> notes;  // oddities, and why a given graph promises too much
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

// The node that a user's text names: "GPU/3", "gpu3" or "3" (a GPU), "NET/0", "mlx5_1", a bus id,
// or any other name that the tree prints. Throws Error(invalidArgument) that lists the names.
int findNode(const topology::Topology& topology, const std::string& text);

std::string treeText(const View& view);
std::string whyText(const View& view, const std::string& from, const std::string& to);
std::string jsonText(const View& view);
// A picture of the machine with the channels of one graph; `pattern` is a name of graphsOf. Throws
// Error(invalidArgument) for another name, or for a graph without channels.
std::string svgText(const View& view, std::string_view pattern);

// "1 GPU", "2 GPUs"
std::string counted(std::size_t count, std::string_view what);

}  // namespace unisono::topo
