#include "topology/validate.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

namespace unisono::topology {

namespace {

class Validator {
 public:
  Validator(const ChannelGraph& graph, const Machine& machine)
      : graph_(graph), machine_(machine), topology_(machine.topology) {}

  std::vector<std::string> run() {
    if (graph_.channels.empty()) return {};
    if (graph_.speedIntra <= 0 || graph_.speedInter <= 0) violated("a speed is not positive");
    // A channel with members that are not there is looked at no further.
    for (number_ = 0; number_ < graph_.channels.size(); ++number_)
      sound_.push_back(checkMembers(graph_.channels[number_]));
    for (number_ = 0; number_ < graph_.channels.size(); ++number_) {
      if (!sound_[number_]) continue;
      checkPorts(graph_.channels[number_]);
      addTraffic(graph_.channels[number_]);
    }
    checkLoads();
    checkHeads();
    checkBalance();
    if (graph_.sameChannels)
      for (const Channel& channel : graph_.channels)
        if (hasChain() && channel.gpus != graph_.channels.front().gpus) {
          violated("the channels are called the same, but differ");
          break;
        }
    return std::move(violations_);
  }

 private:
  using Port = std::tuple<int, std::uint64_t, int>;  // host, adapter, port

  bool hasChain() const {
    return graph_.pattern != Pattern::nvls && graph_.pattern != Pattern::collnetDirect;
  }
  bool isRing() const { return graph_.pattern == Pattern::ring; }

  template <typename... Args>
  void violated(fmt::format_string<Args...> format, Args&&... args) {
    violations_.push_back(fmt::format(format, std::forward<Args>(args)...));
  }

  bool isNode(int node, NodeType type) const {
    return node >= 0 && node < static_cast<int>(topology_.nodes.size()) &&
           topology_.node(node).type == type;
  }

  bool checkMembers(const Channel& channel) {
    std::set<int> seen;
    for (const int gpu : channel.gpus) {
      if (!isNode(gpu, NodeType::gpu)) {
        violated("channel {} names node {}, which is no GPU", number_, gpu);
        return false;
      }
      if (!seen.insert(gpu).second)
        violated("channel {} visits {} twice", number_, topology_.nameOf(gpu));
    }
    const std::size_t expected =
        graph_.pattern == Pattern::nvls ? 1 : topology_.of(NodeType::gpu).size();
    if (channel.gpus.size() != expected) {
      violated("channel {} has {} GPUs, not {}", number_, channel.gpus.size(), expected);
      return false;
    }
    for (const int net : {channel.netIn, channel.netOut}) {
      if (net >= 0 && !isNode(net, NodeType::net)) {
        violated("channel {} names node {}, which is no network port", number_, net);
        return false;
      }
    }
    const bool network = !topology_.of(NodeType::net).empty();
    if (network != (channel.netIn >= 0) || network != (channel.netOut >= 0)) {
      if (network)
        violated("channel {} does not enter and leave by the network", number_);
      else
        violated("channel {} uses a port, and the machine has none", number_);
      return false;
    }
    return true;
  }

  Port portOf(int net) const {
    const Node& node = topology_.node(net);
    return {node.host, node.net.guid, node.net.port};
  }

  void checkPorts(const Channel& channel) {
    if (channel.netIn < 0) return;
    if (graph_.pattern == Pattern::tree && channel.netIn != channel.netOut)
      violated("channel {} is a tree and leaves by another port", number_);
    if (graph_.crossNic == 0 && portOf(channel.netIn) != portOf(channel.netOut))
      violated("channel {} leaves by another port, and crossnic is 0", number_);
    if (graph_.crossNic == 2 && isRing()) {
      const bool alone = number_ % 2 == 0 && number_ + 1 == graph_.channels.size();
      if (!alone && !sound_[number_ ^ 1]) return;
      const Channel& partner = alone ? channel : graph_.channels[number_ ^ 1];
      if (portOf(partner.netIn) != portOf(channel.netOut) ||
          portOf(partner.netOut) != portOf(channel.netIn))
        violated("channel {} does not alternate ports with its partner", number_);
    }
  }

  // Counts `speed` on all links from one node to another.
  void addPath(int from, int to, Bandwidth speed, PathType claimed) {
    if (from == to) return;
    const Path& path = machine_.path(from, to);
    if (path.type >= PathType::net) {
      violated("channel {} has no path from {} to {}", number_, topology_.nameOf(from),
               topology_.nameOf(to));
      return;
    }
    if (path.type > claimed)
      violated("channel {} goes from {} to {} over {}, farther than the {} claimed", number_,
               topology_.nameOf(from), topology_.nameOf(to), nameOf(path.type), nameOf(claimed));
    for (const Hop& hop : machine_.paths.hops(from, to)) loads_[{hop.node, hop.link}] += speed;
  }

  // What a channel moves between its port and GPUs: from the port, then to it.
  struct PortTraffic {
    int gpu = -1;
    bool toPort = false;
    Bandwidth speed = 0;
  };
  std::vector<PortTraffic> portTraffic(const Channel& channel) const {
    const std::vector<int>& gpus = channel.gpus;
    const Bandwidth speed = graph_.speedInter;
    const int first = gpus.front(), second = gpus.size() > 1 ? gpus[1] : gpus[0];
    std::vector<PortTraffic> traffic{{first, false, speed}};
    switch (graph_.pattern) {
      case Pattern::ring:
        traffic.push_back({gpus.back(), true, speed});
        break;
      case Pattern::splitTree:
        traffic.push_back({second, true, speed});
        break;
      case Pattern::balancedTree:
        traffic.push_back({first, true, speed / 2});
        traffic.push_back({second, true, speed / 2});
        break;
      default:
        traffic.push_back({first, true, speed});
    }
    return traffic;
  }

  void addNetwork(const Channel& channel) {
    if (channel.netIn < 0) return;
    for (const PortTraffic& part : portTraffic(channel)) {
      if (part.toPort)
        addPath(part.gpu, channel.netOut, part.speed, graph_.typeInter);
      else
        addPath(channel.netIn, part.gpu, part.speed, graph_.typeInter);
    }
    in_[portOf(channel.netIn)] += graph_.speedInter;
    ++uses_[portOf(channel.netIn)];
    out_[portOf(channel.netOut)] += graph_.speedInter;
  }

  void addTraffic(const Channel& channel) {
    const std::vector<int>& gpus = channel.gpus;
    const int first = gpus.front(), last = gpus.back();
    addNetwork(channel);
    if (hasChain())
      for (std::size_t i = 0; i + 1 < gpus.size(); ++i)
        addPath(gpus[i], gpus[i + 1], graph_.speedIntra, graph_.typeIntra);
    switch (graph_.pattern) {
      case Pattern::ring:
        if (channel.netIn < 0) addPath(last, first, graph_.speedIntra, graph_.typeIntra);
        return;
      case Pattern::splitTree:
      case Pattern::balancedTree:
      case Pattern::tree:
        return;
      case Pattern::nvls: {
        const int nvSwitch =
            topology_.of(NodeType::nvs).empty() ? -1 : topology_.of(NodeType::nvs).front();
        if (nvSwitch < 0) {
          violated("channel {} needs an NVSwitch, and there is none", number_);
          return;
        }
        for (const int gpu : topology_.of(NodeType::gpu)) {
          const Bandwidth speed = graph_.speedIntra * (gpu == first ? 2 : 1);
          addPath(gpu, nvSwitch, speed, graph_.typeIntra);
          addPath(nvSwitch, gpu, speed, graph_.typeIntra);
        }
        return;
      }
      case Pattern::collnetDirect: {
        const Bandwidth others = static_cast<Bandwidth>(std::max<std::size_t>(1, gpus.size() - 1));
        for (const int gpu : gpus) {
          addPath(gpu, first, graph_.speedIntra / others, graph_.typeIntra);
          addPath(first, gpu, graph_.speedIntra / others, graph_.typeIntra);
        }
        return;
      }
    }
  }

  void checkLoads() {
    for (const auto& [place, load] : loads_) {
      const Node& node = topology_.node(place.first);
      const Link& link = node.links[static_cast<std::size_t>(place.second)];
      if (load > link.bandwidth)
        violated("the {} link from {} to {} carries {:g} GB/s and has {:g}", nameOf(link.type),
                 topology_.nameOf(place.first), topology_.nameOf(link.to), toGigabytes(load),
                 toGigabytes(link.bandwidth));
    }
    std::map<Port, Bandwidth> speeds;
    for (const int net : topology_.of(NodeType::net))
      speeds[portOf(net)] = std::max(speeds[portOf(net)], topology_.node(net).net.bandwidth);
    for (const auto* direction : {&in_, &out_})
      for (const auto& [port, load] : *direction)
        if (load > speeds[port])
          violated("the port {} of adapter {:#x} carries {:g} GB/s and has {:g}", std::get<2>(port),
                   std::get<1>(port), toGigabytes(load), toGigabytes(speeds[port]));
  }

  void checkHeads() {
    if (hasChain()) return;
    std::set<int> heads;
    for (std::size_t i = 0; i < graph_.channels.size(); ++i)
      if (sound_[i] && !heads.insert(graph_.channels[i].gpus.front()).second)
        violated("two channels have the head {}",
                 topology_.nameOf(graph_.channels[i].gpus.front()));
  }

  // A channel may not share its port while a port like it serves two less and could easily take it.
  void checkBalance() {
    if (!hasChain() || graph_.crossNic != 0) return;
    std::map<Port, std::pair<Bandwidth, PathType>> kinds;
    for (const int net : topology_.of(NodeType::net)) {
      PathType nearest = PathType::dis;
      for (const int gpu : topology_.of(NodeType::gpu))
        nearest =
            std::min(nearest, std::max(machine_.path(net, gpu).type, machine_.path(gpu, net).type));
      kinds.emplace(portOf(net), std::pair(topology_.node(net).net.bandwidth, nearest));
    }
    for (number_ = 0; number_ < graph_.channels.size(); ++number_) {
      const Channel& channel = graph_.channels[number_];
      if (!sound_[number_] || channel.netIn < 0) continue;
      const Port own = portOf(channel.netIn);
      for (const int net : topology_.of(NodeType::net)) {
        const Port other = portOf(net);
        if (kinds[other] != kinds[own] || uses_[own] < uses_[other] + 2) continue;
        if (!topology_.node(net).net.collective && topology_.node(channel.netIn).net.collective)
          continue;
        if (!couldMove(channel, net)) continue;
        violated("channel {} shares {} with {} others; {}, as fast and as near, serves {}", number_,
                 topology_.nameOf(channel.netIn), uses_[own] - 1, topology_.nameOf(net),
                 uses_[other]);
        return;
      }
    }
  }

  std::pair<int, int> opposite(const Hop& hop) const {
    const Link& link = topology_.node(hop.node).links[static_cast<std::size_t>(hop.link)];
    const auto& back = topology_.node(link.to).links;
    int number = 0;
    while (back[static_cast<std::size_t>(number)].to != hop.node ||
           back[static_cast<std::size_t>(number)].type != link.type)
      ++number;
    return {link.to, number};
  }

  bool couldMove(const Channel& channel, int net) const {
    auto loads = loads_;
    const bool tree = graph_.pattern != Pattern::ring;
    std::vector<std::pair<int, int>> touched;
    for (const PortTraffic& part : portTraffic(channel)) {
      const auto ends = [&](int port) {
        return part.toPort ? std::pair(part.gpu, port) : std::pair(port, part.gpu);
      };
      const auto [oldFrom, oldTo] = ends(part.toPort ? channel.netOut : channel.netIn);
      for (const Hop& hop : machine_.paths.hops(oldFrom, oldTo))
        loads[{hop.node, hop.link}] -= part.speed;
      const auto [from, to] = ends(net);
      if (machine_.path(from, to).type > graph_.typeInter) return false;
      if (tree && machine_.path(to, from).type > graph_.typeInter) return false;
      for (const Hop& hop : machine_.paths.hops(from, to)) {
        loads[{hop.node, hop.link}] += part.speed;
        touched.emplace_back(hop.node, hop.link);
        touched.push_back(opposite(hop));
      }
    }
    // Only with room to spare: planning adds to what flows through some CPUs and to old GPUs.
    for (const auto& place : touched) {
      const Link& link = topology_.node(place.first).links[static_cast<std::size_t>(place.second)];
      if (loads[place] * 3 > link.bandwidth * 2) return false;
    }
    return true;
  }

  const ChannelGraph& graph_;
  const Machine& machine_;
  const Topology& topology_;
  std::size_t number_ = 0;
  std::vector<bool> sound_;
  std::vector<std::string> violations_;
  std::map<std::pair<int, int>, Bandwidth> loads_;
  std::map<Port, Bandwidth> in_, out_;
  std::map<Port, int> uses_;
};

}  // namespace

std::vector<std::string> validate(const ChannelGraph& graph, const Machine& machine) {
  return Validator(graph, machine).run();
}

}  // namespace unisono::topology
