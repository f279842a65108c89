// SPDX-License-Identifier: Apache-2.0
#include "topology/channel_traffic.h"

#include <algorithm>

namespace unisono::topology {

int treeEdgePlace(Pattern pattern, TreeEdge edge, int count) {
  // The second GPU takes one child of a balanced tree: the child of nodes that have only one
  // besides their parent, so that the two edges are on different GPUs. A root has only the other
  // child.
  const bool second = (pattern == Pattern::splitTree && edge != TreeEdge::parent) ||
                      (pattern == Pattern::balancedTree && edge == TreeEdge::child0);
  return second && count > 1 ? 1 : 0;
}

bool isTree(Pattern pattern) {
  return pattern == Pattern::tree || pattern == Pattern::balancedTree ||
         pattern == Pattern::splitTree;
}

bool hasHead(Pattern pattern) {
  return pattern == Pattern::nvls || pattern == Pattern::collnetDirect;
}

// A tree sends half of its traffic to each child.
Bandwidth ChannelTraffic::speedToNetwork(int place) const {
  const int count = static_cast<int>(gpus_.size());
  if (pattern_ == Pattern::ring) return place == count - 1 ? speedInter_ : 0;
  if (!isTree(pattern_)) return place == 0 ? speedInter_ : 0;
  const Bandwidth half = speedInter_ / 2;
  Bandwidth speed = 0;
  if (treeEdgePlace(pattern_, TreeEdge::child0, count) == place) speed += half;
  if (treeEdgePlace(pattern_, TreeEdge::child1, count) == place) speed += speedInter_ - half;
  return speed;
}

PathUse ChannelTraffic::enter(const Channel& channel) const {
  return {PathUse::Kind::portToGpu, channel.netIn, channel.gpus.front(), speedInter_};
}

PathUse ChannelTraffic::step(const Channel& channel, int place) const {
  const size_t to = static_cast<size_t>(place);
  return {PathUse::Kind::gpuToGpu, channel.gpus[to - 1], channel.gpus[to], speedIntra_};
}

PathUse ChannelTraffic::leave(const Channel& channel, int place) const {
  return {PathUse::Kind::gpuToPort, channel.gpus[static_cast<size_t>(place)], channel.netOut,
          speedToNetwork(place)};
}

PathUse ChannelTraffic::close(const Channel& channel) const {
  return {PathUse::Kind::gpuToGpu, channel.gpus.back(), channel.gpus.front(), speedIntra_};
}

std::vector<PathUse> ChannelTraffic::head(const Channel& channel) const {
  std::vector<PathUse> uses;
  const int head = channel.gpus.front();
  const Bandwidth others = std::max<Bandwidth>(1, static_cast<Bandwidth>(gpus_.size()) - 1);
  for (const int gpu : gpus_) {
    if (pattern_ == Pattern::nvls) {
      const Bandwidth speed = speedIntra_ * (gpu == head ? 2 : 1);
      uses.push_back({PathUse::Kind::gpuToSwitch, gpu, -1, speed});
      uses.push_back({PathUse::Kind::switchToGpu, -1, gpu, speed});
    } else if (gpu != head) {
      const Bandwidth speed = (speedIntra_ + others - 1) / others;
      uses.push_back({PathUse::Kind::gpuToGpu, gpu, head, speed});
      uses.push_back({PathUse::Kind::gpuToGpu, head, gpu, speed});
    }
  }
  return uses;
}

std::vector<PathUse> ChannelTraffic::all(const Channel& channel) const {
  std::vector<PathUse> uses;
  if (hasHead(pattern_)) uses = head(channel);
  const bool network = channel.netIn >= 0;
  if (network) uses.push_back(enter(channel));
  const int places = hasHead(pattern_) ? 1 : static_cast<int>(channel.gpus.size());
  for (int place = 0; place < places; place++) {
    if (place > 0) uses.push_back(step(channel, place));
    if (!network) continue;
    if (const PathUse use = leave(channel, place); use.speed > 0) uses.push_back(use);
  }
  if (pattern_ == Pattern::ring && !network && places > 1) uses.push_back(close(channel));
  return uses;
}

}  // namespace unisono::topology
