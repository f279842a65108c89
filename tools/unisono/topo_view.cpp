#include "topo_view.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <charconv>

#include "base/error.h"

namespace unisono::topo {

using namespace topology;

View makeView(const XmlTopology& file, int nodes, const PathSettings& settings) {
  for (const GpuDescription& gpu : gpusOf(file))
    if (gpu.sm == 0)
      throw invalidArgument("{}: the GPU {} has no compute capability (sm)", file.source,
                            formatBusId(gpu.busId))
          .remedy("Only NVIDIA's driver knows it; give a complete file with --file.");
  const Topology topology = buildTopology(file);
  const int ranks = static_cast<int>(topology.of(NodeType::gpu).size()) * nodes;
  View view{file.source,
            nodes,
            Machine(topology, settings),
            trimMachine(topology, settings, -1, ranks),
            {}};
  SearchSettings search;
  for (const int net : view.searched.topology.of(NodeType::net))
    search.collnet |= view.searched.topology.node(net).net.collective;
  view.graphs = searchGraphs(view.searched, search);
  return view;
}

std::vector<NamedChannels> graphsOf(const View& view) {
  const GraphSet& graphs = view.graphs;
  return {{"ring", GraphId::ring, &graphs.ring},
          {"tree", GraphId::tree, &graphs.tree},
          {"collnet_chain", GraphId::collnetChain, &graphs.collnetChain},
          {"collnet_direct", GraphId::collnetDirect, &graphs.collnetDirect},
          {"nvls", GraphId::nvls, &graphs.nvls}};
}

int wholeIndex(const View& view, int index) {
  const Topology& from = view.searched.topology;
  const Topology& to = view.whole.topology;
  const Node& node = from.node(index);
  const std::uint64_t host = from.hosts[static_cast<std::size_t>(node.host)];
  for (const int candidate : to.of(node.type)) {
    const Node& other = to.node(candidate);
    if (other.id == node.id && to.hosts[static_cast<std::size_t>(other.host)] == host &&
        other.net.name == node.net.name)
      return candidate;
  }
  throw internalError("the node {} of the search is not in the machine", from.nameOf(index));
}

namespace {

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return result;
}

}  // namespace

int findNode(const Topology& topology, const std::string& text) {
  if (const int exact = topology.find(text); exact >= 0) return exact;
  std::string wanted = lower(text);
  if (!wanted.empty() && std::all_of(wanted.begin(), wanted.end(),
                                     [](unsigned char c) { return std::isdigit(c) != 0; }))
    wanted = "gpu" + wanted;
  const BusId busId = parseBusId(text);
  std::vector<std::string> names;
  for (std::size_t i = 0; i < topology.nodes.size(); ++i) {
    const int index = static_cast<int>(i);
    const Node& node = topology.node(index);
    const std::string name = topology.nameOf(index);
    std::string plain = lower(name);
    const bool same = plain == wanted || (node.type == NodeType::net && node.net.name == text);
    std::erase(plain, '/');
    const bool numbered =
        plain == wanted || (node.type == NodeType::net && plain.starts_with(wanted + "-"));
    const bool addressed = busId != kNoBusId && node.id == busId &&
                           (node.type == NodeType::gpu || node.type == NodeType::pci);
    if (same || numbered || addressed) return index;
    if (node.type != NodeType::pci && node.type != NodeType::nic) names.push_back(name);
  }
  throw invalidArgument("\"{}\" is no part of this machine", text)
      .remedy(fmt::format("There are {}.", fmt::join(names, ", ")));
}

}  // namespace unisono::topo
