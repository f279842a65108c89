// SPDX-License-Identifier: Apache-2.0
#include "topology/search_space.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace unisono::topology {

// Takes `speed` from the first `count` links of a route; gives back with a negative speed. Stops
// at a link that has too little and returns how many it served.
size_t LinkBudget::load(const Route& route, Bandwidth speed, size_t count) {
  for (size_t i = 0; i < count; i++) {
    const Route::Load& hop = route.loads[i];
    const Bandwidth need = hop.pci && route.intelPeer ? intelPeerLoad(speed) : speed;
    const Bandwidth reverseNeed = hop.reverse >= 0 ? need * hop.reverseEighths / 8 : 0;
    Bandwidth& forward = links_[static_cast<size_t>(hop.link)];
    if (forward < need) return i;
    if (hop.reverse >= 0) {
      Bandwidth& reverse = links_[static_cast<size_t>(hop.reverse)];
      if (reverse < reverseNeed) return i;
      reverse -= reverseNeed;
    }
    forward -= need;
  }
  return count;
}

bool LinkBudget::take(const Route& route, Bandwidth speed) {
  const size_t served = load(route, speed, route.loads.size());
  if (served == route.loads.size()) return true;
  load(route, -speed, served);
  return false;
}

void LinkBudget::giveBack(const Route& route, Bandwidth speed) {
  load(route, -speed, route.loads.size());
}

SearchSpace::SearchSpace(const Machine& machine) : machine_(machine) {
  const Topology& topology = machine.topology;
  gpuNodes_ = topology.of(NodeType::gpu);
  netNodes_ = topology.of(NodeType::net);
  gpus_ = static_cast<int>(gpuNodes_.size());
  nets_ = static_cast<int>(netNodes_.size());
  for (int gpu = 0; gpu < gpus_; gpu++) gpuPositions_.push_back(gpu);
  hasSwitch_ = !topology.of(NodeType::nvs).empty();
  lowestSm_ = topology.lowestSm();

  for (const Node& node : topology.nodes) {
    firstLink_.push_back(static_cast<int>(linkBandwidth_.size()));
    for (const Link& link : node.links) linkBandwidth_.push_back(link.bandwidth);
  }
  for (const int gpu : gpuNodes_) {
    Bandwidth pci = 0;
    for (const Link& link : topology.node(gpu).links) {
      if (link.type == LinkType::pci) pci = std::max(pci, link.bandwidth);
    }
    pciOut_.push_back(pci);
  }

  for (const int from : gpuNodes_) {
    for (const int to : gpuNodes_) between_.push_back(makeRoute(from, to));
  }
  for (const int gpu : gpuNodes_) {
    for (const int net : netNodes_) {
      toNet_.push_back(makeRoute(gpu, net));
      fromNet_.push_back(makeRoute(net, gpu));
    }
  }
  if (hasSwitch_) {
    const int nvSwitch = topology.of(NodeType::nvs).front();
    for (const int gpu : gpuNodes_) {
      toSwitch_.push_back(makeRoute(gpu, nvSwitch));
      fromSwitch_.push_back(makeRoute(nvSwitch, gpu));
    }
  }

  std::map<std::tuple<int, uint64_t, int>, int> ports;
  for (const int net : netNodes_) {
    const Node& node = topology.node(net);
    const auto [entry, isNew] = ports.try_emplace({node.host, node.net.guid, node.net.port},
                                                  static_cast<int>(portBandwidth_.size()));
    if (isNew) portBandwidth_.push_back(0);
    Bandwidth& bandwidth = portBandwidth_[static_cast<size_t>(entry->second)];
    bandwidth = std::max(bandwidth, node.net.bandwidth);
    ports_.push_back(entry->second);
  }

  std::vector<int> position(topology.nodes.size(), -1);
  for (const auto* nodes : {&gpuNodes_, &netNodes_}) {
    for (size_t i = 0; i < nodes->size(); i++) {
      position[static_cast<size_t>((*nodes)[i])] = static_cast<int>(i);
    }
  }
  const auto nearestTo = [&](int node) {
    std::vector<int> result;
    for (const int other : machine.paths.nearest(node)) {
      result.push_back(position[static_cast<size_t>(other)]);
    }
    return result;
  };
  for (const int net : netNodes_) localGpus_.push_back(nearestTo(net));
  for (int gpu = 0; gpu < gpus_; gpu++) {
    std::vector<int> nets = nearestTo(gpuNode(gpu));
    if (!nets.empty()) {
      // GPUs that share their nearest ports start at different ones.
      const std::vector<int>& sharers = localGpus_[static_cast<size_t>(nets.front())];
      const auto own = std::find(sharers.begin(), sharers.end(), gpu);
      if (own != sharers.end()) {
        const size_t place = static_cast<size_t>(own - sharers.begin());
        std::rotate(nets.begin(),
                    nets.begin() + static_cast<ptrdiff_t>(place * nets.size() / sharers.size()),
                    nets.end());
      }
    }
    localNets_.push_back(std::move(nets));
  }
}

Route SearchSpace::makeRoute(int from, int to) const {
  const Topology& topology = machine_.topology;
  const Path& path = machine_.path(from, to);
  Route route;
  route.type = path.type;
  route.bandwidth = path.bandwidth;
  route.hops = path.hops;
  if (path.type >= PathType::net) return route;
  const bool fromGpu = topology.node(from).type == NodeType::gpu;
  for (const Hop& hop : machine_.paths.hops(from, to)) {
    const Link& link = topology.node(hop.node).links[static_cast<size_t>(hop.link)];
    const Node& next = topology.node(link.to);
    Route::Load load;
    load.link = firstLink_[static_cast<size_t>(hop.node)] + hop.link;
    load.pci = link.type == LinkType::pci;
    // Before Ampere, what a NIC writes to a GPU slows the other direction; POWER's NVLink to the
    // CPU carries one direction at a time.
    const bool slowsGpu = next.type == NodeType::gpu && next.gpu.sm < kAmpere && !fromGpu;
    const bool halfDuplex = next.type == NodeType::cpu && link.type == LinkType::nvlink &&
                            next.cpu.architecture == CpuArchitecture::power;
    if (slowsGpu || halfDuplex) {
      load.reverseEighths = halfDuplex ? 8 : 1;
      for (size_t back = 0; back < next.links.size(); back++) {
        if (next.links[back].to == hop.node && next.links[back].type == link.type) {
          load.reverse = firstLink_[static_cast<size_t>(link.to)] + static_cast<int>(back);
        }
      }
    }
    if (fromGpu && path.type == PathType::phb && next.type == NodeType::cpu &&
        next.cpu.architecture == CpuArchitecture::x86 && next.cpu.vendor == CpuVendor::intel) {
      route.intelPeer = true;
    }
    route.loads.push_back(load);
  }
  return route;
}

const Route& SearchSpace::routeOf(const PathUse& use) const {
  switch (use.kind) {
    case PathUse::Kind::gpuToPort:
      return gpuToNet(use.from, use.to);
    case PathUse::Kind::portToGpu:
      return netToGpu(use.from, use.to);
    case PathUse::Kind::gpuToSwitch:
      return gpuToSwitch(use.from);
    case PathUse::Kind::switchToGpu:
      return switchToGpu(use.to);
    case PathUse::Kind::gpuToGpu:
      break;
  }
  return gpuToGpu(use.from, use.to);
}

const Route& SearchSpace::oppositeOf(const PathUse& use) const {
  switch (use.kind) {
    case PathUse::Kind::gpuToPort:
      return netToGpu(use.to, use.from);
    case PathUse::Kind::portToGpu:
      return gpuToNet(use.to, use.from);
    case PathUse::Kind::gpuToSwitch:
      return switchToGpu(use.from);
    case PathUse::Kind::switchToGpu:
      return gpuToSwitch(use.to);
    case PathUse::Kind::gpuToGpu:
      break;
  }
  return gpuToGpu(use.to, use.from);
}

Bandwidth SearchSpace::outOf(int gpu, PathType limit) const {
  std::vector<int> links;
  Bandwidth sum = 0;
  for (int other = 0; other < gpus_; other++) {
    const Route& route = gpuToGpu(gpu, other);
    if (other == gpu || route.type > limit || route.loads.empty()) continue;
    const int link = route.loads.front().link;
    if (std::find(links.begin(), links.end(), link) != links.end()) continue;
    links.push_back(link);
    sum += linkBandwidth_[static_cast<size_t>(link)];
  }
  return sum;
}

std::vector<int> SearchSpace::netsFor(int gpu, PathType limit) const {
  std::vector<int> found;
  std::vector<bool> seen(static_cast<size_t>(nets_), false);
  const auto add = [&](int net) {
    if (!seen[static_cast<size_t>(net)]) found.push_back(net);
    seen[static_cast<size_t>(net)] = true;
  };
  const int first = gpu < 0 ? 0 : gpu, last = gpu < 0 ? gpus_ : gpu + 1;
  // First the nearest of every GPU in turn, so that neighbours in the list belong to different
  // GPUs.
  for (size_t place = 0; place < static_cast<size_t>(nets_); place++) {
    for (int g = first; g < last; g++) {
      if (const auto& local = localNets_[static_cast<size_t>(g)]; place < local.size()) {
        if (gpu >= 0 || gpuToNet(g, local[place]).type <= limit ||
            netToGpu(local[place], g).type <= limit) {
          add(local[place]);
        }
      }
    }
  }
  for (int type = 0; type <= static_cast<int>(limit); type++) {
    for (int g = first; g < last; g++) {
      for (int net = 0; net < nets_; net++) {
        if (gpuToNet(g, net).type == static_cast<PathType>(type)) add(net);
      }
    }
  }
  return found;
}

std::vector<int> SearchSpace::nextGpus(int gpu, int net, int towardsNet,
                                       Neighbours neighbours) const {
  std::vector<int> next;
  if (hasSwitch_) {
    // Below a switch all GPUs are equally near; fixed neighbours let all channels share
    // connections.
    const int after = (gpu + 1) % gpus_, before = (gpu + gpus_ - 1) % gpus_;
    next.push_back(neighbours == Neighbours::previousThenNext ? before : after);
    if (neighbours != Neighbours::next && after != before) {
      next.push_back(neighbours == Neighbours::previousThenNext ? after : before);
    }
    std::erase_if(next, [&](int other) { return gpuToGpu(gpu, other).type >= PathType::net; });
    if (!next.empty()) return next;
  }
  struct Score {
    Bandwidth netBandwidth = 0, pci = 0;
    int netHops = 0;
    Bandwidth bandwidth = 0;
    int hops = 0, distance = 0, gpu = 0;
  };
  std::vector<Score> scores;
  for (int distance = 1; distance < gpus_; distance++) {
    const int other = (gpu + distance) % gpus_;
    const Route& route = gpuToGpu(gpu, other);
    if (route.type >= PathType::net) continue;
    Score score;
    score.bandwidth = route.bandwidth;
    score.hops = route.hops;
    score.distance = distance;
    score.gpu = other;
    if (towardsNet != 0 && net >= 0) {
      const Route& way = netToGpu(net, other);
      score.netBandwidth = way.bandwidth;
      score.netHops = way.hops;
      score.pci = pciOut_[static_cast<size_t>(other)];
    }
    scores.push_back(score);
  }
  const auto intra = [](const Score& score) { return std::tuple(-score.bandwidth, score.hops); };
  std::sort(scores.begin(), scores.end(), [&](const Score& a, const Score& b) {
    return std::tuple(-a.netBandwidth, -a.pci, a.netHops, intra(a), a.distance) <
           std::tuple(-b.netBandwidth, -b.pci, b.netHops, intra(b), b.distance);
  });
  // To keep the GPUs near the port for the end, go the other way where the GPUs are equal.
  if (towardsNet < 0 && !scores.empty() &&
      std::all_of(scores.begin(), scores.end(),
                  [&](const Score& score) { return intra(score) == intra(scores.front()); })) {
    std::reverse(scores.begin(), scores.end());
  }
  for (const Score& score : scores) next.push_back(score.gpu);
  return next;
}

}  // namespace unisono::topology
