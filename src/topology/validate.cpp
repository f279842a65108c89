// SPDX-License-Identifier: Apache-2.0
#include "topology/validate.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "topology/channel_traffic.h"

namespace unisono::topology {

namespace {

class Validator {
 public:
  Validator(const ChannelGraph& graph, const Machine& machine)
      : graph_(graph),
        machine_(machine),
        topology_(machine.topology),
        traffic_(graph.pattern, graph.speedIntra, graph.speedInter,
                 machine.topology.of(NodeType::gpu)) {}

  std::vector<std::string> run() {
    if (graph_.channels.empty()) return {};
    if (graph_.speedIntra <= 0 || graph_.speedInter <= 0) violated("a speed is not positive");
    // A channel with members that are not there is looked at no further.
    for (number_ = 0; number_ < graph_.channels.size(); ++number_) {
      sound_.push_back(checkMembers(graph_.channels[number_]));
    }
    for (number_ = 0; number_ < graph_.channels.size(); ++number_) {
      if (!sound_[number_]) continue;
      checkPorts(graph_.channels[number_]);
      addTraffic(graph_.channels[number_]);
    }
    checkLoads();
    checkHeads();
    checkBalance();
    if (graph_.sameChannels) {
      for (const Channel& channel : graph_.channels) {
        if (hasChain() && channel.gpus != graph_.channels.front().gpus) {
          violated("the channels are called the same, but differ");
          break;
        }
      }
    }
    return std::move(violations_);
  }

 private:
  using Port = std::tuple<int, uint64_t, int>;  // host, adapter, port

  bool hasChain() const { return !hasHead(graph_.pattern); }
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
        violated("channel {} names node {}, which is not a GPU", number_, gpu);
        return false;
      }
      if (!seen.insert(gpu).second) {
        violated("channel {} visits {} twice", number_, topology_.nameOf(gpu));
      }
    }
    const size_t expected =
        graph_.pattern == Pattern::nvls ? 1 : topology_.of(NodeType::gpu).size();
    if (channel.gpus.size() != expected) {
      violated("channel {} has {} GPUs, not {}", number_, channel.gpus.size(), expected);
      return false;
    }
    for (const int net : {channel.netIn, channel.netOut}) {
      if (net >= 0 && !isNode(net, NodeType::net)) {
        violated("channel {} names node {}, which is not a network port", number_, net);
        return false;
      }
    }
    const bool network = !topology_.of(NodeType::net).empty();
    if (network != (channel.netIn >= 0) || network != (channel.netOut >= 0)) {
      if (network) {
        violated("channel {} does not enter and leave by the network", number_);
      } else {
        violated("channel {} uses a port, and the machine has none", number_);
      }
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
    if (graph_.pattern == Pattern::tree && channel.netIn != channel.netOut) {
      violated("channel {} is a tree and leaves by another port", number_);
    }
    if (graph_.crossNic == 0 && portOf(channel.netIn) != portOf(channel.netOut)) {
      violated("channel {} leaves by another port, and crossnic is 0", number_);
    }
    if (graph_.crossNic == 2 && isRing()) {
      const bool alone = number_ % 2 == 0 && number_ + 1 == graph_.channels.size();
      if (!alone && !sound_[number_ ^ 1]) return;
      const Channel& partner = alone ? channel : graph_.channels[number_ ^ 1];
      if (portOf(partner.netIn) != portOf(channel.netOut) ||
          portOf(partner.netOut) != portOf(channel.netIn)) {
        violated("channel {} does not alternate ports with its partner", number_);
      }
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
    if (path.type > claimed) {
      violated("channel {} goes from {} to {} over {}, farther than the {} claimed", number_,
               topology_.nameOf(from), topology_.nameOf(to), nameOf(path.type), nameOf(claimed));
    }
    for (const Hop& hop : machine_.paths.hops(from, to)) loads_[{hop.node, hop.link}] += speed;
  }

  void addTraffic(const Channel& channel) {
    const std::vector<int>& switches = topology_.of(NodeType::nvs);
    if (graph_.pattern == Pattern::nvls && switches.empty()) {
      violated("channel {} needs an NVSwitch, and there is none", number_);
      return;
    }
    const auto nodeOf = [&](int end) { return end < 0 ? switches.front() : end; };
    for (const PathUse& use : traffic_.all(channel)) {
      addPath(nodeOf(use.from), nodeOf(use.to), use.speed,
              use.isNetwork() ? graph_.typeInter : graph_.typeIntra);
    }
    if (channel.netIn < 0) return;
    in_[portOf(channel.netIn)] += graph_.speedInter;
    ++uses_[portOf(channel.netIn)];
    out_[portOf(channel.netOut)] += graph_.speedInter;
  }

  void checkLoads() {
    for (const auto& [place, load] : loads_) {
      const Node& node = topology_.node(place.first);
      const Link& link = node.links[static_cast<size_t>(place.second)];
      if (load > link.bandwidth) {
        violated("the {} link from {} to {} carries {:g} GB/s and has {:g}", nameOf(link.type),
                 topology_.nameOf(place.first), topology_.nameOf(link.to), toGigabytes(load),
                 toGigabytes(link.bandwidth));
      }
    }
    std::map<Port, Bandwidth> speeds;
    for (const int net : topology_.of(NodeType::net)) {
      speeds[portOf(net)] = std::max(speeds[portOf(net)], topology_.node(net).net.bandwidth);
    }
    for (const auto* direction : {&in_, &out_}) {
      for (const auto& [port, load] : *direction) {
        if (load > speeds[port]) {
          violated("the port {} of adapter {:#x} carries {:g} GB/s and has {:g}", std::get<2>(port),
                   std::get<1>(port), toGigabytes(load), toGigabytes(speeds[port]));
        }
      }
    }
  }

  void checkHeads() {
    if (hasChain()) return;
    std::set<int> heads;
    for (size_t i = 0; i < graph_.channels.size(); i++) {
      if (sound_[i] && !heads.insert(graph_.channels[i].gpus.front()).second) {
        violated("two channels have the head {}",
                 topology_.nameOf(graph_.channels[i].gpus.front()));
      }
    }
  }

  // A channel may not share its port while a port like it serves two less and could easily take it.
  void checkBalance() {
    if (!hasChain() || graph_.crossNic != 0) return;
    std::map<Port, std::pair<Bandwidth, PathType>> kinds;
    for (const int net : topology_.of(NodeType::net)) {
      const PathType nearest = distanceToGpus(topology_, machine_.paths, net);
      kinds.emplace(portOf(net), std::pair(topology_.node(net).net.bandwidth, nearest));
    }
    for (number_ = 0; number_ < graph_.channels.size(); ++number_) {
      const Channel& channel = graph_.channels[number_];
      if (!sound_[number_] || channel.netIn < 0) continue;
      const Port own = portOf(channel.netIn);
      for (const int net : topology_.of(NodeType::net)) {
        const Port other = portOf(net);
        if (kinds[other] != kinds[own] || uses_[own] < uses_[other] + 2) continue;
        if (!topology_.node(net).net.collective && topology_.node(channel.netIn).net.collective) {
          continue;
        }
        if (!couldMove(channel, net)) continue;
        violated("channel {} shares {} with {} others; {}, as fast and as near, serves {}", number_,
                 topology_.nameOf(channel.netIn), uses_[own] - 1, topology_.nameOf(net),
                 uses_[other]);
        return;
      }
    }
  }

  std::pair<int, int> opposite(const Hop& hop) const {
    const Link& link = topology_.node(hop.node).links[static_cast<size_t>(hop.link)];
    const auto& back = topology_.node(link.to).links;
    int number = 0;
    while (back[static_cast<size_t>(number)].to != hop.node ||
           back[static_cast<size_t>(number)].type != link.type) {
      ++number;
    }
    return {link.to, number};
  }

  bool couldMove(const Channel& channel, int net) const {
    auto loads = loads_;
    std::vector<std::pair<int, int>> touched;
    for (const PathUse& use : traffic_.all(channel)) {
      if (!use.isNetwork()) continue;
      for (const Hop& hop : machine_.paths.hops(use.from, use.to)) {
        loads[{hop.node, hop.link}] -= use.speed;
      }
      const bool sends = use.kind == PathUse::Kind::gpuToPort;
      const int from = sends ? use.from : net, to = sends ? net : use.to;
      if (machine_.path(from, to).type > graph_.typeInter) return false;
      if (isTree(graph_.pattern) && machine_.path(to, from).type > graph_.typeInter) return false;
      for (const Hop& hop : machine_.paths.hops(from, to)) {
        loads[{hop.node, hop.link}] += use.speed;
        touched.emplace_back(hop.node, hop.link);
        touched.push_back(opposite(hop));
      }
    }
    // Only with room to spare: planning adds to what flows through some CPUs and to old GPUs.
    for (const auto& place : touched) {
      const Link& link = topology_.node(place.first).links[static_cast<size_t>(place.second)];
      if (loads[place] * 3 > link.bandwidth * 2) return false;
    }
    return true;
  }

  const ChannelGraph& graph_;
  const Machine& machine_;
  const Topology& topology_;
  const ChannelTraffic traffic_;
  size_t number_ = 0;
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
