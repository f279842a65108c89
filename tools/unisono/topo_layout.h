// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>
#include <vector>

#include "topo_view.h"

// Where the drawing of `unisono topo --svg` has its boxes and lines. A tile for each host: the
// NVSwitches on top, then the GPUs, the network ports, PCI switches and CPUs in rows below each
// other.
namespace unisono::topo {

inline constexpr double kMargin = 28, kSwitchHeight = 34;
// Left of each port, for the line from the GPU above it to its switch.
inline constexpr double kStrip = 18;
inline constexpr double kNest = 3;         // between lines of one bundle at their highest point
inline constexpr double kCharacter = 6.8;  // mean width at font size 12

struct Box {
  double x = 0, y = 0, width = 0, height = 0;
  double center() const { return x + width / 2; }
  double right() const { return x + width; }
  double bottom() const { return y + height; }
};

// A line of a channel between a port and a GPU.
struct PortLine {
  int port, gpu;
  bool enters;  // from the port to the GPU
  size_t group;
  double portX = 0, gpuX = 0;
};

struct Layout {
  struct Hop {
    int from, to;
    size_t group;
  };
  struct Tile {
    double x = 0, width = 0;
    int row = 0;
  };

  const topology::Channel& channelOf(size_t group) const {
    return graph.channels[static_cast<size_t>(groups[group].front())];
  }
  int whole(int index) const { return wholeIndex(view, *channels.topology, index); }
  int hostOf(int index) const { return topology.node(index).host; }
  bool sameTile(int a, int b) const { return hostOf(a) == hostOf(b); }
  double tileY(int host) const {
    return headerHeight + tiles[static_cast<size_t>(host)].row * (tileHeight + 30);
  }

  const View& view;
  const topology::Topology& topology;
  const NamedChannels& channels;
  const topology::ChannelGraph& graph;
  std::vector<std::vector<int>> groups;  // equal channels, drawn as one
  std::vector<Hop> hops{};
  std::vector<PortLine> portLines{};
  std::vector<int> usedPorts{};
  std::vector<std::string> warnings{};  // lines of the header
  std::vector<Tile> tiles{};            // by host
  std::map<int, Box> places{};          // by number of the node
  std::map<int, int> parents{}, adapterOf{};
  double box = 0;  // width of a GPU
  double width = 0, headerHeight = 0;
  double switchY = 0, tileHeight = 0;  // in a tile: the upper edge of the NVSwitches
  double below = 0;                    // lower edge of the last tile
};

// The height of an arc between two boxes of a row.
double arcHeight(double distance);

Layout makeLayout(const View& view, const NamedChannels& channels);

}  // namespace unisono::topo
