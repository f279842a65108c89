// SPDX-License-Identifier: Apache-2.0
#include "topology/join.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "support/seed.h"
#include "topology/double_tree.h"
#include "topology/presets.h"
#include "topology_testing.h"

namespace unisono::topology {
namespace {

using testing::errorOf;

size_t at(int index) {
  return static_cast<size_t>(index);
}

// Places of the ranks of nodes of `sizes` GPUs, spread over the ranks at random, with channels at
// random.
std::vector<RankPlace> randomPlaces(const std::vector<int>& sizes, std::mt19937& random) {
  std::vector<int> nodeOf;
  for (size_t node = 0; node < sizes.size(); node++) {
    nodeOf.insert(nodeOf.end(), at(sizes[node]), static_cast<int>(node));
  }
  if (random() % 2) std::shuffle(nodeOf.begin(), nodeOf.end(), random);
  std::vector<std::vector<int>> members(sizes.size());
  for (size_t rank = 0; rank < nodeOf.size(); rank++) {
    members[at(nodeOf[rank])].push_back(static_cast<int>(rank));
  }
  std::vector<RankPlace> places(nodeOf.size());
  const bool alternate = random() % 3 == 0;
  for (std::vector<int>& ranks : members) {
    const uint64_t id = uint64_t{random()} << 32 | random();
    RankPlace common{};
    common.node = id;
    const auto facts = [&](Pattern pattern, int most) {
      return GraphFacts{static_cast<int>(pattern),
                        1 + static_cast<int>(random() % at(most)),
                        1,
                        4,
                        0,
                        0,
                        static_cast<Bandwidth>(1000 + random() % 60'000),
                        static_cast<Bandwidth>(1000 + random() % 60'000)};
    };
    common.ring = facts(Pattern::ring, 32);
    if (alternate) {
      common.ring.crossNic = 2;
      common.ring.channels = 2 + common.ring.channels / 2 * 2;
    }
    const Pattern patterns[] = {Pattern::balancedTree, Pattern::splitTree, Pattern::tree};
    common.tree = facts(patterns[random() % 3], 1);
    common.tree.channels = common.ring.channels;
    common.collnetChain = facts(Pattern::tree, 8);
    common.collnetDirect = facts(Pattern::collnetDirect, static_cast<int>(ranks.size()));
    common.nvls = facts(Pattern::nvls, static_cast<int>(ranks.size()));
    for (const int rank : ranks) places[at(rank)] = common;
    std::vector<int> order = ranks;
    const auto deal = [&](auto positions) {
      for (int c = 0; c < kMostChannels; c++) {
        std::shuffle(order.begin(), order.end(), random);
        for (size_t i = 0; i < order.size(); i++) {
          (places[at(order[i])].*positions)[at(c)] = static_cast<uint16_t>(i);
        }
      }
    };
    deal(&RankPlace::ringPosition);
    deal(&RankPlace::treePosition);
    deal(&RankPlace::collnetPosition);
    for (int h = 0; h < common.nvls.channels; h++) {
      places[at(order[at(h)])].nvlsHeadOf = uint64_t{1} << h;
    }
    for (int h = 0; h < common.collnetDirect.channels; h++) {
      places[at(order[at(h)])].collnetHeadOf = uint64_t{1} << h;
    }
  }
  return places;
}

std::vector<int> randomSizes(std::mt19937& random) {
  std::vector<int> sizes(1 + random() % (random() % 8 == 0 ? 200 : 9));
  const bool even = random() % 3 == 0;
  for (int& size : sizes) size = even ? 8 : 1 + static_cast<int>(random() % 17);
  return sizes;
}

// Fails unless `placeOf(rank)` are the places of one tree over `members`.
template <typename PlaceOf>
void expectTree(const std::vector<int>& members, PlaceOf&& placeOfRank) {
  int roots = 0;
  std::vector<int> reached;
  for (const int rank : members) {
    const TreePlace place = placeOfRank(rank);
    if (place.up < 0) {
      ++roots;
      reached.push_back(rank);
    } else {
      const TreePlace above = placeOfRank(place.up);
      EXPECT_EQ(std::count(above.down.begin(), above.down.end(), rank), 1) << rank;
    }
    EXPECT_LE(place.down.size(), 3u);
    for (const int below : place.down) EXPECT_EQ(placeOfRank(below).up, rank);
  }
  ASSERT_EQ(roots, 1);
  for (size_t i = 0; i < reached.size() && reached.size() <= members.size(); i++) {
    for (const int below : placeOfRank(reached[i]).down) reached.push_back(below);
  }
  std::sort(reached.begin(), reached.end());
  EXPECT_EQ(reached, members);
}

void expectSound(const Joined& joined) {
  std::vector<int> everyone(at(joined.ranks()));
  std::iota(everyone.begin(), everyone.end(), 0);
  ASSERT_GE(joined.channels(), 1);
  ASSERT_LE(joined.channels(), kMostChannels);
  for (int c = 0; c < joined.channels(); c++) {
    SCOPED_TRACE("channel " + std::to_string(c));
    const std::vector<int>& ring = joined.ringOrder(c);
    std::vector<int> sorted = ring;
    std::sort(sorted.begin(), sorted.end());
    ASSERT_EQ(sorted, everyone);
    int entered = 0;
    for (size_t i = 0; i < ring.size(); i++) {
      const int next = ring[(i + 1) % ring.size()];
      entered += joined.nodeOf(ring[i]) != joined.nodeOf(next);
      ASSERT_EQ(joined.ringNext(c, ring[i]), next);
      ASSERT_EQ(joined.ringPrevious(c, next), ring[i]);
    }
    EXPECT_EQ(entered, joined.nodes() == 1 ? 0 : joined.nodes());

    std::vector<TreePlace> places;
    for (const int rank : everyone) places.push_back(joined.treePlace(c, rank));
    expectTree(everyone, [&](int rank) { return places[at(rank)]; });
    // One link up from each node but one, and not many nodes below each other.
    std::vector<int> parent(at(joined.nodes()), -1);
    for (const int rank : everyone) {
      const int up = places[at(rank)].up;
      if (up < 0 || joined.nodeOf(up) == joined.nodeOf(rank)) continue;
      ASSERT_EQ(parent[at(joined.nodeOf(rank))], -1);
      parent[at(joined.nodeOf(rank))] = joined.nodeOf(up);
    }
    EXPECT_EQ(std::count(parent.begin(), parent.end(), -1), 1);
    for (int node = 0; node < joined.nodes(); node++) {
      int depth = 0;
      for (int above = parent[at(node)]; above >= 0; above = parent[at(above)]) ++depth;
      EXPECT_LE(depth, std::bit_width(static_cast<unsigned>(joined.nodes() - 1)));
    }
  }
  for (const auto* heads : {&joined.nvlsHeads(), &joined.collnetHeads()}) {
    std::set<int> different;
    for (const std::vector<int>& head : *heads) {
      for (int node = 0; node < joined.nodes(); node++) {
        EXPECT_EQ(joined.nodeOf(head[at(node)]), node);
        EXPECT_TRUE(different.insert(head[at(node)]).second);
      }
    }
  }
  for (size_t h = 0; h < joined.nvlsHeads().size(); h++) {
    for (const int tree : {0, 1}) {
      std::vector<int> members = joined.nvlsHeads()[h];
      std::sort(members.begin(), members.end());
      expectTree(members,
                 [&](int rank) { return joined.nvlsTreePlace(static_cast<int>(h), tree, rank); });
    }
  }
}

TEST(DoubleTree, IsTwoTreesWithOtherLeaves) {
  for (int count = 1; count <= 300; count++) {
    SCOPED_TRACE(count);
    int inner = 0;
    for (const int tree : {0, 1}) {
      std::vector<int> members(at(count));
      std::iota(members.begin(), members.end(), 0);
      expectTree(members, [&](int index) {
        const TreeLinks links = doubleTree(count, index, tree);
        TreePlace place{links.up, {}};
        for (const int below : links.down) {
          if (below >= 0) place.down.push_back(below);
        }
        return place;
      });
    }
    for (int index = 0; index < count; index++) {
      const auto isInner = [&](int tree) {
        return doubleTree(count, index, tree).down != std::array{-1, -1};
      };
      inner += isInner(0) && isInner(1);
    }
    EXPECT_EQ(inner, count > 1 ? count % 2 : 0);
  }
}

TEST(Join, GivesRingsAndTreesOverRandomNodes) {
  const uint64_t base = test::seed();
  for (unsigned round = 0; round < 60; round++) {
    SCOPED_TRACE(::testing::Message() << "seed " << base + round);
    std::mt19937 random(base + round);
    expectSound(join(randomPlaces(randomSizes(random), random), {}));
    if (HasFailure()) return;
  }
}

TEST(Join, KeepsTheOrderOfTheNodesChannels) {
  std::mt19937 random(5);
  for (int round = 0; round < 30; round++) {
    const std::vector<RankPlace> places = randomPlaces(randomSizes(random), random);
    const Joined joined = join(places, {});
    const int sources = joined.ring().channels;
    for (int c = 0; c < joined.channels(); c++) {
      std::vector<int> seen(at(joined.nodes()), 0);
      for (const int rank : joined.ringOrder(c)) {
        const int node = joined.nodeOf(rank);
        const int source = joined.sourceOf(c, node);
        EXPECT_LT(source, sources);
        EXPECT_EQ(places[at(rank)].ringPosition[at(source)], seen[at(node)]++);
      }
      std::fill(seen.begin(), seen.end(), 0);
      for (const int rank : joined.treeOrder(c)) {
        EXPECT_EQ(places[at(rank)].treePosition[at(c % sources)], seen[at(joined.nodeOf(rank))]++);
      }
    }
  }
}

TEST(Join, DoesNotDependOnWhatNodesAreCalled) {
  std::mt19937 random(6);
  for (int round = 0; round < 30; round++) {
    std::vector<RankPlace> places = randomPlaces(randomSizes(random), random);
    const JoinedHash first = hashOf(join(places, {}));
    for (RankPlace& place : places) place.node = place.node * 0x9e3779b97f4a7c15u + 17;
    EXPECT_EQ(firstDifference(first, hashOf(join(places, {}))), "");
  }
}

TEST(Join, TheWeakestNodeDecides) {
  std::mt19937 random(7);
  std::vector<RankPlace> places = randomPlaces({8, 8, 8}, random);
  const uint64_t weak = places[20].node;
  for (RankPlace& place : places) {
    place.ring = place.tree = {4, 12, 1, 4, 1, 0, 30'000, 24'000};
    if (place.node != weak) continue;
    place.ring = place.tree = {4, 3, 9, 3, 0, 1, 10'000, 48'000};
  }
  const Joined joined = join(places, {});
  EXPECT_EQ(joined.ring(), (GraphFacts{4, 3, 9, 4, 0, 1, 10'000, 24'000}));
  EXPECT_EQ(joined.channels(), 6);
}

TEST(Join, ChannelsAreDoubledWithinBounds) {
  std::mt19937 random(8);
  const auto channels = [&](const std::vector<int>& sizes, int found, Bandwidth speed,
                            JoinSettings settings) {
    std::vector<RankPlace> places = randomPlaces(sizes, random);
    for (RankPlace& place : places) {
      place.ring.channels = place.tree.channels = found;
      place.ring.speedIntra = speed;
      place.ring.crossNic = 0;
    }
    const Joined joined = join(places, settings);
    expectSound(joined);
    int second = 0;
    for (int c = 0; c < joined.channels(); c++) second += joined.treeOf(c);
    EXPECT_EQ(second, joined.channels() / 2) << "both trees are used alike";
    return joined.channels();
  };
  EXPECT_EQ(channels({8}, 12, 30'000, {}), 24);
  EXPECT_EQ(channels({8}, 4, 90'000, {}), 8);
  EXPECT_EQ(channels({8, 8}, 4, 90'000, {}), 16) << "few and fast ones over several nodes";
  EXPECT_EQ(channels({8, 8}, 4, 20'000, {}), 8);
  EXPECT_EQ(channels({8}, 40, 20'000, {}), 64);
  EXPECT_EQ(channels({8}, 12, 30'000, {1, 2}), 2);
  EXPECT_EQ(channels({8}, 2, 30'000, {16, 64}), 16);
  EXPECT_EQ(channels({8}, 2, 30'000, {16, 4}), 4) << "the most wins";
}

TEST(Join, TellsRanksThatFoundOtherChannels) {
  std::mt19937 random(9);
  const std::vector<RankPlace> good = randomPlaces({4, 4}, random);
  const auto refusal = [](const std::vector<RankPlace>& places) {
    return errorOf([&] { join(places, {}); });
  };
  EXPECT_EQ(refusal(good), "");
  int fellow = 3;
  while (good[at(fellow)].node != good[0].node) ++fellow;
  const std::string names = "Ranks 0 and " + std::to_string(fellow);
  auto bad = good;
  bad[at(fellow)].ring.speedIntra++;
  EXPECT_NE(refusal(bad).find(names), std::string::npos) << refusal(bad);
  bad = good;
  bad[at(fellow)].ringPosition[0] = bad[0].ringPosition[0];
  EXPECT_NE(refusal(bad).find(names), std::string::npos) << refusal(bad);
  bad[at(fellow)].ringPosition[0] = 60'000;
  EXPECT_NE(refusal(bad).find(names), std::string::npos) << refusal(bad);
}

TEST(Join, HashesNameTheFieldThatDiffers) {
  std::mt19937 random(10);
  std::vector<RankPlace> places = randomPlaces({4, 5, 6}, random);
  for (RankPlace& place : places) place.ring.crossNic = 0;
  const JoinedHash first = hashOf(join(places, {}));
  const auto difference = [&](auto change) {
    std::vector<RankPlace> other = places;
    change(other);
    return std::string(firstDifference(first, hashOf(join(other, {}))));
  };
  const auto partner = [&](const std::vector<RankPlace>& all) {
    int rank = 1;
    while (all[at(rank)].node != all[0].node) ++rank;
    return at(rank);
  };
  EXPECT_EQ(difference([](auto&) {}), "");
  EXPECT_EQ(difference([&](auto& all) {
              std::swap(all[0].ringPosition[0], all[partner(all)].ringPosition[0]);
            }),
            "rings");
  EXPECT_EQ(difference([&](auto& all) {
              std::swap(all[0].treePosition[0], all[partner(all)].treePosition[0]);
            }),
            "trees");
  EXPECT_EQ(difference([&](auto& all) {
              std::swap(all[0].collnetPosition[0], all[partner(all)].collnetPosition[0]);
            }),
            "CollNet heads");
  EXPECT_EQ(difference([](auto& all) {
              for (RankPlace& place : all) place.ring.speedIntra = 7;
            }),
            "graphs");
  EXPECT_EQ(difference([](auto& all) {
              for (RankPlace& place : all) place.nvlsHeadOf = 0;
            }),
            "NVLS heads");
  EXPECT_EQ(firstDifference(first, hashOf(join(places, {1, 1}))), "number of channels");
}

void shuffle(XmlNode& node, std::mt19937& random) {
  std::shuffle(node.children.begin(), node.children.end(), random);
  for (XmlNode& child : node.children) shuffle(child, random);
}

// The place of the rank whose GPU is number `own` of those of `gpus` of a machine that has ranks.
RankPlace placeOn(const XmlTopology& file, const std::vector<int>& gpus, int firstRank, int own,
                  int ranks, uint64_t node) {
  Topology topology = buildTopology(file);
  for (const int gpu : topology.of(NodeType::gpu)) {
    GpuInfo& info = topology.nodes[at(gpu)].gpu;
    const auto chosen = std::find(gpus.begin(), gpus.end(), info.dev);
    info.rank = chosen == gpus.end() ? -1 : firstRank + static_cast<int>(chosen - gpus.begin());
  }
  PathSettings paths;
  paths.p2pLevel = PathType::sys;
  const Machine machine = trimMachine(topology, paths, firstRank + own, ranks);
  std::vector<std::vector<int>> ranksOf(machine.topology.nodes.size());
  for (const int gpu : machine.topology.of(NodeType::gpu)) {
    ranksOf[at(gpu)] = {machine.topology.node(gpu).gpu.rank};
  }
  return placeOf(searchGraphs(machine, {}), ranksOf, firstRank + own, node);
}

TEST(Join, JoinsWhatRanksFindOnUnevenMachines) {
  std::mt19937 random(test::seed());
  for (int round = 0; round < 4; round++) {
    struct Host {
      XmlTopology file;
      std::vector<int> gpus;
    };
    std::vector<Host> hosts;
    int ranks = 0;
    for (const char* name : {"dgx-h100", "dgx-a100", "dgx-h100"}) {
      Host& host = hosts.emplace_back(Host{describeMachine(preset(name)), {}});
      host.gpus = {0, 1, 2, 3, 4, 5, 6, 7};
      std::shuffle(host.gpus.begin(), host.gpus.end(), random);
      host.gpus.resize(1 + random() % 8);
      ranks += static_cast<int>(host.gpus.size());
    }
    std::vector<RankPlace> places;
    for (Host& host : hosts) {
      const int first = static_cast<int>(places.size());
      for (size_t own = 0; own < host.gpus.size(); own++) {
        // Each rank reads the file in another order.
        XmlNode shuffled = host.file.system;
        shuffle(shuffled, random);
        places.push_back(placeOn(checkTopologyXml(std::move(shuffled), "shuffled"), host.gpus,
                                 first, static_cast<int>(own), ranks,
                                 static_cast<uint64_t>(first)));
      }
    }
    const Joined joined = join(places, {});
    EXPECT_EQ(joined.nodes(), 3);
    EXPECT_GT(joined.ring().speedInter, 0);
    expectSound(joined);
  }
}

TEST(Join, RanksThatShareAGpuFollowEachOther) {
  const Machine machine =
      trimMachine(buildTopology(describeMachine(preset("hgx-h200x4"))), {}, -1, 4);
  const GraphSet graphs = searchGraphs(machine, {});
  std::vector<std::vector<int>> ranksOf(machine.topology.nodes.size());
  const auto& gpus = machine.topology.of(NodeType::gpu);
  for (int gpu = 0; gpu < 4; gpu++) ranksOf[at(gpus[at(gpu)])] = {gpu, gpu + 4};
  std::vector<RankPlace> places;
  for (int rank = 0; rank < 8; rank++) places.push_back(placeOf(graphs, ranksOf, rank, 1));
  const Joined joined = join(places, {});
  expectSound(joined);
  for (int c = 0; c < joined.channels(); c++) {
    for (int rank = 0; rank < 4; rank++) EXPECT_EQ(joined.ringNext(c, rank), rank + 4);
  }
  for (const auto& head : joined.nvlsHeads()) EXPECT_LT(head.front(), 4);
}

// `nodes` equal machines, each GPU of them one rank.
std::vector<RankPlace> equalNodes(const Machine& machine, const GraphSet& graphs, int nodes) {
  const auto& gpus = machine.topology.of(NodeType::gpu);
  std::vector<std::vector<int>> ranksOf(machine.topology.nodes.size());
  for (size_t i = 0; i < gpus.size(); i++) ranksOf[at(gpus[i])] = {static_cast<int>(i)};
  std::vector<RankPlace> places;
  for (int node = 0; node < nodes; node++) {
    for (size_t rank = 0; rank < gpus.size(); rank++) {
      places.push_back(
          placeOf(graphs, ranksOf, static_cast<int>(rank), static_cast<uint64_t>(node)));
    }
  }
  return places;
}

// What the edges of the joined trees take of a GPU and of its channel's port, and what the search
// reserved there.
struct PortLoad {
  Bandwidth in = 0, out = 0;

  bool operator==(const PortLoad&) const = default;
};

TEST(Join, TreesCarryWhatTheirNodesReserved) {
  // Edges between nodes at the first and at the second GPU of each chain.
  using Edges = std::pair<int, int>;
  const std::map<int, std::map<Edges, int>> expectedEdges = {
      {2, {{{1, 0}, 16}}},
      {3, {{{1, 0}, 16}, {{1, 1}, 8}}},
      {5, {{{1, 0}, 24}, {{1, 1}, 8}, {{2, 1}, 8}}},
      {16, {{{1, 0}, 72}, {{2, 1}, 56}}}};
  const Machine machine = testing::machineOf(describeMachine(preset("dgx-a100")), 0);
  const GraphSet graphs = searchGraphs(machine, {});
  const auto& gpus = machine.topology.of(NodeType::gpu);
  const int ranksOfNode = static_cast<int>(gpus.size());
  ASSERT_EQ(graphs.tree.pattern, Pattern::balancedTree);
  ASSERT_EQ(graphs.tree.channels.size(), 8u);
  const ChannelTraffic traffic(graphs.tree.pattern, graphs.tree.speedIntra, graphs.tree.speedInter,
                               gpus);
  const Bandwidth speed = graphs.tree.speedInter;
  for (const auto& [nodes, expected] : expectedEdges) {
    SCOPED_TRACE(::testing::Message() << nodes << " nodes");
    const Joined joined = join(equalNodes(machine, graphs, nodes), {});
    std::map<Edges, int> edges;
    for (int c = 0; c < 8; c++) {
      const Channel& channel = graphs.tree.channels[at(c)];
      std::map<int, PortLoad> reserved;
      for (const PathUse& use : traffic.all(channel)) {
        if (use.kind == PathUse::Kind::portToGpu) reserved[use.to].in += use.speed;
        if (use.kind == PathUse::Kind::gpuToPort) reserved[use.from].out += use.speed;
      }
      for (int node = 0; node < nodes; node++) {
        std::map<int, PortLoad> carried;
        PortLoad port;
        int parents = 0, children = 0;
        Edges atGpu{0, 0};
        for (int local = 0; local < ranksOfNode; local++) {
          const TreePlace place = joined.treePlace(c, node * ranksOfNode + local);
          const int gpu = gpus[at(local)];
          const bool hasParent = place.up >= 0 && joined.nodeOf(place.up) != node;
          const auto below = std::count_if(place.down.begin(), place.down.end(),
                                           [&](int rank) { return joined.nodeOf(rank) != node; });
          if (!hasParent && below == 0) continue;
          ASSERT_TRUE(reserved.contains(gpu)) << "a GPU without a reservation serves the network";
          PortLoad& load = carried[gpu];
          load = {hasParent ? speed : 0, below * speed / 2};
          EXPECT_LE(load.in, reserved[gpu].in);
          EXPECT_LE(load.out, reserved[gpu].out);
          port.in += load.in;
          port.out += load.out;
          parents += hasParent ? 1 : 0;
          children += static_cast<int>(below);
          (gpu == channel.gpus[0] ? atGpu.first : atGpu.second) +=
              static_cast<int>(below) + (hasParent ? 1 : 0);
        }
        edges[atGpu]++;
        EXPECT_LE(port.in, speed);
        EXPECT_LE(port.out, speed);
        if (parents == 1 && children == 2) {
          EXPECT_EQ(carried, reserved);
        }
      }
    }
    EXPECT_EQ(edges, expected);
  }
}

}  // namespace
}  // namespace unisono::topology
