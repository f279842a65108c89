// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>

#include "base/error.h"
#include "topo_view.h"

// The texts of `unisono topo`.
namespace unisono::topo {

using namespace topology;

namespace {

// Names the ports nearest to a GPU and says whether `net` is one of them.
std::string choiceOfPort(const View& view, int gpu, int net) {
  const Machine& machine = view.whole;
  const std::vector<int>& near = machine.paths.nearest(gpu);
  std::vector<std::string> names;
  bool chosen = false;
  for (const int port : near) {
    names.push_back(machine.topology.nameOf(port));
    chosen |= port == net;
  }
  if (near.empty()) return "nearest ports: the GPU reaches none\n";
  const Path best = machine.paths.wirePath(gpu, near.front());
  std::string text =
      fmt::format("nearest ports of {}: {} ({}, {:g} GB/s)\n", machine.topology.nameOf(gpu),
                  fmt::join(names, ", "), nameOf(best.type), toGigabytes(best.bandwidth));
  const Path own = machine.paths.wirePath(gpu, net);
  if (!chosen) {
    text += fmt::format("{} is not among them: {}, {:g} GB/s\n", machine.topology.nameOf(net),
                        nameOf(own.type), toGigabytes(own.bandwidth));
  }
  return text;
}

// Lists the channels that enter or leave the node at this GPU through this port.
std::string usesOfPort(const View& view, int gpu, int net) {
  if (view.joined.nodes() == 1) {
    return "channels: on one node no channel uses a port; add --nodes 2 to see those of several\n";
  }
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
    for (size_t i = 0; i < named.graph->channels.size(); i++) {
      const Channel& channel = named.graph->channels[i];
      const auto is = [&](int node, int whole) {
        return node >= 0 && wholeIndex(view, *named.topology, node) == whole;
      };
      if (channel.gpus.empty()) continue;
      const NetworkGpus ends = networkGpus(named.graph->pattern, channel);
      if (is(channel.netIn, net) && is(ends.receives, gpu)) enter.push_back(static_cast<int>(i));
      if (is(channel.netOut, net) && is(ends.sends, gpu)) leave.push_back(static_cast<int>(i));
    }
    if (!enter.empty()) {
      text += fmt::format("{} channels that enter here: {}\n", named.name, rangesText(enter));
    }
    if (!leave.empty()) {
      text += fmt::format("{} channels that leave here: {}\n", named.name, rangesText(leave));
    }
  }
  return text.empty() ? "channels: none uses this port at this GPU\n" : text;
}

// Says in words what the pattern and the use of ports mean; empty if there is nothing to add.
std::string meaningText(const ChannelGraph& graph) {
  if (graph.channels.front().netIn < 0) return "";
  switch (graph.pattern) {
    case Pattern::balancedTree:
      return "balanced: the first two GPUs of a chain share its network traffic";
    case Pattern::splitTree:
      return "split: the first GPU of a chain receives from the network, the second sends";
    case Pattern::tree:
      return "the first GPU of a chain carries its network traffic";
    case Pattern::nvls:
      return "the NVSwitch reduces, and one GPU of each channel carries its network traffic";
    case Pattern::collnetDirect:
      return "all GPUs send to the first, which carries the network traffic";
    case Pattern::ring:
      break;
  }
  switch (graph.crossNic) {
    case 0:
      return "each channel leaves a node through the port it enters by (cross NIC 0)";
    case 1:
      return "a channel may leave a node through another port than it enters by (cross NIC 1)";
    default:
      return "channels come in pairs that swap their two ports on every second node (cross NIC 2)";
  }
}

// The heading of a graph and a line for each of its distinct channels.
std::string graphText(const NamedChannels& named) {
  const ChannelGraph& graph = *named.graph;
  const Topology& topology = *named.topology;
  std::string text =
      fmt::format("{}: {} per direction between GPUs ({})\n", named.name,
                  totalText(graph.channels.size(), graph.speedIntra), nameOf(graph.typeIntra));
  if (graph.channels.front().netIn >= 0) {
    text +=
        fmt::format("  to the network: {} ({})\n",
                    totalText(graph.channels.size(), graph.speedInter), nameOf(graph.typeInter));
  }
  if (const std::string meaning = meaningText(graph); !meaning.empty()) {
    text += fmt::format("  {}\n", meaning);
  }
  for (const std::vector<int>& equal : equalChannels(graph)) {
    const Channel& channel = graph.channels[static_cast<size_t>(equal.front())];
    std::string line = fmt::format("  {}:", rangesText(equal));
    if (channel.netIn >= 0) line += fmt::format(" {} >", topology.nameOf(channel.netIn));
    line += fmt::format(" GPU {}", orderText(topology, channel));
    if (channel.netOut >= 0) line += fmt::format(" > {}", topology.nameOf(channel.netOut));
    text += wrapped(line, 6) + "\n";
  }
  return text;
}

// The channels inside one node of the communicator.
std::string channelsText(const View& view, const Domain& domain) {
  std::string title = "Channels";
  if (view.domains.size() > 1) {
    title +=
        fmt::format(" among {}, which only the network connects to the other GPUs",
                    namesText(domain.machine.topology, domain.machine.topology.of(NodeType::gpu)));
  } else if (view.nodes > 1) {
    title += " of each node";
  }
  std::string text = fmt::format("\n{}\n", wrapped(title, 4));
  std::vector<std::string_view> empty;
  for (const NamedChannels& named : graphsOf(domain)) {
    if (named.graph->channels.empty()) {
      empty.push_back(named.name);
    } else {
      text += graphText(named);
    }
  }
  if (!empty.empty()) text += fmt::format("no channels: {}\n", fmt::join(empty, ", "));
  return text;
}

// Of many nodes only the first are shown.
constexpr int kShownNodes = 3;

// The part of `order`, which goes node by node, that is shown: "0 1 2 3 | 7 6 5 4 | ... 12 more
// nodes".
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
  if (joined.nodes() > kShownNodes) {
    text += fmt::format(" | ... {} more nodes", joined.nodes() - kShownNodes);
  }
  return text;
}

// Lists the edges of a tree between nodes: "8's parent is 3, 16's parent is 8". `members` has one
// rank or more of each node.
template <typename ParentOf>
std::string edgesText(const Joined& joined, const std::vector<int>& members, ParentOf&& parentOf) {
  std::vector<std::string> links;
  for (const int rank : members) {
    const int up = parentOf(rank);
    if (up < 0 || joined.nodeOf(up) == joined.nodeOf(rank)) continue;
    if (links.size() == kShownNodes) {
      links.emplace_back("...");
      break;
    }
    links.push_back(fmt::format("{}'s parent is {}", rank, up));
  }
  return fmt::format("{}", fmt::join(links, ", "));
}

// Groups channels with the same `keyOf`, in the order of the first of each group.
template <typename KeyOf>
std::vector<std::vector<int>> groupChannels(const Joined& joined, KeyOf&& keyOf) {
  std::vector<std::vector<int>> groups;
  for (int channel = 0; channel < joined.channels(); channel++) {
    const auto known = std::find_if(groups.begin(), groups.end(), [&](const auto& group) {
      return keyOf(group.front()) == keyOf(channel);
    });
    if (known == groups.end()) {
      groups.push_back({channel});
    } else {
      known->push_back(channel);
    }
  }
  return groups;
}

// The channels of all nodes, joined.
std::string joinedText(const Joined& joined) {
  std::string text =
      fmt::format("\nJoined: {} on {}, {}", counted(static_cast<size_t>(joined.ranks()), "rank"),
                  counted(static_cast<size_t>(joined.nodes()), "node"),
                  counted(static_cast<size_t>(joined.channels()), "channel"));
  if (const int own = joined.ring().channels; own > 0 && joined.channels() > own) {
    text += fmt::format(" that share the bandwidth of {}", own);
  }
  text += "\n";
  const auto add = [&](const std::string& line) { text += wrapped(line, 4) + "\n"; };
  const auto ring = [&](int channel) -> const auto& {
    return joined.ringOrder(channel);
  };
  for (const std::vector<int>& channels : groupChannels(joined, ring)) {
    add(fmt::format("ring {}:{}", rangesText(channels), nodesText(joined, ring(channels.front()))));
  }
  const auto treeAndOrder = [&](int channel) {
    return std::pair(joined.nodes() == 1 ? 0 : joined.treeOf(channel), joined.treeOrder(channel));
  };
  for (const std::vector<int>& channels : groupChannels(joined, treeAndOrder)) {
    const int channel = channels.front();
    const std::vector<int>& order = joined.treeOrder(channel);
    std::string line = fmt::format("tree {}:{}", rangesText(channels), nodesText(joined, order));
    if (joined.nodes() > 1) {
      line += "; " + edgesText(joined, order,
                               [&](int rank) { return joined.treePlace(channel, rank).up; });
    }
    add(line);
  }
  for (int channel = 0; channel < joined.collnetChannels(); channel++) {
    std::vector<int> order;
    for (int node = 0; node < joined.nodes(); node++) {
      for (const int rank : joined.collnetChain(channel, node)) order.push_back(rank);
    }
    add(fmt::format("collnet_chain {}:{}", channel, nodesText(joined, order)));
  }
  for (size_t head = 0; head < joined.collnetHeads().size(); head++) {
    add(fmt::format("collnet_direct head {}:{}", head,
                    nodesText(joined, joined.collnetHeads()[head])));
  }
  if (joined.nodes() == 1 && !joined.nvlsHeads().empty()) {
    std::vector<int> heads;
    for (const std::vector<int>& members : joined.nvlsHeads()) heads.push_back(members.front());
    add(fmt::format("nvls heads: {}", fmt::join(heads, " ")));
    return text;
  }
  for (size_t head = 0; head < joined.nvlsHeads().size(); head++) {
    const std::vector<int>& members = joined.nvlsHeads()[head];
    std::string line = fmt::format("nvls head {}:{}", head, nodesText(joined, members));
    for (const int tree : {0, 1}) {
      line += fmt::format("; tree {}: {}", tree, edgesText(joined, members, [&](int rank) {
                            return joined.nvlsTreePlace(static_cast<int>(head), tree, rank).up;
                          }));
    }
    add(line);
  }
  return text;
}

// The length of the UTF-8 sequence at `text[0]` if it is a character that may be printed; 0
// otherwise.
size_t printableLength(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  if (byte(0) < 0x80) return byte(0) >= 0x20 && byte(0) != 0x7f ? 1 : 0;
  const size_t length = byte(0) < 0xc2   ? 0
                        : byte(0) < 0xe0 ? 2
                        : byte(0) < 0xf0 ? 3
                        : byte(0) < 0xf5 ? 4
                                         : 0;
  if (length == 0 || text.size() < length) return 0;
  uint32_t code = byte(0) & (0xffU >> (length + 1));
  for (size_t i = 1; i < length; i++) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
    code = code << 6 | (byte(i) & 0x3fU);
  }
  const bool tooLong = (length == 3 && code < 0x800) || (length == 4 && code < 0x10000);
  const bool control = code < 0xa0;
  const bool surrogate = code >= 0xd800 && code < 0xe000;
  const bool noCharacter = (code & 0xfffe) == 0xfffe || code > 0x10ffff;
  return tooLong || control || surrogate || noCharacter ? 0 : length;
}

}  // namespace

std::string counted(size_t count, std::string_view what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

std::string rangesText(const std::vector<int>& numbers) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin < numbers.size();) {
    size_t end = begin + 1;
    while (end < numbers.size() && numbers[end] == numbers[end - 1] + 1) end++;
    parts.push_back(end - begin > 1 ? fmt::format("{}-{}", numbers[begin], numbers[end - 1])
                                    : fmt::format("{}", numbers[begin]));
    begin = end;
  }
  return fmt::format("{}", fmt::join(parts, ", "));
}

std::string namesText(const Topology& topology, const std::vector<int>& nodes) {
  if (nodes.empty()) return "none";
  std::map<int, std::vector<int>> numbersOf;  // by host
  for (const int index : nodes) {
    const Node& node = topology.node(index);
    numbersOf[node.host].push_back(node.type == NodeType::gpu ? node.gpu.dev : node.net.dev);
  }
  const std::string_view type = nameOf(topology.node(nodes.front()).type);
  std::map<std::string, std::vector<int>> hostsOf;  // by numbers
  for (auto& [host, numbers] : numbersOf) {
    std::sort(numbers.begin(), numbers.end());
    hostsOf[rangesText(numbers)].push_back(host);
  }
  if (topology.hosts.size() <= 1) return fmt::format("{}/{}", type, hostsOf.begin()->first);
  std::vector<std::string> parts;
  for (const auto& [numbers, hosts] : hostsOf) {
    parts.push_back(fmt::format("{}/{}:{}", type, rangesText(hosts), numbers));
  }
  return fmt::format("{}", fmt::join(parts, ", "));
}

std::string totalText(size_t channels, Bandwidth speed) {
  return fmt::format("{} x {:g} GB/s = {:g} GB/s", counted(channels, "channel"), toGigabytes(speed),
                     toGigabytes(speed * static_cast<Bandwidth>(channels)));
}

std::string orderText(const Topology& topology, const Channel& channel) {
  std::string text;
  int host = -1;
  for (const int gpu : channel.gpus) {
    const Node& node = topology.node(gpu);
    if (topology.hosts.size() > 1 && node.host != host) {
      text += fmt::format("{}h{}:", host < 0 ? "" : " | ", node.host);
      host = node.host;
    }
    text += fmt::format("{}{}", text.empty() ? "" : " ", node.gpu.dev);
  }
  return text;
}

std::vector<std::vector<int>> equalChannels(const ChannelGraph& graph) {
  std::vector<std::vector<int>> groups;
  for (size_t i = 0; i < graph.channels.size(); i++) {
    const auto known = std::find_if(groups.begin(), groups.end(), [&](const auto& group) {
      return graph.channels[static_cast<size_t>(group.front())] == graph.channels[i];
    });
    if (known == groups.end()) {
      groups.push_back({static_cast<int>(i)});
    } else {
      known->push_back(static_cast<int>(i));
    }
  }
  return groups;
}

std::string printable(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const size_t length = printableLength(text);
    if (length == 0) result += fmt::format("\\x{:02x}", static_cast<unsigned char>(text.front()));
    result += text.substr(0, length);
    text.remove_prefix(std::max<size_t>(length, 1));
  }
  return result;
}

std::string wrapped(const std::string& line, size_t indent, size_t columns) {
  std::string result;
  std::string_view rest = line;
  size_t limit = columns;
  while (rest.size() > limit) {
    // Never inside the indentation that the line itself begins with.
    const size_t begin = std::min(rest.find_first_not_of(' '), rest.size());
    // Rather before a bar, which separates nodes and hosts.
    size_t space = rest.rfind(" | ", limit);
    if (space == std::string_view::npos || space < limit / 2) space = rest.rfind(' ', limit);
    if (space == std::string_view::npos || space < begin) space = rest.find(' ', begin);
    if (space == std::string_view::npos) break;
    result += fmt::format("{}\n{:{}}", rest.substr(0, space), "", indent);
    rest.remove_prefix(space + 1);
    limit = columns - indent;
  }
  return result += rest;
}

NetworkGpus networkGpus(Pattern pattern, const Channel& channel) {
  NetworkGpus ends{channel.gpus.front(), channel.gpus.front()};
  constexpr Bandwidth kAnySpeed = 1000;
  for (const PathUse& use :
       ChannelTraffic(pattern, kAnySpeed, kAnySpeed, channel.gpus).all(channel)) {
    if (use.kind == PathUse::Kind::portToGpu) ends.receives = use.to;
    if (use.kind == PathUse::Kind::gpuToPort) ends.sends = use.from;
  }
  return ends;
}

std::string treeText(const View& view, JoinedPart joined) {
  const Topology& topology = view.whole.topology;
  std::string text =
      fmt::format("{}: {}, {}, {}", view.source, counted(topology.of(NodeType::gpu).size(), "GPU"),
                  counted(topology.of(NodeType::net).size(), "NET port"),
                  counted(topology.of(NodeType::cpu).size(), "NUMA node"));
  if (view.nodes > 1) {
    text += fmt::format("; {} such machines with {} ranks", view.nodes, view.joined.ranks());
  }
  text += "\n";
  for (const std::string& warning : view.warnings) {
    text += wrapped("warning: " + warning, 4) + "\n";
  }
  for (const std::string& note : view.notes) text += wrapped("note: " + note, 4) + "\n";
  text += "\nTree (GB/s per direction)\n" + describeTopology(view.whole);
  text += "\nPaths (type and GB/s)\n" + pathsText(view.whole);
  for (const Domain& domain : view.domains) text += channelsText(view, domain);
  if (joined == JoinedPart::show) text += joinedText(view.joined);
  return text;
}

std::string whyText(const View& view, const std::string& from, const std::string& to) {
  const Machine& machine = view.whole;
  const int a = findNode(machine.topology, from), b = findNode(machine.topology, to);
  for (const int end : {a, b}) {
    if (const NodeType type = machine.topology.node(end).type;
        type == NodeType::pci || type == NodeType::nic) {
      throw invalidArgument("--why needs a GPU, NET port, CPU or NVSwitch; {} is none of these",
                            machine.topology.nameOf(end))
          .remedy("Name a device that is attached to it.");
    }
  }
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
