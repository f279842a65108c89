// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <set>

#include "topo_view.h"

// What `unisono topo` warns of.
namespace unisono::topo {

using namespace topology;

namespace {

bool hasNvlink(const Topology& topology, int gpu) {
  const auto& links = topology.node(gpu).links;
  return std::any_of(links.begin(), links.end(),
                     [](const Link& link) { return link.type == LinkType::nvlink; });
}

void warnOfGpusWithoutNvlink(const View& view, std::vector<std::string>& warnings) {
  const Topology& topology = view.whole.topology;
  std::vector<int> without;
  for (const int gpu : topology.of(NodeType::gpu)) {
    if (!hasNvlink(topology, gpu)) without.push_back(gpu);
  }
  const size_t with = topology.of(NodeType::gpu).size() - without.size();
  // Where most GPUs have none, the others may be pairs with a bridge.
  if (without.empty() || with <= without.size()) return;
  const bool one = without.size() == 1;
  warnings.push_back(
      fmt::format("{} {} no NVLink, the other {} have: {} the network or the CPU. Look at "
                  "nvidia-smi nvlink --status and at the fabric manager",
                  namesText(topology, without), one ? "has" : "have", counted(with, "GPU"),
                  one ? "it reaches them only over" : "they reach them only over"));
}

void warnOfMissingPorts(const View& view, std::vector<std::string>& warnings) {
  if (view.joined.nodes() == 1) return;
  const bool missing = std::any_of(
      view.domains.begin(), view.domains.end(),
      [](const Domain& domain) { return domain.machine.topology.of(NodeType::net).empty(); });
  if (!missing) return;
  warnings.push_back(fmt::format(
      "no NET port can be reached, so no data can get across the {} nodes: the channels "
      "below are those inside a node",
      view.joined.nodes()));
}

// Warns of ports that no ring uses although they are as fast and as near to a GPU as those in use,
// unless the rings already carry what the links of one GPU can.
void warnOfIdlePorts(const View& view, std::vector<std::string>& warnings) {
  if (view.joined.nodes() == 1) return;
  std::set<int> used;
  Bandwidth slowest = std::numeric_limits<Bandwidth>::max();
  for (const Domain& domain : view.domains) {
    for (const Channel& channel : domain.graphs.ring.channels) {
      for (const int net : {channel.netIn, channel.netOut}) {
        if (net < 0) continue;
        used.insert(wholeIndex(view, domain.machine.topology, net));
        slowest = std::min(slowest, domain.machine.topology.node(net).net.bandwidth);
      }
    }
  }
  const Topology& topology = view.whole.topology;
  std::set<int> idleSet;
  for (const Domain& domain : view.domains) {
    const ChannelGraph& ring = domain.graphs.ring;
    const Topology& own = domain.machine.topology;
    if (10 * ring.totalInter() >= 9 * bandwidthBounds(domain.machine).widestGpu) continue;
    for (const int net : own.of(NodeType::net)) {
      const int port = wholeIndex(view, own, net);
      const auto& gpus = own.of(NodeType::gpu);
      const bool near = std::any_of(gpus.begin(), gpus.end(), [&](int gpu) {
        return domain.machine.path(net, gpu).type <= ring.typeInter;
      });
      const bool fast = topology.node(port).net.bandwidth >= slowest;
      if (near && fast && !used.contains(port)) idleSet.insert(port);
    }
  }
  const std::vector<int> idle(idleSet.begin(), idleSet.end());
  if (idle.empty()) return;
  warnings.push_back(fmt::format("{} of {} {} idle, no ring uses {}: {}", idle.size(),
                                 counted(topology.of(NodeType::net).size(), "NET port"),
                                 idle.size() == 1 ? "is" : "are", idle.size() == 1 ? "it" : "them",
                                 namesText(topology, idle)));
}

void warnOfSlowTrees(const View& view, std::vector<std::string>& warnings) {
  for (const Domain& domain : view.domains) {
    const ChannelGraph &ring = domain.graphs.ring, &tree = domain.graphs.tree;
    if (ring.channels.empty() || tree.channels.empty()) continue;
    const bool network = ring.channels.front().netIn >= 0;
    const Bandwidth ringTotal = network ? ring.totalInter() : ring.totalIntra();
    const Bandwidth treeTotal = network ? tree.totalInter() : tree.totalIntra();
    if (2 * treeTotal >= ringTotal) continue;
    warnings.push_back(
        fmt::format("trees carry {:g} GB/s {}, rings {:g} GB/s", toGigabytes(treeTotal),
                    network ? "to the network" : "between GPUs", toGigabytes(ringTotal)));
  }
}

}  // namespace

std::vector<std::string> findWarnings(const View& view) {
  std::vector<std::string> warnings;
  warnOfGpusWithoutNvlink(view, warnings);
  warnOfMissingPorts(view, warnings);
  warnOfIdlePorts(view, warnings);
  warnOfSlowTrees(view, warnings);
  return warnings;
}

}  // namespace unisono::topo
