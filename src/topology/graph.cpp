// SPDX-License-Identifier: Apache-2.0
#include "topology/graph.h"

#include <fmt/format.h>

namespace unisono::topology {

std::string_view nameOf(Pattern pattern) {
  switch (pattern) {
    case Pattern::balancedTree:
      return "balanced tree";
    case Pattern::splitTree:
      return "split tree";
    case Pattern::tree:
      return "tree";
    case Pattern::ring:
      return "ring";
    case Pattern::nvls:
      return "NVLS";
    case Pattern::collnetDirect:
      return "CollNet direct";
  }
  return "unknown";
}

std::string describeGraph(const ChannelGraph& graph, const Topology& topology) {
  std::string text = fmt::format(
      "{}: {} channels, intra {:g} GB/s {}, inter {:g} GB/s {}, crossnic {}, same channels {}\n",
      nameOf(graph.pattern), graph.channels.size(), toGigabytes(graph.speedIntra),
      nameOf(graph.typeIntra), toGigabytes(graph.speedInter), nameOf(graph.typeInter),
      graph.crossNic, graph.sameChannels ? "yes" : "no");
  int number = 0;
  for (const Channel& channel : graph.channels) {
    text += fmt::format("  {}:", number++);
    if (channel.netIn >= 0) text += fmt::format(" {} >", topology.nameOf(channel.netIn));
    for (const int gpu : channel.gpus) text += fmt::format(" {}", topology.nameOf(gpu));
    if (channel.netOut >= 0) text += fmt::format(" > {}", topology.nameOf(channel.netOut));
    text += "\n";
  }
  return text;
}

}  // namespace unisono::topology
