// SPDX-License-Identifier: Apache-2.0
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
    // The type of a path depends on the part between NIC and GPU.
    case LinkType::network:
      return PathType::loc;
  }
  return PathType::dis;
}

bool isBase(NodeType type) {
  return type == NodeType::gpu || type == NodeType::net || type == NodeType::cpu ||
         type == NodeType::nvs;
}

// The type of two paths that follow each other. PCI on one side of a CPU and the chip-to-chip link
// on the other are a type of their own.
PathType mergedType(PathType a, PathType b) {
  if (std::min(a, b) == PathType::c2c && std::max(a, b) == PathType::phb) return PathType::p2c;
  return std::max(a, b);
}

}  // namespace

PathTable::PathTable(const Topology& topology, const PathSettings& settings)
    : nodes_(topology.nodes.size()), baseNumber_(nodes_, -1), near_(nodes_) {
  OppositeLinks opposite(nodes_);
  std::vector<int> bases;
  for (int node = 0; node < static_cast<int>(nodes_); node++) {
    if (isBase(topology.node(node).type)) {
      baseNumber_[static_cast<size_t>(node)] = static_cast<int>(bases.size());
      bases.push_back(node);
    }
    for (const Link& link : topology.node(node).links) {
      const auto& back = topology.node(link.to).links;
      const auto found = std::find_if(back.begin(), back.end(), [&](const Link& other) {
        return other.to == node && other.type == link.type;
      });
      opposite[static_cast<size_t>(node)].push_back(
          found == back.end() ? -1 : static_cast<int>(found - back.begin()));
    }
  }
  bases_ = bases.size();
  wires_.resize(bases_ * nodes_);
  final_.resize(bases_ * bases_);
  for (const int base : bases) spread(topology, settings, opposite, base);
  for (const int to : bases) {
    for (const int from : bases) final_[finalIndex(from, to)] = wirePath(from, to);
  }
  findNearest(topology);
  applyPeerRules(topology, settings);
  applyNetRules(topology, settings);
}

void PathTable::spread(const Topology& topology, const PathSettings& settings,
                       const OppositeLinks& opposite, int base) {
  Wire* const to = &wires_[wireIndex(0, base)];
  to[base].type = PathType::loc;
  to[base].bandwidth = kLocalBandwidth;
  std::vector<int> layer{base}, next;
  std::vector<bool> isNext(nodes_, false);
  while (!layer.empty()) {
    next.clear();
    for (const int at : layer) {
      const Node& node = topology.node(at);
      const Wire from = to[at];
      for (size_t number = 0; number < node.links.size(); number++) {
        const Link& link = node.links[number];
        const Node& far = topology.node(link.to);
        // Through a GPU only from NVLink to NVLink, and only one.
        if (at != base && node.type == NodeType::gpu &&
            (settings.nvbDisable || link.type != LinkType::nvlink || far.type != NodeType::gpu ||
             from.hops > 1)) {
          continue;
        }
        Wire& known = to[link.to];
        const bool isNew = known.type == PathType::dis;
        const int back = opposite[static_cast<size_t>(at)][number];
        if (back < 0) continue;
        const Bandwidth bandwidth =
            std::min(from.bandwidth, far.links[static_cast<size_t>(back)].bandwidth);
        if (!isNew && (known.hops <= from.hops || known.bandwidth >= bandwidth)) continue;

        PathType type = typeOf(link.type);
        bool chipLink = from.chipLink || link.type == LinkType::c2c;
        if (node.type == NodeType::pci && far.type == NodeType::pci) type = PathType::pxb;
        if (link.type == LinkType::pci &&
            (node.type == NodeType::cpu || far.type == NodeType::cpu)) {
          type = PathType::phb;
        }
        if (at != base && node.type == NodeType::gpu && type == PathType::nvl) type = PathType::nvb;
        type = std::max(type, from.type);
        // PCI on one side of a CPU and the chip-to-chip link on the other.
        if (type == PathType::phb && chipLink) type = PathType::p2c;
        known = {bandwidth, back, at, static_cast<int16_t>(from.hops + 1), type, chipLink};
        if (!isNext[static_cast<size_t>(link.to)]) next.push_back(link.to);
        isNext[static_cast<size_t>(link.to)] = true;
      }
    }
    for (const int node : next) isNext[static_cast<size_t>(node)] = false;
    std::sort(next.begin(), next.end());
    layer.swap(next);
  }
}

void PathTable::findNearest(const Topology& topology) {
  for (const auto& [own, others] :
       {std::pair(NodeType::gpu, NodeType::net), std::pair(NodeType::net, NodeType::gpu)}) {
    for (const int node : topology.of(own)) {
      std::vector<int>& near = near_[static_cast<size_t>(node)];
      std::tuple<Bandwidth, PathType> best;
      for (const int other : topology.of(others)) {
        const Path path = wirePath(node, other);
        if (path.type == PathType::dis) continue;
        const std::tuple quality(-path.bandwidth, path.type);
        if (!near.empty() && quality > best) continue;
        if (!near.empty() && quality < best) near.clear();
        best = quality;
        near.push_back(other);
      }
    }
  }
}

void PathTable::divert(const Topology& topology, int from, int via, int to) {
  const Path first = wirePath(from, via);
  const Path second = wirePath(via, to);
  Path& path = final_[finalIndex(from, to)];
  path.type = mergedType(first.type, second.type);
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
      if (!checkSharedMemory(topology, settings, a, b).allowed) {
        final_[finalIndex(a, b)].type = PathType::net;
      }
    }
  }
}

void PathTable::applyNetRules(const Topology& topology, const PathSettings& settings) {
  for (const int gpu : topology.of(NodeType::gpu)) {
    const int cpu = localCpu(topology, *this, gpu);
    for (const int net : topology.of(NodeType::net)) {
      if (wirePath(gpu, net).type == PathType::dis) continue;
      const PxnVerdict pxn = checkPxn(topology, *this, settings, gpu, net);
      if (pxn.used) divert(topology, gpu, pxn.through, net);
      // Both directions by the rule for writes, as in NCCL (docs/decisions/0007).
      if (cpu < 0 || checkGdr(topology, *this, settings, gpu, net, false).allowed) continue;
      if (!pxn.used) divert(topology, gpu, cpu, net);
      divert(topology, net, cpu, gpu);
    }
  }
}

void PathTable::appendWire(int from, int to, std::vector<Hop>& hops) const {
  while (from != to) {
    const Wire& wire = wires_[wireIndex(from, to)];
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
    const Path path = paths.wirePath(node, cpu);
    if (path.type == PathType::dis) continue;
    if (best < 0 || path.hops < paths.wirePath(node, best).hops) best = cpu;
  }
  return best;
}

PathType distanceToGpus(const Topology& topology, const PathTable& paths, int net) {
  PathType nearest = PathType::dis;
  for (const int gpu : topology.of(NodeType::gpu)) {
    nearest = std::min(nearest, std::max(paths.path(net, gpu).type, paths.path(gpu, net).type));
  }
  return nearest;
}

}  // namespace unisono::topology
