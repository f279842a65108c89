// SPDX-License-Identifier: Apache-2.0
#include "topo_layout.h"

#include <algorithm>
#include <cmath>
#include <sstream>

namespace unisono::topo {

using namespace topology;

namespace {

constexpr double kMinBox = 84, kMaxBox = 150, kGpuHeight = 54, kPortHeight = 46;
constexpr double kGap = 10, kGroupGap = 14;
constexpr double kCpuHeight = 46, kLevel = 76;
constexpr double kFullWidth = 1240;  // boxes of small machines are widened up to this
constexpr double kMaxWidth = 1800;   // tiles are wrapped beyond this

class LayoutMaker {
 public:
  LayoutMaker(const View& view, const NamedChannels& channels)
      : view_(view),
        made_{view, view.whole.topology, channels, *channels.graph,
              equalChannels(*channels.graph)} {}

  Layout make() {
    collectLines();
    placeColumns();
    placeRows();
    return std::move(made_);
  }

 private:
  // The hops between GPUs and the lines between ports and GPUs, by numbers of the whole machine.
  void collectLines() {
    for (size_t group = 0; group < made_.groups.size(); group++) {
      const Channel& channel = made_.channelOf(group);
      std::vector<int> gpus;
      for (const int gpu : channel.gpus) gpus.push_back(made_.whole(gpu));
      const bool star = made_.graph.pattern == Pattern::collnetDirect;
      for (size_t i = 1; i < gpus.size(); i++) {
        made_.hops.push_back({star ? gpus[0] : gpus[i - 1], gpus[i], group});
      }
      const bool closed = made_.graph.pattern == Pattern::ring && channel.netOut < 0;
      if (closed && gpus.size() > 1) made_.hops.push_back({gpus.back(), gpus.front(), group});
      const NetworkGpus ends = networkGpus(made_.graph.pattern, channel);
      if (channel.netIn >= 0) {
        made_.portLines.push_back(
            {made_.whole(channel.netIn), made_.whole(ends.receives), true, group});
      }
      if (channel.netOut >= 0) {
        made_.portLines.push_back(
            {made_.whole(channel.netOut), made_.whole(ends.sends), false, group});
      }
    }
    for (const PortLine& line : made_.portLines) made_.usedPorts.push_back(line.port);
  }

  // Children of a node on the path from the CPU to the devices.
  std::vector<int> childrenOf(int index, int parent) const {
    std::vector<int> children;
    for (const Link& link : made_.topology.node(index).links) {
      const NodeType type = made_.topology.node(link.to).type;
      if (link.to == parent || type == NodeType::cpu || type == NodeType::nvs) continue;
      if (link.type != LinkType::pci && link.type != LinkType::network &&
          link.type != LinkType::c2c && type != NodeType::nic) {
        continue;
      }
      if (std::find(children.begin(), children.end(), link.to) == children.end()) {
        children.push_back(link.to);
      }
    }
    std::sort(children.begin(), children.end());
    return children;
  }

  // Places boxes from left to right, host by host, and wraps the tiles.
  void placeColumns() {
    const bool several = made_.topology.hosts.size() > 1;
    const size_t columns =
        std::max(made_.topology.of(NodeType::gpu).size(), made_.topology.of(NodeType::net).size());
    made_.box = several
                    ? kMinBox
                    : std::clamp(kFullWidth / static_cast<double>(std::max<size_t>(columns, 1)) -
                                     kGap - kGroupGap,
                                 kMinBox, kMaxBox);
    made_.tiles.resize(made_.topology.hosts.size());
    double x = kMargin;
    int row = 0;
    for (size_t host = 0; host < made_.tiles.size(); host++) {
      cursor_ = 0;
      for (const int cpu : made_.topology.of(NodeType::cpu)) {
        if (made_.hostOf(cpu) != static_cast<int>(host)) continue;
        placeBelow(cpu, -1, 0);
        cursor_ += 2 * kGroupGap;
      }
      Layout::Tile& tile = made_.tiles[host];
      tile.width = std::max(cursor_ - 2 * kGroupGap - kGap, 0.0);
      if (x > kMargin && x + tile.width > kMaxWidth - kMargin) {
        x = kMargin;
        row++;
      }
      tile.x = x;
      tile.row = row;
      x += tile.width + 4 * kGroupGap;
      made_.width = std::max(made_.width, tile.x + tile.width + kMargin);
    }
    made_.width = std::max(made_.width, 760.0);
    for (auto& [index, box] : made_.places)
      box.x += made_.tiles[static_cast<size_t>(made_.hostOf(index))].x;
  }

  void placeBelow(int index, int parent, int depth) {
    if (made_.places.contains(index)) return;
    Box& own = made_.places[index];
    depth_[index] = depth;
    deepest_ = std::max(deepest_, depth);
    const double begin = cursor_;
    std::vector<int> gpus, ports, switches;
    for (const int child : childrenOf(index, parent)) {
      if (made_.places.contains(child)) continue;
      made_.parents[child] = index;
      switch (made_.topology.node(child).type) {
        case NodeType::gpu:
          gpus.push_back(child);
          break;
        case NodeType::nic:
          addPorts(child, index, ports);
          break;
        default:
          switches.push_back(child);
      }
    }
    const size_t columns = std::max(gpus.size(), ports.size());
    for (size_t i = 0; i < columns; i++) {
      if (i < gpus.size()) made_.places[gpus[i]] = {cursor_, 0, made_.box, kGpuHeight};
      if (i < ports.size()) {
        made_.places[ports[i]] = {cursor_ + kStrip, 0, made_.box - kStrip, kPortHeight};
      }
      cursor_ += made_.box + kGap;
    }
    for (const int child : switches) placeBelow(child, index, depth + 1);
    if (cursor_ == begin) cursor_ += 2 * kMinBox + kGap;
    const double extent = cursor_ - kGap - (switches.empty() ? 0 : kGroupGap) - begin;
    if (made_.topology.node(index).type == NodeType::cpu) {
      own = {begin, 0, std::max(extent, 2 * kMinBox), kCpuHeight};
    } else {
      own = {begin, 0, extent, kSwitchHeight};
      cursor_ += kGroupGap;
    }
    cursor_ = std::max(cursor_, own.right() + kGap);
  }

  // The ports of an adapter stand for it; an adapter without any stands for itself.
  void addPorts(int nic, int parent, std::vector<int>& ports) {
    const std::vector<int> children = childrenOf(nic, parent);
    for (const int port : children) made_.parents[port] = parent;
    if (children.empty()) {
      ports.push_back(nic);
    } else {
      ports.insert(ports.end(), children.begin(), children.end());
      made_.parents.erase(nic);
    }
    for (const int port : children) made_.adapterOf[port] = nic;
  }

  void placeRows() {
    double longest = 0;
    for (const Layout::Hop& hop : made_.hops) {
      if (made_.sameTile(hop.from, hop.to)) {
        longest = std::max(
            longest, std::abs(made_.places[hop.from].center() - made_.places[hop.to].center()));
      }
    }
    const bool nvswitch = !made_.topology.of(NodeType::nvs).empty();
    const bool ports =
        !made_.topology.of(NodeType::net).empty() || !made_.topology.of(NodeType::nic).empty();
    size_t mostCpus = 1;
    std::map<int, size_t> cpusOf;
    for (const int cpu : made_.topology.of(NodeType::cpu)) {
      mostCpus = std::max(mostCpus, ++cpusOf[made_.hostOf(cpu)]);
    }
    made_.switchY = made_.topology.hosts.size() > 1 ? 22 : 0;
    gpuY_ = made_.switchY + (nvswitch ? kSwitchHeight + 12 : 0) + arcHeight(longest) +
            kNest * static_cast<double>(made_.groups.size()) + 16;
    portY_ = gpuY_ + kGpuHeight + (made_.portLines.empty() ? 34 : 78);
    leafBottom_ = ports ? portY_ + kPortHeight : gpuY_ + kGpuHeight;
    wrapWarnings();
    const double cpuY = leafBottom_ + 36 + deepest_ * kLevel;
    made_.tileHeight =
        cpuY + kCpuHeight + (mostCpus > 2 ? 16.0 * static_cast<double>(mostCpus) : 14);
    made_.headerHeight = kMargin + 66 + 17 * static_cast<double>(made_.warnings.size());
    for (auto& [index, box] : made_.places) {
      const NodeType type = made_.topology.node(index).type;
      double y = cpuY;
      if (type == NodeType::gpu) y = gpuY_;
      if (type == NodeType::net || type == NodeType::nic) y = portY_;
      if (type == NodeType::pci) y = leafBottom_ + 36 + (deepest_ - depth_[index]) * kLevel;
      box.y = made_.tileY(made_.hostOf(index)) + y;
    }
    made_.below = made_.tileY(static_cast<int>(made_.tiles.size()) - 1) + made_.tileHeight;
  }

  void wrapWarnings() {
    const auto columns = static_cast<size_t>((made_.width - 2 * kMargin) / kCharacter);
    for (const std::string& warning : view_.warnings) {
      std::istringstream stream(wrapped("warning: " + warning, 0, columns));
      for (std::string line; std::getline(stream, line);) made_.warnings.push_back(line);
    }
  }

  const View& view_;
  Layout made_;
  std::map<int, int> depth_;
  int deepest_ = 0;
  double cursor_ = 0;                             // where the next box of the tile begins
  double gpuY_ = 0, portY_ = 0, leafBottom_ = 0;  // in a tile, as Layout::switchY
};

}  // namespace

double arcHeight(double distance) {
  constexpr double kMinArc = 26, kMaxArc = 210;
  return std::min(kMinArc + 0.2 * distance, kMaxArc);
}

Layout makeLayout(const View& view, const NamedChannels& channels) {
  return LayoutMaker(view, channels).make();
}

}  // namespace unisono::topo
