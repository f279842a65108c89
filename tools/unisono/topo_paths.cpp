// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "topo_view.h"

// The paths section of `unisono topo`.
namespace unisono::topo {

using namespace topology;

namespace {

bool sameKind(const Path& a, const Path& b) {
  return a.type == b.type && a.bandwidth == b.bandwidth;
}

std::string pathText(const Path& path) {
  if (path.type == PathType::loc || path.type >= PathType::net) {
    return std::string(nameOf(path.type));
  }
  return fmt::format("{} {:g}", nameOf(path.type), toGigabytes(path.bandwidth));
}

// GPUs with equal paths to each other and to all other GPUs.
std::vector<std::vector<int>> groupGpus(const Machine& machine) {
  const auto& gpus = machine.topology.of(NodeType::gpu);
  std::vector<std::vector<int>> groups;
  for (const int gpu : gpus) {
    const auto belongs = [&](const std::vector<int>& group) {
      const int first = group.front();
      const Path& inside =
          group.size() > 1 ? machine.path(first, group[1]) : machine.path(first, gpu);
      return sameKind(machine.path(first, gpu), inside) &&
             sameKind(machine.path(gpu, first), inside) &&
             std::all_of(gpus.begin(), gpus.end(), [&](int other) {
               return other == gpu || other == first ||
                      sameKind(machine.path(gpu, other), machine.path(first, other));
             });
    };
    const auto home = std::find_if(groups.begin(), groups.end(), belongs);
    if (home == groups.end()) {
      groups.push_back({gpu});
    } else {
      home->push_back(gpu);
    }
  }
  return groups;
}

// The paths from one node to `targets`, the best first: "NET/0 PIX 48; other ports PXN 48".
std::string targetsText(const Machine& machine, int from, const std::vector<int>& targets) {
  const Topology& topology = machine.topology;
  const bool gpus = topology.node(targets.front()).type == NodeType::gpu;
  std::vector<std::vector<int>> groups;
  for (const int to : targets) {
    const auto known = std::find_if(groups.begin(), groups.end(), [&](const auto& group) {
      return sameKind(machine.path(from, group.front()), machine.path(from, to));
    });
    if (known == groups.end()) {
      groups.push_back({to});
    } else {
      known->push_back(to);
    }
  }
  std::stable_sort(groups.begin(), groups.end(), [&](const auto& a, const auto& b) {
    const Path &first = machine.path(from, a.front()), &second = machine.path(from, b.front());
    return first.type != second.type ? first.type < second.type
                                     : first.bandwidth > second.bandwidth;
  });
  std::vector<std::string> parts;
  for (const std::vector<int>& group : groups) {
    const bool rest = groups.size() > 1 && &group == &groups.back();
    const std::string names = !rest  ? namesText(topology, group)
                              : gpus ? "other GPUs"
                                     : "other ports";
    parts.push_back(fmt::format("{} {}", names, pathText(machine.path(from, group.front()))));
  }
  return fmt::format("{}", fmt::join(parts, "; "));
}

// A line for all of `sources` that have the same paths to `targets`.
std::string linesText(const Machine& machine, const std::vector<int>& sources,
                      const std::vector<int>& targets) {
  std::vector<std::pair<std::vector<int>, std::string>> lines;
  for (const int from : sources) {
    std::string text = targetsText(machine, from, targets);
    const auto known = std::find_if(lines.begin(), lines.end(),
                                    [&](const auto& line) { return line.second == text; });
    if (known == lines.end()) {
      lines.push_back({{from}, std::move(text)});
    } else {
      known->first.push_back(from);
    }
  }
  std::string text;
  for (const auto& [from, line] : lines) {
    text += wrapped(fmt::format("{} to {}", namesText(machine.topology, from), line), 4) + "\n";
  }
  return text;
}

std::string_view meaningOf(PathType type) {
  switch (type) {
    case PathType::loc:
      return "the same device";
    case PathType::nvl:
      return "NVLink";
    case PathType::nvb:
      return "NVLink through another GPU";
    case PathType::c2c:
      return "chip-to-chip link between GPU and CPU";
    case PathType::pix:
      return "at most one PCI switch";
    case PathType::pxb:
      return "several PCI switches";
    case PathType::p2c:
      return "chip-to-chip link to the CPU, then PCI";
    case PathType::pxn:
      return "NVLink to another GPU near the port, then PCI";
    case PathType::phb:
      return "through a CPU";
    case PathType::sys:
      return "through the link between CPUs";
    case PathType::net:
      return "over the network only";
    case PathType::dis:
      break;
  }
  return "not connected";
}

std::string legendText(const Machine& machine) {
  std::vector<int> ends = machine.topology.of(NodeType::gpu);
  const size_t gpus = ends.size();
  const auto& nets = machine.topology.of(NodeType::net);
  ends.insert(ends.end(), nets.begin(), nets.end());
  std::set<PathType> used;
  for (size_t i = 0; i < ends.size(); i++) {
    for (size_t j = 0; j < ends.size(); j++) {
      if (i != j && (i < gpus || j < gpus)) used.insert(machine.path(ends[i], ends[j]).type);
    }
  }
  std::vector<std::string> parts;
  for (const PathType type : used) {
    parts.push_back(fmt::format("{} {}", nameOf(type), meaningOf(type)));
  }
  if (parts.empty()) return "";
  return wrapped(fmt::format("Path types: {}", fmt::join(parts, "; ")), 2) + "\n";
}

}  // namespace

std::string pathsText(const Machine& machine) {
  const Topology& topology = machine.topology;
  const auto& gpus = topology.of(NodeType::gpu);
  const auto& nets = topology.of(NodeType::net);
  std::string text;
  for (const std::vector<int>& group : groupGpus(machine)) {
    std::vector<int> others;
    for (const int gpu : gpus) {
      if (std::find(group.begin(), group.end(), gpu) == group.end()) others.push_back(gpu);
    }
    std::string line = namesText(topology, group);
    if (group.size() > 1) line += " each other: " + pathText(machine.path(group[0], group[1]));
    if (!others.empty()) {
      line += (group.size() > 1 ? "; to " : " to ") + targetsText(machine, group.front(), others);
    }
    if (gpus.size() > 1) text += wrapped(line, 4) + "\n";
  }
  if (!nets.empty()) text += linesText(machine, gpus, nets) + linesText(machine, nets, gpus);
  return text + legendText(machine);
}

}  // namespace unisono::topo
