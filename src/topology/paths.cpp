#include "topology/paths.h"

#include <algorithm>
#include <tuple>

#include "topology/checks.h"

namespace unisono::topology {

namespace {

PathType typeOf(LinkType type) {
  switch (type) {
    case LinkType::local:
      return PathType::loc;
    case LinkType::nvlink:
      return PathType::nvl;
    case LinkType::c2c:
      return PathType::c2c;
    case LinkType::pci:
      return PathType::pix;
    case LinkType::system:
      return PathType::sys;
    // Paths are told apart by the way between NIC and GPU.
    case LinkType::network:
      return PathType::loc;
  }
  return PathType::dis;
}

bool isBase(NodeType type) {
  return type == NodeType::gpu || type == NodeType::net || type == NodeType::cpu ||
         type == NodeType::nvs;
}

}  // namespace

PathTable::PathTable(const Topology& topology, const PathSettings& settings)
    : count_(topology.nodes.size()), wires_(count_ * count_), final_(count_ * count_) {
  for (int base = 0; base < static_cast<int>(count_); ++base)
    if (isBase(topology.node(base).type)) spread(topology, settings, base);
  for (std::size_t i = 0; i < wires_.size(); ++i) final_[i] = wires_[i].path;
  applyPeerRules(topology, settings);
  applyNetRules(topology, settings);
}

void PathTable::spread(const Topology& topology, const PathSettings& settings, int base) {
  Wire* const to = &wires_[index(0, base)];
  to[base].path = {PathType::loc, kLocalBandwidth, 0, -1};
  std::vector<int> layer{base}, next;
  while (!layer.empty()) {
    next.clear();
    for (const int at : layer) {
      const Node& node = topology.node(at);
      const Wire from = to[at];
      for (const Link& link : node.links) {
        const Node& far = topology.node(link.to);
        // Through a GPU only from NVLink to NVLink, and only one.
        if (at != base && node.type == NodeType::gpu &&
            (settings.nvbDisable || link.type != LinkType::nvlink || far.type != NodeType::gpu ||
             from.path.hops > 1))
          continue;
        Wire& known = to[link.to];
        const bool isNew = known.path.type == PathType::dis;
        const auto back = std::find_if(far.links.begin(), far.links.end(), [&](const Link& other) {
          return other.to == at && other.type == link.type;
        });
        if (back == far.links.end()) continue;
        const Bandwidth bandwidth = std::min(from.path.bandwidth, back->bandwidth);
        if (!isNew && (known.path.hops <= from.path.hops || known.path.bandwidth >= bandwidth))
          continue;

        PathType type = typeOf(link.type);
        bool chipLink = from.chipLink || link.type == LinkType::c2c;
        if (node.type == NodeType::pci && far.type == NodeType::pci) type = PathType::pxb;
        if (link.type == LinkType::pci && (node.type == NodeType::cpu || far.type == NodeType::cpu))
          type = PathType::phb;
        if (at != base && node.type == NodeType::gpu && type == PathType::nvl) type = PathType::nvb;
        type = std::max(type, from.path.type);
        // PCI on one side of a CPU and the chip-to-chip link on the other.
        if (type == PathType::phb && chipLink) type = PathType::p2c;
        known.path = {type, bandwidth, from.path.hops + 1, -1};
        known.nextLink = static_cast<int>(back - far.links.begin());
        known.nextNode = at;
        known.chipLink = chipLink;
        if (std::find(next.begin(), next.end(), link.to) == next.end()) next.push_back(link.to);
      }
    }
    std::sort(next.begin(), next.end());
    layer.swap(next);
  }
}

void PathTable::divert(const Topology& topology, int from, int via, int to) {
  const Path& first = wirePath(from, via);
  const Path& second = wirePath(via, to);
  Path& path = final_[index(from, to)];
  path.type = std::max(first.type, second.type);
  if (topology.node(via).type == NodeType::gpu) path.type = PathType::pxn;
  path.bandwidth = std::min(first.bandwidth, second.bandwidth);
  path.hops = first.hops + second.hops;
  path.via = via;
}

void PathTable::applyPeerRules(const Topology& topology, const PathSettings& settings) {
  for (const int a : topology.of(NodeType::gpu)) {
    for (const int b : topology.of(NodeType::gpu)) {
      if (a == b) continue;
      if (checkPeer(topology, *this, settings, a, b).allowed) continue;
      const int cpu = localCpu(topology, *this, b);
      if (cpu >= 0 && wirePath(a, cpu).type != PathType::dis) divert(topology, a, cpu, b);
      if (!checkSharedMemory(topology, settings, a, b).allowed)
        final_[index(a, b)].type = PathType::net;
    }
  }
}

void PathTable::applyNetRules(const Topology& topology, const PathSettings& settings) {
  for (const int gpu : topology.of(NodeType::gpu)) {
    for (const int net : topology.of(NodeType::net)) {
      if (wirePath(gpu, net).type == PathType::dis) continue;
      const PxnVerdict pxn = checkPxn(topology, *this, settings, gpu, net);
      if (pxn.used) divert(topology, gpu, pxn.through, net);
      const int cpu = localCpu(topology, *this, gpu);
      if (cpu < 0) continue;
      if (!pxn.used && !checkGdr(topology, *this, settings, gpu, net, true).allowed)
        divert(topology, gpu, cpu, net);
      if (!checkGdr(topology, *this, settings, gpu, net, false).allowed)
        divert(topology, net, cpu, gpu);
    }
  }
}

void PathTable::appendWire(int from, int to, std::vector<Hop>& hops) const {
  while (from != to) {
    const Wire& wire = wires_[index(from, to)];
    if (wire.nextLink < 0) return;
    hops.push_back({from, wire.nextLink});
    from = wire.nextNode;
  }
}

std::vector<Hop> PathTable::hops(int from, int to) const {
  std::vector<Hop> hops;
  const int via = path(from, to).via;
  if (via >= 0) appendWire(from, via, hops);
  appendWire(via >= 0 ? via : from, to, hops);
  return hops;
}

int localCpu(const Topology& topology, const PathTable& paths, int node) {
  int best = -1;
  for (const int cpu : topology.of(NodeType::cpu)) {
    const Path& path = paths.wirePath(node, cpu);
    if (path.type == PathType::dis) continue;
    if (best < 0 || path.hops < paths.wirePath(node, best).hops) best = cpu;
  }
  return best;
}

std::vector<int> nearest(const Topology& topology, const PathTable& paths, int node,
                         NodeType type) {
  std::vector<int> best;
  const auto quality = [&](int other) {
    const Path& path = paths.wirePath(node, other);
    return std::tuple(path.type, -path.bandwidth);
  };
  for (const int other : topology.of(type)) {
    if (other == node || paths.wirePath(node, other).type == PathType::dis) continue;
    if (!best.empty() && quality(other) > quality(best.front())) continue;
    if (!best.empty() && quality(other) < quality(best.front())) best.clear();
    best.push_back(other);
  }
  return best;
}

}  // namespace unisono::topology
