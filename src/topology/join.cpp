// SPDX-License-Identifier: Apache-2.0
#include "topology/join.h"

#include <algorithm>
#include <bit>
#include <unordered_map>

#include "base/error.h"
#include "base/fnv.h"
#include "topology/double_tree.h"

namespace unisono::topology {

namespace {

// From this speed on, one block is too slow for what a channel carries over the network.
constexpr Bandwidth kFastChannel = 45'000;
constexpr int kFewChannels = 16;

size_t at(int index) {
  return static_cast<size_t>(index);
}

GraphFacts factsOf(const ChannelGraph& graph) {
  return {static_cast<int>(graph.pattern),
          std::min(static_cast<int>(graph.channels.size()), kMostChannels),
          static_cast<int>(graph.typeIntra),
          static_cast<int>(graph.typeInter),
          graph.sameChannels ? 1 : 0,
          graph.crossNic,
          graph.speedIntra,
          graph.speedInter,
          static_cast<int64_t>(graph.latencyInterUs * 1000 + 0.5)};
}

// The weaker of two in every respect. Patterns of trees may differ from node to node.
GraphFacts weakest(const GraphFacts& a, const GraphFacts& b) {
  return {a.pattern,
          std::min(a.channels, b.channels),
          std::max(a.typeIntra, b.typeIntra),
          std::max(a.typeInter, b.typeInter),
          std::min(a.sameChannels, b.sameChannels),
          std::max(a.crossNic, b.crossNic),
          std::min(a.speedIntra, b.speedIntra),
          std::min(a.speedInter, b.speedInter),
          std::max(a.latencyInterNs, b.latencyInterNs)};
}

MachineFacts together(const MachineFacts& a, const MachineFacts& b) {
  MachineFacts result = a;
  if (a.cpuArchitecture != b.cpuArchitecture) result.cpuArchitecture = MachineFacts::kMixed;
  if (a.cpuVendor != b.cpuVendor) result.cpuVendor = MachineFacts::kMixed;
  result.lowestSm = std::min(a.lowestSm, b.lowestSm);
  result.highestSm = std::max(a.highestSm, b.highestSm);
  result.switches = std::min(a.switches, b.switches);
  return result;
}

using Positions = std::array<uint16_t, kMostChannels>;

void findPositions(const ChannelGraph& graph, const std::vector<std::vector<int>>& ranksOf,
                   int rank, Positions& positions) {
  const int channels = factsOf(graph).channels;
  for (int c = 0; c < channels; c++) {
    size_t before = 0;
    bool found = false;
    for (const int gpu : graph.channels[at(c)].gpus) {
      const std::vector<int>& ranks = ranksOf[at(gpu)];
      const auto mine = std::find(ranks.begin(), ranks.end(), rank);
      before += static_cast<size_t>(mine - ranks.begin());
      found = mine != ranks.end();
      if (found) break;
    }
    if (!found) throw internalError("rank {} is in no place of channel {}", rank, c);
    positions[at(c)] = static_cast<uint16_t>(before);
  }
}

uint64_t channelsLedBy(const ChannelGraph& graph, const std::vector<std::vector<int>>& ranksOf,
                       int rank) {
  uint64_t led = 0;
  for (int c = 0; c < factsOf(graph).channels; c++) {
    const std::vector<int>& ranks = ranksOf[at(graph.channels[at(c)].gpus.front())];
    if (!ranks.empty() && ranks.front() == rank) led |= uint64_t{1} << c;
  }
  return led;
}

void hashInto(Fnv& hash, const std::vector<int>& values) {
  hash.add(values.size());
  for (const int value : values) hash.add(static_cast<uint64_t>(value));
}

void hashInto(Fnv& hash, const std::vector<std::vector<int>>& lists) {
  hash.add(lists.size());
  for (const auto& list : lists) hashInto(hash, list);
}

void hashInto(Fnv& hash, const GraphFacts& facts) {
  for (const int64_t value :
       {int64_t{facts.pattern}, int64_t{facts.channels}, int64_t{facts.typeIntra},
        int64_t{facts.typeInter}, int64_t{facts.sameChannels}, int64_t{facts.crossNic},
        facts.speedIntra, facts.speedInter, facts.latencyInterNs}) {
    hash.add(static_cast<uint64_t>(value));
  }
}

}  // namespace

MachineFacts machineFactsOf(const Topology& topology) {
  MachineFacts facts;
  if (!topology.of(NodeType::cpu).empty()) {
    const CpuInfo& cpu = topology.node(topology.of(NodeType::cpu).front()).cpu;
    facts.cpuArchitecture = static_cast<int32_t>(cpu.architecture);
    facts.cpuVendor = static_cast<int32_t>(cpu.vendor);
  }
  facts.lowestSm = topology.lowestSm();
  for (const int gpu : topology.of(NodeType::gpu)) {
    facts.highestSm = std::max(facts.highestSm, topology.node(gpu).gpu.sm);
  }
  facts.switches = topology.of(NodeType::nvs).empty() ? 0 : 1;
  return facts;
}

RankPlace placeOf(const GraphSet& graphs, const std::vector<std::vector<int>>& ranksOf, int rank,
                  uint64_t node) {
  RankPlace place{};
  place.node = node;
  place.ring = factsOf(graphs.ring);
  place.tree = factsOf(graphs.tree);
  place.collnetChain = factsOf(graphs.collnetChain);
  place.collnetDirect = factsOf(graphs.collnetDirect);
  place.nvls = factsOf(graphs.nvls);
  findPositions(graphs.ring, ranksOf, rank, place.ringPosition);
  findPositions(graphs.tree, ranksOf, rank, place.treePosition);
  findPositions(graphs.collnetChain, ranksOf, rank, place.collnetPosition);
  place.collnetHeadOf = channelsLedBy(graphs.collnetDirect, ranksOf, rank);
  place.nvlsHeadOf = channelsLedBy(graphs.nvls, ranksOf, rank);
  return place;
}

// Builds a Joined in steps.
class Joiner {
 public:
  Joiner(std::span<const RankPlace> places, const JoinSettings& settings)
      : places_(places), settings_(settings) {}

  Joined join() {
    findNodes();
    align();
    const int sources = std::min(joined_.ring_.channels, joined_.tree_.channels);
    for (int c = 0; c < sources; c++) {
      joined_.rings_.push_back(order(c, &RankPlace::ringPosition, joined_.alternate_));
      joined_.trees_.push_back(order(c, &RankPlace::treePosition, false));
    }
    for (int c = 0; c < joined_.collnetGraph_.channels; c++) {
      joined_.collnet_.push_back(order(c, &RankPlace::collnetPosition, false));
    }
    joined_.collnetHeads_ = heads(&RankPlace::collnetHeadOf);
    joined_.nvlsHeads_ = heads(&RankPlace::nvlsHeadOf);
    joined_.channels_ = countChannels(sources);
    return std::move(joined_);
  }

 private:
  void findNodes() {
    std::unordered_map<uint64_t, int> numbers;
    std::vector<int> sizes;
    joined_.nodeOf_.reserve(places_.size());
    for (const RankPlace& place : places_) {
      const auto [entry, added] = numbers.emplace(place.node, static_cast<int>(sizes.size()));
      if (added) {
        sizes.push_back(0);
        firstRank_.push_back(static_cast<int>(joined_.nodeOf_.size()));
      }
      ++sizes[at(entry->second)];
      joined_.nodeOf_.push_back(entry->second);
    }
    joined_.start_.push_back(0);
    for (const int size : sizes) joined_.start_.push_back(joined_.start_.back() + size);
  }

  void align() {
    const RankPlace& first = places_.front();
    joined_.ring_ = first.ring;
    joined_.tree_ = first.tree;
    joined_.collnetGraph_ = first.collnetChain;
    joined_.collnetDirect_ = first.collnetDirect;
    joined_.nvls_ = first.nvls;
    joined_.machine_ = first.machine;
    joined_.alternate_ = true;
    for (size_t r = 0; r < places_.size(); r++) {
      const RankPlace& place = places_[r];
      const int fellow = firstRank_[at(joined_.nodeOf_[r])];
      const RankPlace& same = places_[at(fellow)];
      if (place.ring != same.ring || place.tree != same.tree ||
          place.collnetChain != same.collnetChain || place.collnetDirect != same.collnetDirect ||
          place.nvls != same.nvls || place.machine != same.machine) {
        throw disagreement(fellow, static_cast<int>(r));
      }
      if (fellow != static_cast<int>(r)) continue;
      joined_.ring_ = weakest(joined_.ring_, place.ring);
      joined_.tree_ = weakest(joined_.tree_, place.tree);
      joined_.collnetGraph_ = weakest(joined_.collnetGraph_, place.collnetChain);
      joined_.collnetDirect_ = weakest(joined_.collnetDirect_, place.collnetDirect);
      joined_.nvls_ = weakest(joined_.nvls_, place.nvls);
      joined_.machine_ = together(joined_.machine_, place.machine);
      joined_.alternate_ = joined_.alternate_ && place.ring.crossNic == 2;
      joined_.treePattern_.push_back(static_cast<Pattern>(place.tree.pattern));
    }
    if (joined_.ring_.channels < 1 || joined_.tree_.channels < 1) {
      throw internalError("a node has no ring or no tree");
    }
  }

  static Error disagreement(int a, int b) {
    return invalidUsage("Ranks {} and {} are on one node and found different channels in it", a, b)
        .remedy(
            "Give all ranks of a node the same topology and graph files and the same values of "
            "the NCCL_* variables that concern paths");
  }

  // The nodes' channels number `source` one after the other. Where rings alternate, the second node
  // of two takes the other ring of the pair: it enters by the port that the first leaves by.
  std::vector<int> order(int source, Positions RankPlace::*positions, bool alternate) const {
    std::vector<int> result(places_.size(), -1);
    for (size_t r = 0; r < places_.size(); r++) {
      const RankPlace& place = places_[r];
      const int node = joined_.nodeOf_[r];
      int channel = source;
      if (alternate && node % 2 == 1 && (source ^ 1) < joined_.ring_.channels) channel ^= 1;
      const int begin = joined_.start_[at(node)];
      const int index = begin + (place.*positions)[at(channel)];
      if (index >= joined_.start_[at(node) + 1]) throw disagreement(firstRank_[at(node)], int(r));
      int& seat = result[at(index)];
      if (seat >= 0) throw disagreement(seat, static_cast<int>(r));
      seat = static_cast<int>(r);
    }
    return result;
  }

  // The heads of each node, in the order of the channels that they lead first.
  std::vector<std::vector<int>> heads(uint64_t RankPlace::*ledBy) const {
    const int nodes = joined_.nodes();
    std::vector<std::vector<int>> ofNode(at(nodes));
    for (size_t r = 0; r < places_.size(); r++) {
      if (places_[r].*ledBy != 0) ofNode[at(joined_.nodeOf_[r])].push_back(static_cast<int>(r));
    }
    size_t count = ofNode.front().size();
    for (auto& list : ofNode) {
      std::stable_sort(list.begin(), list.end(), [&](int a, int b) {
        return std::countr_zero(places_[at(a)].*ledBy) < std::countr_zero(places_[at(b)].*ledBy);
      });
      count = std::min(count, list.size());
    }
    std::vector<std::vector<int>> result(count, std::vector<int>(at(nodes)));
    for (size_t h = 0; h < count; h++) {
      for (int node = 0; node < nodes; node++) result[h][at(node)] = ofNode[at(node)][h];
    }
    return result;
  }

  int countChannels(int sources) const {
    int channels = std::min(sources * 2, kMostChannels);
    if (joined_.nodes() > 1 && joined_.ring_.speedIntra > kFastChannel && channels < kFewChannels) {
      channels *= 2;
    }
    channels = std::max(channels, settings_.minChannels);
    channels = std::min(channels, settings_.maxChannels);
    return std::clamp(channels, 1, kMostChannels);
  }

  std::span<const RankPlace> places_;
  JoinSettings settings_;
  std::vector<int> firstRank_;  // by node
  Joined joined_;
};

Joined join(std::span<const RankPlace> places, const JoinSettings& settings) {
  if (places.empty()) throw internalError("a communicator without ranks");
  return Joiner(places, settings).join();
}

std::span<const int> Joined::slice(const std::vector<int>& order, int node) const {
  return std::span(order).subspan(at(start_[at(node)]),
                                  at(start_[at(node) + 1] - start_[at(node)]));
}

int Joined::sourceOf(int channel, int node) const {
  const int source = channel % static_cast<int>(rings_.size());
  const bool other = alternate_ && node % 2 == 1 && (source ^ 1) < ring_.channels;
  return other ? source ^ 1 : source;
}

const std::vector<int>& Joined::ringOrder(int channel) const {
  return rings_[at(channel) % rings_.size()];
}

int Joined::neighbour(int channel, int rank, int step) const {
  const std::vector<int>& order = ringOrder(channel);
  const std::span<const int> own = slice(order, nodeOf(rank));
  const auto mine = std::find(own.begin(), own.end(), rank) - own.begin();
  const int index = start_[at(nodeOf(rank))] + static_cast<int>(mine);
  return order[at(index + ranks() + step) % order.size()];
}

int Joined::ringNext(int channel, int rank) const {
  return neighbour(channel, rank, 1);
}

int Joined::ringPrevious(int channel, int rank) const {
  return neighbour(channel, rank, -1);
}

int Joined::treeOf(int channel) const {
  const int sources = static_cast<int>(trees_.size());
  // Neighbours differ, and so do copies of one channel.
  return (channel / sources + channel % sources) % 2;
}

// The rank of a node that serves an edge of the tree over the nodes.
int Joined::edgeRank(int channel, int node, TreeEdge edge) const {
  const std::span<const int> chain = slice(trees_[at(channel) % trees_.size()], node);
  return chain[at(treeEdgePlace(treePattern_[at(node)], edge, static_cast<int>(chain.size())))];
}

TreePlace Joined::treePlace(int channel, int rank) const {
  const int node = nodeOf(rank);
  const std::span<const int> chain = slice(trees_[at(channel) % trees_.size()], node);
  const size_t mine =
      static_cast<size_t>(std::find(chain.begin(), chain.end(), rank) - chain.begin());
  const TreeLinks links = doubleTree(nodes(), node, treeOf(channel));
  TreePlace place;
  if (mine > 0) {
    place.up = chain[mine - 1];
  } else if (links.up >= 0) {
    const TreeLinks above = doubleTree(nodes(), links.up, treeOf(channel));
    place.up =
        edgeRank(channel, links.up, above.down[0] == node ? TreeEdge::child0 : TreeEdge::child1);
  }
  if (mine + 1 < chain.size()) place.down.push_back(chain[mine + 1]);
  for (int child = 0; child < 2; child++) {
    const int below = links.down[at(child)];
    const TreeEdge edge = child == 0 ? TreeEdge::child0 : TreeEdge::child1;
    if (below >= 0 && edgeRank(channel, node, edge) == rank) {
      place.down.push_back(edgeRank(channel, below, TreeEdge::parent));
    }
  }
  return place;
}

std::span<const int> Joined::collnetChain(int channel, int node) const {
  return slice(collnet_[at(channel) % collnet_.size()], node);
}

TreePlace doubleTreePlace(const std::vector<int>& members, int index, int tree) {
  TreePlace place;
  const TreeLinks links = doubleTree(static_cast<int>(members.size()), index, tree);
  if (links.up >= 0) place.up = members[at(links.up)];
  for (const int below : links.down) {
    if (below >= 0) place.down.push_back(members[at(below)]);
  }
  return place;
}

TreePlace Joined::nvlsTreePlace(int head, int tree, int rank) const {
  const std::vector<int>& members = nvlsHeads_[at(head)];
  const int node = nodeOf(rank);
  return members[at(node)] == rank ? doubleTreePlace(members, node, tree) : TreePlace{};
}

JoinedHash hashOf(const Joined& joined) {
  Fnv nodes, graphs, channels, rings, trees, collnet, nvls;
  for (int rank = 0; rank < joined.ranks(); rank++) {
    nodes.add(static_cast<uint64_t>(joined.nodeOf(rank)));
  }
  for (const GraphFacts* facts : {&joined.ring(), &joined.tree(), &joined.collnetChain(),
                                  &joined.collnetDirect(), &joined.nvls()}) {
    hashInto(graphs, *facts);
  }
  const MachineFacts& machine = joined.machine();
  for (const int32_t value : {machine.cpuArchitecture, machine.cpuVendor, machine.lowestSm,
                              machine.highestSm, machine.switches}) {
    graphs.add(static_cast<uint64_t>(value));
  }
  channels.add(static_cast<uint64_t>(joined.channels()));
  const int sources = std::min(joined.ring().channels, joined.tree().channels);
  for (int c = 0; c < std::min(sources, joined.channels()); c++) {
    hashInto(rings, joined.ringOrder(c));
    hashInto(trees, joined.treeOrder(c));
    for (int node = 0; node < joined.nodes(); node++) {
      trees.add(static_cast<uint64_t>(joined.treePattern(node)));
    }
  }
  for (int c = 0; c < joined.channels(); c++) {
    trees.add(static_cast<uint64_t>(joined.treeOf(c)));
  }
  for (int c = 0; c < joined.collnetChannels(); c++) {
    for (int node = 0; node < joined.nodes(); node++) {
      for (const int rank : joined.collnetChain(c, node)) {
        collnet.add(static_cast<uint64_t>(rank));
      }
    }
  }
  hashInto(collnet, joined.collnetHeads());
  hashInto(nvls, joined.nvlsHeads());
  return {nodes.value(), graphs.value(),  channels.value(), rings.value(),
          trees.value(), collnet.value(), nvls.value()};
}

std::string_view firstDifference(const JoinedHash& a, const JoinedHash& b) {
  struct Field {
    std::string_view name;
    uint64_t JoinedHash::*value;
  };
  static constexpr Field kFields[] = {{"nodes", &JoinedHash::nodes},
                                      {"graphs", &JoinedHash::graphs},
                                      {"number of channels", &JoinedHash::channels},
                                      {"rings", &JoinedHash::rings},
                                      {"trees", &JoinedHash::trees},
                                      {"CollNet heads", &JoinedHash::collnet},
                                      {"NVLS heads", &JoinedHash::nvls}};
  for (const Field& field : kFields) {
    if (a.*field.value != b.*field.value) return field.name;
  }
  return {};
}

}  // namespace unisono::topology
