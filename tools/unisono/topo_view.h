#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "topology/search.h"

// What `unisono topo` shows: a machine with its paths and channels, as plain data.
namespace unisono::topo {

struct View {
  std::string source;          // file, preset or "this machine"
  int nodes = 1;               // machines like this one in the communicator
  topology::Machine whole;     // everything that the machine has
  topology::Machine searched;  // what the channels run on: on one node without its ports
  topology::GraphSet graphs;   // numbers of `searched`
};

// The view of a communicator that uses every GPU of `nodes` machines. Throws Error for a machine
// that has no complete GPU.
View makeView(const topology::XmlTopology& file, int nodes, const topology::PathSettings& settings);

// A graph with its name for options and JSON: "ring", "tree", "collnet_chain", "collnet_direct",
// "nvls".
struct NamedChannels {
  std::string_view name;
  topology::GraphId id;
  const topology::ChannelGraph* graph;
};
std::vector<NamedChannels> graphsOf(const View& view);

// The node of `view.whole` that is `index` of `view.searched`.
int wholeIndex(const View& view, int index);

// The node that a user's text names: "GPU/3", "gpu3" or "3" (a GPU), "NET/0", "mlx5_1", a bus id,
// "NUMA/0" or any name that the tree prints. Throws Error(invalidArgument) that lists the names.
int findNode(const topology::Topology& topology, const std::string& text);

std::string treeText(const View& view);
std::string whyText(const View& view, const std::string& from, const std::string& to);
std::string jsonText(const View& view);
// A picture of the machine with the channels of one graph; `pattern` is a name of graphsOf. Throws
// Error(invalidArgument) for another name, or for a graph without channels.
std::string svgText(const View& view, std::string_view pattern);

}  // namespace unisono::topo
