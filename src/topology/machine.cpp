// SPDX-License-Identifier: Apache-2.0
#include "topology/machine.h"

#include <algorithm>
#include <set>

#include "base/error.h"

namespace unisono::topology {

namespace {

// For each node its domain. GPUs of one domain all reach each other without the network; a GPU
// joins the first domain that it fits, so every rank sees the same domains.
std::vector<int> domainsOf(const Machine& machine) {
  std::vector<int> domain(machine.topology.nodes.size(), -1);
  std::vector<std::vector<int>> domains;
  const auto reaches = [&](int a, int b) {
    return machine.path(a, b).type < PathType::net && machine.path(b, a).type < PathType::net;
  };
  for (const int gpu : machine.topology.of(NodeType::gpu)) {
    const auto home = std::find_if(domains.begin(), domains.end(), [&](const auto& members) {
      return std::all_of(members.begin(), members.end(),
                         [&](int member) { return reaches(gpu, member); });
    });
    domain[static_cast<size_t>(gpu)] = static_cast<int>(home - domains.begin());
    if (home == domains.end()) {
      domains.push_back({gpu});
    } else {
      home->push_back(gpu);
    }
  }
  return domain;
}

// One line for each neighbour, with all links to it: a GPU may have a PCI and a chip-to-chip link.
void describeNode(const Topology& topology, int index, int parent, int depth, std::string& text) {
  const Node& node = topology.node(index);
  std::set<int> seen = {parent};
  for (const Link& first : node.links) {
    if (!seen.insert(first.to).second) continue;
    bool child = false;
    std::string links;
    for (const Link& link : node.links) {
      if (link.to != first.to) continue;
      child |= link.type == LinkType::pci || link.type == LinkType::network;
      links += fmt::format("{}{:g} {}", links.empty() ? "" : ", ", toGigabytes(link.bandwidth),
                           nameOf(link.type));
    }
    text += fmt::format("{:{}}{} {} {}\n", "", depth * 2 + 2, child ? "+" : "-", links,
                        topology.nameOf(first.to));
    if (child && node.type != NodeType::net && topology.node(first.to).type != NodeType::cpu) {
      describeNode(topology, first.to, index, depth + 1, text);
    }
  }
}

}  // namespace

Machine trimMachine(const Topology& topology, const PathSettings& settings, int rank,
                    int rankCount) {
  std::vector<bool> keep(topology.nodes.size(), true);
  for (const int gpu : topology.of(NodeType::gpu)) {
    keep[static_cast<size_t>(gpu)] = topology.node(gpu).gpu.rank >= 0;
  }
  Machine whole(subTopology(topology, keep), settings);

  const auto& gpus = whole.topology.of(NodeType::gpu);
  const int own = rank < 0 && !gpus.empty() ? gpus.front() : whole.topology.gpuOfRank(rank);
  if (own < 0) throw invalidArgument("the topology has no GPU of rank {}", rank);
  const std::vector<int> domain = domainsOf(whole);
  keep.assign(whole.topology.nodes.size(), true);
  int kept = 0;
  for (const int gpu : gpus) {
    const bool mine = domain[static_cast<size_t>(gpu)] == domain[static_cast<size_t>(own)];
    keep[static_cast<size_t>(gpu)] = mine;
    kept += mine;
  }
  const bool local = kept == rankCount;
  // A port that none of our GPUs reaches carries nothing for us.
  for (const int net : whole.topology.of(NodeType::net)) {
    bool reached = false;
    for (const int gpu : gpus) {
      reached |= keep[static_cast<size_t>(gpu)] && whole.path(gpu, net).type < PathType::net &&
                 whole.path(net, gpu).type < PathType::net;
    }
    keep[static_cast<size_t>(net)] = reached && !local;
  }
  if (local) {
    for (const int nic : whole.topology.of(NodeType::nic)) {
      keep[static_cast<size_t>(nic)] = false;
    }
  }
  if (std::find(keep.begin(), keep.end(), false) == keep.end()) return whole;
  return Machine(subTopology(whole.topology, keep), settings);
}

BandwidthBounds bandwidthBounds(const Machine& machine) {
  const Topology& topology = machine.topology;
  const auto& gpus = topology.of(NodeType::gpu);
  const auto& nets = topology.of(NodeType::net);
  BandwidthBounds bounds;
  if (nets.empty() && gpus.size() == 1) return {kLocalBandwidth, kLocalBandwidth};
  for (const int gpu : gpus) {
    for (const int peer : nets.empty() ? gpus : nets) {
      if (peer != gpu && machine.path(gpu, peer).type < PathType::net) {
        bounds.widestPath = std::max(bounds.widestPath, machine.path(gpu, peer).bandwidth);
      }
    }
    Bandwidth nvlink = 0, other = 0;
    for (const Link& link : topology.node(gpu).links) {
      if (link.type == LinkType::nvlink) {
        nvlink += link.bandwidth;
      } else {
        other = std::max(other, link.bandwidth);
      }
    }
    bounds.widestGpu = std::max({bounds.widestGpu, nvlink, other});
  }
  return bounds;
}

namespace {

// The cores near a GPU or a port.
std::string affinityNear(const Machine& machine, int node) {
  const int cpu = localCpu(machine.topology, machine.paths, node);
  return cpu < 0 ? std::string() : machine.topology.node(cpu).cpu.affinity;
}

}  // namespace

std::string cpuAffinityOf(const Machine& machine, int rank) {
  const int gpu = machine.topology.gpuOfRank(rank);
  return gpu < 0 ? std::string() : affinityNear(machine, gpu);
}

std::string portAffinityOf(const Machine& machine, int rank) {
  const int gpu = machine.topology.gpuOfRank(rank);
  if (gpu < 0) return {};
  const std::vector<int>& ports = machine.paths.nearest(gpu);
  return affinityNear(machine, ports.empty() ? gpu : ports.front());
}

std::string describeTopology(const Machine& machine) {
  const BandwidthBounds bounds = bandwidthBounds(machine);
  std::string text = fmt::format("widest path {:g} GB/s, widest GPU {:g} GB/s\n",
                                 toGigabytes(bounds.widestPath), toGigabytes(bounds.widestGpu));
  for (const int cpu : machine.topology.of(NodeType::cpu)) {
    text += machine.topology.nameOf(cpu);
    if (machine.topology.node(cpu).cpu.numa < 0) text += " (NUMA node unknown)";
    text += "\n";
    describeNode(machine.topology, cpu, -1, 0, text);
  }
  return text;
}

std::string describePaths(const Machine& machine) {
  const Topology& topology = machine.topology;
  std::vector<int> rows = topology.of(NodeType::gpu);
  std::vector<int> columns = rows;
  const auto& nets = topology.of(NodeType::net);
  rows.insert(rows.end(), nets.begin(), nets.end());
  columns.insert(columns.end(), nets.begin(), nets.end());
  size_t width = 12;
  for (const int node : columns) width = std::max(width, topology.nameOf(node).size());
  std::string text = fmt::format("{:{}}", "", width);
  for (const int to : columns) text += fmt::format("  {:>{}}", topology.nameOf(to), width);
  text += "\n";
  for (const int from : rows) {
    text += fmt::format("{:{}}", topology.nameOf(from), width);
    for (const int to : columns) {
      const Path& path = machine.path(from, to);
      std::string cell = fmt::format("{} {:g}", nameOf(path.type), toGigabytes(path.bandwidth));
      if (path.type == PathType::loc || path.type >= PathType::net) cell = nameOf(path.type);
      text += fmt::format("  {:>{}}", cell, width);
    }
    text += "\n";
  }
  return text;
}

}  // namespace unisono::topology
