#include <fmt/format.h>
#include <fmt/ranges.h>

#include "topo_view.h"

// The texts of `unisono topo`.
namespace unisono::topo {

using namespace topology;

namespace {

// "0-3, 6"
std::string rangesText(const std::vector<int>& numbers) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin < numbers.size();) {
    std::size_t end = begin + 1;
    while (end < numbers.size() && numbers[end] == numbers[end - 1] + 1) ++end;
    parts.push_back(end - begin > 1 ? fmt::format("{}-{}", numbers[begin], numbers[end - 1])
                                    : fmt::format("{}", numbers[begin]));
    begin = end;
  }
  return fmt::format("{}", fmt::join(parts, ", "));
}

// Which ports are nearest to a GPU, and whether `net` is one of them.
std::string choiceOfPort(const View& view, int gpu, int net) {
  const Machine& machine = view.whole;
  const std::vector<int> near = nearest(machine.topology, machine.paths, gpu, NodeType::net);
  std::vector<std::string> names;
  bool chosen = false;
  for (const int port : near) {
    names.push_back(machine.topology.nameOf(port));
    chosen |= port == net;
  }
  if (near.empty()) return "nearest ports: none can be reached\n";
  const Path& best = machine.paths.wirePath(gpu, near.front());
  std::string text =
      fmt::format("nearest ports of {}: {} ({}, {:g} GB/s)\n", machine.topology.nameOf(gpu),
                  fmt::join(names, ", "), nameOf(best.type), toGigabytes(best.bandwidth));
  const Path& own = machine.paths.wirePath(gpu, net);
  if (!chosen)
    text += fmt::format("{} is not among them: {}, {:g} GB/s\n", machine.topology.nameOf(net),
                        nameOf(own.type), toGigabytes(own.bandwidth));
  return text;
}

// The channels that enter or leave the machine at this GPU through this port.
std::string usesOfPort(const View& view, int gpu, int net) {
  if (view.searched.topology.of(NodeType::net).empty())
    return "channels: on one node none uses a port; --nodes 2 shows those between nodes\n";
  std::string text;
  for (const NamedChannels& named : graphsOf(view)) {
    std::vector<int> enter, leave;
    for (std::size_t i = 0; i < named.graph->channels.size(); ++i) {
      const Channel& channel = named.graph->channels[i];
      const auto is = [&](int node, int whole) {
        return node >= 0 && wholeIndex(view, node) == whole;
      };
      if (channel.gpus.empty()) continue;
      const int first = channel.gpus.front();
      // Of a chain and of a head all network traffic is at the first GPU, or the first two.
      const Pattern pattern = named.graph->pattern;
      int last = first;
      if (pattern == Pattern::ring) last = channel.gpus.back();
      if ((pattern == Pattern::splitTree || pattern == Pattern::balancedTree) &&
          channel.gpus.size() > 1)
        last = channel.gpus[1];
      if (is(channel.netIn, net) && is(first, gpu)) enter.push_back(static_cast<int>(i));
      if (is(channel.netOut, net) && is(last, gpu)) leave.push_back(static_cast<int>(i));
    }
    if (!enter.empty())
      text += fmt::format("{} channels that enter here: {}\n", named.name, rangesText(enter));
    if (!leave.empty())
      text += fmt::format("{} channels that leave here: {}\n", named.name, rangesText(leave));
  }
  return text.empty() ? "channels: none enters or leaves between these two\n" : text;
}

}  // namespace

std::string treeText(const View& view) {
  const Topology& topology = view.whole.topology;
  std::string text =
      fmt::format("{}: {} GPUs, {} network ports, {} NUMA nodes", view.source,
                  topology.of(NodeType::gpu).size(), topology.of(NodeType::net).size(),
                  topology.of(NodeType::cpu).size());
  if (view.nodes > 1)
    text += fmt::format("; {} such nodes with {} ranks", view.nodes,
                        static_cast<std::size_t>(view.nodes) * topology.of(NodeType::gpu).size());
  text += "\n";
  for (const std::string& note : topology.notes) text += fmt::format("note: {}\n", note);
  text += "\nTree (GB/s in each direction)\n" + describeTopology(view.whole);
  text += "\nPaths (type and GB/s, from the row to the column)\n" + describePaths(view.whole);
  text += view.nodes > 1 ? "\nChannels of each node\n" : "\nChannels\n";
  std::vector<std::string_view> empty;
  for (const NamedChannels& named : graphsOf(view)) {
    if (named.graph->channels.empty()) {
      empty.push_back(named.name);
      continue;
    }
    text += fmt::format("{} = {}", named.name, describeGraph(*named.graph, view.searched.topology));
  }
  if (!empty.empty()) text += fmt::format("none here: {}\n", fmt::join(empty, ", "));
  return text;
}

std::string whyText(const View& view, const std::string& from, const std::string& to) {
  const Machine& machine = view.whole;
  const int a = findNode(machine.topology, from), b = findNode(machine.topology, to);
  std::string text = explainPath(machine.topology, machine.paths, machine.settings, a, b);
  const NodeType typeA = machine.topology.node(a).type, typeB = machine.topology.node(b).type;
  if ((typeA == NodeType::gpu && typeB == NodeType::net) ||
      (typeA == NodeType::net && typeB == NodeType::gpu)) {
    const int gpu = typeA == NodeType::gpu ? a : b, net = typeA == NodeType::gpu ? b : a;
    text += choiceOfPort(view, gpu, net) + usesOfPort(view, gpu, net);
  }
  return text;
}

}  // namespace unisono::topo
