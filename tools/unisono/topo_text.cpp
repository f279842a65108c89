#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/error.h"
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
  if (view.joined.nodes() == 1)
    return "channels: on one node none uses a port; --nodes 2 shows those between nodes\n";
  const int number = view.whole.topology.node(gpu).gpu.dev;
  const auto home =
      std::find_if(view.domains.begin(), view.domains.end(), [&](const Domain& domain) {
        const auto& gpus = domain.machine.topology.of(NodeType::gpu);
        return std::any_of(gpus.begin(), gpus.end(), [&](int own) {
          return wholeIndex(view, domain.machine.topology, own) == gpu;
        });
      });
  if (home == view.domains.end()) return fmt::format("channels: GPU {} has no rank\n", number);
  std::string text;
  for (const NamedChannels& named : graphsOf(*home)) {
    std::vector<int> enter, leave;
    for (std::size_t i = 0; i < named.graph->channels.size(); ++i) {
      const Channel& channel = named.graph->channels[i];
      const auto is = [&](int node, int whole) {
        return node >= 0 && wholeIndex(view, *named.topology, node) == whole;
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

// The channels inside one node of the communicator.
std::string channelsText(const View& view, const Domain& domain) {
  std::string text = "\nChannels";
  if (view.domains.size() > 1) {
    std::vector<std::string> names;
    for (const int gpu : domain.machine.topology.of(NodeType::gpu))
      names.push_back(domain.machine.topology.nameOf(gpu));
    text +=
        fmt::format(" among {}, which only the network joins to the others", fmt::join(names, " "));
  } else if (view.nodes > 1) {
    text += " of each node";
  }
  text += "\n";
  std::vector<std::string_view> empty;
  for (const NamedChannels& named : graphsOf(domain)) {
    if (named.graph->channels.empty()) {
      empty.push_back(named.name);
      continue;
    }
    text += fmt::format("{} = {}", named.name, describeGraph(*named.graph, *named.topology));
  }
  if (!empty.empty()) text += fmt::format("none here: {}\n", fmt::join(empty, ", "));
  return text;
}

// The first nodes of many, so that a line stays a line.
constexpr int kShownNodes = 4;

// The part of `order`, which goes node by node, that is shown: "0 1 2 3 | 7 6 5 4 | ... 12 nodes".
std::string nodesText(const Joined& joined, const std::vector<int>& order) {
  std::string text;
  int node = -1, shown = 0;
  for (const int rank : order) {
    if (joined.nodeOf(rank) != node) {
      if (shown++ == kShownNodes) break;
      node = joined.nodeOf(rank);
      text += node == joined.nodeOf(order.front()) ? " " : " | ";
    } else {
      text += ' ';
    }
    text += std::to_string(rank);
  }
  if (joined.nodes() > kShownNodes)
    text += fmt::format(" | ... {} more nodes", joined.nodes() - kShownNodes);
  return text;
}

// Which rank of a node hangs at which of another: "8 at 3, 16 at 8". `members` has one rank or
// more of each node.
template <typename ParentOf>
std::string linksText(const Joined& joined, const std::vector<int>& members, ParentOf&& parentOf) {
  std::vector<std::string> links;
  for (const int rank : members) {
    const int up = parentOf(rank);
    if (up < 0 || joined.nodeOf(up) == joined.nodeOf(rank)) continue;
    if (links.size() == kShownNodes) {
      links.emplace_back("...");
      break;
    }
    links.push_back(fmt::format("{} at {}", rank, up));
  }
  return fmt::format("{}", fmt::join(links, ", "));
}

// Channels with the same `keyOf`, in the order of their first.
template <typename KeyOf>
std::vector<std::vector<int>> alike(const Joined& joined, KeyOf&& keyOf) {
  std::vector<std::vector<int>> groups;
  for (int channel = 0; channel < joined.channels(); ++channel) {
    const auto known = std::find_if(groups.begin(), groups.end(), [&](const auto& group) {
      return keyOf(group.front()) == keyOf(channel);
    });
    if (known == groups.end())
      groups.push_back({channel});
    else
      known->push_back(channel);
  }
  return groups;
}

// What the ranks of all nodes make of their nodes' channels.
std::string joinedText(const Joined& joined) {
  std::string text = fmt::format("\nJoined: {} on {}, {}\n",
                                 counted(static_cast<std::size_t>(joined.ranks()), "rank"),
                                 counted(static_cast<std::size_t>(joined.nodes()), "node"),
                                 counted(static_cast<std::size_t>(joined.channels()), "channel"));
  const auto ring = [&](int channel) -> const auto& {
    return joined.ringOrder(channel);
  };
  for (const std::vector<int>& channels : alike(joined, ring))
    text += fmt::format("ring {}:{}\n", rangesText(channels),
                        nodesText(joined, ring(channels.front())));
  const auto treeAndOrder = [&](int channel) {
    return std::pair(joined.nodes() == 1 ? 0 : joined.treeOf(channel), joined.treeOrder(channel));
  };
  for (const std::vector<int>& channels : alike(joined, treeAndOrder)) {
    const int channel = channels.front();
    const std::vector<int>& order = joined.treeOrder(channel);
    text += fmt::format("tree {}:{}", rangesText(channels), nodesText(joined, order));
    if (joined.nodes() > 1)
      text += "; " + linksText(joined, order,
                               [&](int rank) { return joined.treePlace(channel, rank).up; });
    text += "\n";
  }
  for (int channel = 0; channel < joined.collnetChannels(); ++channel) {
    std::vector<int> order;
    for (int node = 0; node < joined.nodes(); ++node)
      for (const int rank : joined.collnetChain(channel, node)) order.push_back(rank);
    text += fmt::format("collnet_chain {}:{}\n", channel, nodesText(joined, order));
  }
  for (std::size_t head = 0; head < joined.collnetHeads().size(); ++head)
    text += fmt::format("collnet_direct head {}:{}\n", head,
                        nodesText(joined, joined.collnetHeads()[head]));
  for (std::size_t head = 0; head < joined.nvlsHeads().size(); ++head) {
    const std::vector<int>& members = joined.nvlsHeads()[head];
    text += fmt::format("nvls head {}:{}", head, nodesText(joined, members));
    for (const int tree : {0, 1})
      if (joined.nodes() > 1)
        text += fmt::format("; tree {}: {}", tree, linksText(joined, members, [&](int rank) {
                              return joined.nvlsTreePlace(static_cast<int>(head), tree, rank).up;
                            }));
    text += "\n";
  }
  return text;
}

}  // namespace

std::string counted(std::size_t count, std::string_view what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

std::string treeText(const View& view) {
  const Topology& topology = view.whole.topology;
  std::string text =
      fmt::format("{}: {}, {}, {}", view.source, counted(topology.of(NodeType::gpu).size(), "GPU"),
                  counted(topology.of(NodeType::net).size(), "network port"),
                  counted(topology.of(NodeType::cpu).size(), "NUMA node"));
  if (view.nodes > 1)
    text += fmt::format("; {} such nodes with {} ranks", view.nodes, view.joined.ranks());
  text += "\n";
  for (const std::string& note : view.notes) text += fmt::format("note: {}\n", note);
  text += "\nTree (GB/s in each direction)\n" + describeTopology(view.whole);
  text += "\nPaths (type and GB/s, from the row to the column)\n" + describePaths(view.whole);
  for (const Domain& domain : view.domains) text += channelsText(view, domain);
  return text + joinedText(view.joined);
}

std::string whyText(const View& view, const std::string& from, const std::string& to) {
  const Machine& machine = view.whole;
  const int a = findNode(machine.topology, from), b = findNode(machine.topology, to);
  for (const int end : {a, b})
    if (const NodeType type = machine.topology.node(end).type;
        type == NodeType::pci || type == NodeType::nic)
      throw invalidArgument("ways begin and end at GPUs, ports, CPUs and NVSwitches, {} is none",
                            machine.topology.nameOf(end))
          .remedy("Ask for a device that hangs at it.");
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
