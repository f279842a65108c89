// SPDX-License-Identifier: Apache-2.0
#include "topology/search.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <ctime>
#include <functional>
#include <limits>
#include <map>
#include <random>
#include <set>

#include "support/sanitized.h"
#include "support/seed.h"
#include "topology/graph_xml.h"
#include "topology/presets.h"
#include "topology/validate.h"
#include "topology_testing.h"

namespace unisono::topology {
namespace {

using testing::errorOf;
using testing::expectValid;
using testing::machineOf;
using testing::ownTopology;

// Of processor time, which other programs on the machine do not lengthen.
double millisecondsSince(std::clock_t begin) {
  return 1e3 * static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
}

void shuffle(XmlNode& node, std::mt19937& random) {
  std::shuffle(node.children.begin(), node.children.end(), random);
  for (XmlNode& child : node.children) shuffle(child, random);
}

TEST(Search, GivesValidGraphsForEveryPreset) {
  for (const std::string& name : presetNames()) {
    const MachineDescription description = preset(name);
    for (const int rankCount : {0, description.gpus}) {
      for (const bool collnet : {false, true}) {
        XmlTopology file = describeMachine(description);
        const Machine machine = machineOf(file, rankCount);
        SearchSettings settings;
        settings.collnet = collnet;
        expectValid(searchGraphs(machine, settings), machine, name);
      }
    }
  }
}

TEST(Search, GivesTheSameForEveryOrderOfTheFile) {
  std::mt19937 random(test::seed());
  std::vector<XmlTopology> files{
      parseTopologyXml(ownTopology("h800x8-vm.detected.xml"), "h800x8-vm")};
  for (const char* name : {"dgx-a100", "dgx1-v100", "rtx3090-x8"}) {
    files.push_back(describeMachine(preset(name)));
  }
  // Several functions of one adapter on different links, ports that are no PCI devices, one of them
  // named below both CPUs.
  files.push_back(parseTopologyXml(R"(<system version="1"><cpu numaid="0" arch="x86_64">
    <pci busid="0000:01:00.0" class="0x030200" link_speed="16 GT/s" link_width="16">
      <gpu dev="0" sm="80"/></pci>
    <pci busid="0000:02:00.0" class="0x020700" link_speed="16 GT/s" link_width="16">
      <nic><net name="a" dev="1" port="1" guid="0x7" speed="100000"/>
           <net name="b" dev="0" port="2" guid="0x7" speed="100000"/></nic></pci>
    <pci busid="0000:02:00.1" class="0x020700" link_speed="8 GT/s" link_width="8">
      <nic><net name="c" dev="2" port="3" guid="0x7" speed="100000"/></nic></pci>
    <nic><net name="e" dev="4"/><net name="d" dev="3"/></nic></cpu>
    <cpu numaid="1" arch="x86_64">
    <pci busid="0000:03:00.0" class="0x030200" link_speed="16 GT/s" link_width="16">
      <gpu dev="1" sm="80"/></pci>
    <nic><net name="d" dev="3"/></nic></cpu></system>)",
                                   "odd adapters"));
  for (const XmlTopology& file : files) {
    const auto answer = [&](const XmlTopology& version) {
      const Machine machine = machineOf(version, 0);
      return describeTopology(machine) + describePaths(machine) +
             writeGraphs(namedGraphs(searchGraphs(machine, {})), machine.topology);
    };
    const std::string first = answer(file);
    for (int round = 0; round < 5; round++) {
      XmlNode shuffled = file.system;
      shuffle(shuffled, random);
      EXPECT_EQ(answer(checkTopologyXml(std::move(shuffled), file.source)), first) << file.source;
    }
  }
}

TEST(Search, GivesTheSameOnEveryRank) {
  for (const std::string& name : presetNames()) {
    const MachineDescription description = preset(name);
    const Topology topology = buildTopology(describeMachine(description));
    const auto answer = [&](int rank) {
      const Machine machine = trimMachine(topology, {}, rank, 0);
      return describePaths(machine) +
             writeGraphs(namedGraphs(searchGraphs(machine, {})), machine.topology);
    };
    for (int rank = 1; rank < description.gpus; rank++) EXPECT_EQ(answer(rank), answer(0)) << name;
  }
}

MachineDescription randomDescription(std::mt19937& random) {
  const auto pick = [&](std::initializer_list<int> choices) {
    return *(choices.begin() + random() % choices.size());
  };
  MachineDescription machine;
  machine.name = "random machine";
  machine.gpus = 1 + static_cast<int>(random() % 12);
  machine.nics = static_cast<int>(random() % 10);
  machine.sockets = pick({1, 2, 4});
  machine.switches = pick({0, 0, 2, 3, 8});
  machine.sm = pick({60, 70, 80, 86, 90, 100});
  machine.gdr = random() % 3 != 0;
  machine.cpuVendor = random() % 2 ? "GenuineIntel" : "AuthenticAMD";
  machine.cpuModel = pick({79, 106, 143, 207});
  machine.pciSpeed = random() % 2 ? "16.0 GT/s PCIe" : "32.0 GT/s PCIe";
  machine.nicMegabits = pick({-1, 10'000, 100'000, 200'000, 400'000});
  if (random() % 2) machine.switchNvlinks = pick({4, 8, 12, 18});
  if (machine.switchNvlinks == 0 && random() % 2) {
    const size_t gpus = static_cast<size_t>(machine.gpus);
    machine.peerNvlinks.assign(gpus, std::vector<int>(gpus, 0));
    for (size_t a = 0; a < gpus; a++) {
      for (size_t b = a + 1; b < gpus; b++) {
        machine.peerNvlinks[a][b] = machine.peerNvlinks[b][a] = pick({0, 0, 1, 2});
      }
    }
  }
  return machine;
}

PathSettings randomPaths(std::mt19937& random) {
  PathSettings paths;
  paths.p2pDisable = random() % 5 == 0;
  paths.pxnDisable = random() % 3 == 0;
  if (random() % 3 == 0) paths.p2pLevel = PathType::sys;
  return paths;
}

// What a valid graph promises can be broken, and `validate` sees it.
void expectSpoiltIsSeen(const ChannelGraph& good, const Machine& machine) {
  const auto expectSeen = [&](std::string_view what, auto change) {
    ChannelGraph graph = good;
    change(graph);
    EXPECT_FALSE(validate(graph, machine).empty()) << nameOf(good.pattern) << ": " << what << "\n"
                                                   << describeGraph(graph, machine.topology);
  };
  constexpr Bandwidth kTooMuch = 2 * kLocalBandwidth;
  const bool chain = good.channels.front().gpus.size() > 1;
  const bool several = machine.topology.of(NodeType::gpu).size() > 1;
  if (chain) {
    expectSeen("a GPU twice", [](ChannelGraph& g) {
      g.channels.back().gpus.front() = g.channels.back().gpus.back();
    });
    expectSeen("a GPU less", [](ChannelGraph& g) { g.channels.back().gpus.pop_back(); });
    expectSeen("a nearer path", [](ChannelGraph& g) { g.typeIntra = PathType::loc; });
  }
  if (several) expectSeen("too fast", [](ChannelGraph& g) { g.speedIntra = kTooMuch; });
  if (good.channels.front().netIn >= 0) {
    expectSeen("too fast for ports", [](ChannelGraph& g) { g.speedInter = kTooMuch; });
    expectSeen("a port less", [](ChannelGraph& g) { g.channels.back().netOut = -1; });
    expectSeen("ports nearer", [](ChannelGraph& g) { g.typeInter = PathType::loc; });
  }
}

TEST(Search, GivesValidAndRepeatableGraphsForRandomMachines) {
  std::mt19937 random(test::seed());
  for (int round = 0; round < 150; round++) {
    const MachineDescription machine = randomDescription(random);
    const PathSettings paths = randomPaths(random);
    SearchSettings settings;
    settings.crossNic = static_cast<int>(random() % 3);
    settings.collnet = random() % 2;
    // Among other nodes, or alone.
    const int rankCount = random() % 3 ? 0 : machine.gpus;
    const Machine built = machineOf(describeMachine(machine), rankCount, paths);
    const std::clock_t begin = std::clock();
    const GraphSet graphs = searchGraphs(built, settings);
    EXPECT_LT(millisecondsSince(begin), 5000);
    expectValid(graphs, built, writeTopologyXml(describeMachine(machine)));
    for (const NamedGraph& graph : namedGraphs(graphs)) {
      if (!graph.graph.channels.empty()) expectSpoiltIsSeen(graph.graph, built);
    }
    XmlNode shuffled = describeMachine(machine).system;
    shuffle(shuffled, random);
    const Machine other =
        machineOf(checkTopologyXml(std::move(shuffled), "shuffled"), rankCount, paths);
    EXPECT_EQ(writeGraphs(namedGraphs(searchGraphs(other, settings)), other.topology),
              writeGraphs(namedGraphs(graphs), built.topology));
    if (HasFailure()) FAIL() << "in round " << round;
  }
}

// GPUs in several containers are apart; those of one find the same.
TEST(Search, GivesTheSameOnEveryRankOfRandomMachines) {
  std::mt19937 random(test::seed());
  for (int round = 0; round < 40; round++) {
    const MachineDescription description = randomDescription(random);
    PathSettings paths = randomPaths(random);
    const unsigned containers = 1 + random() % 3;
    for (int rank = 0; rank < description.gpus; rank++) {
      paths.ranks[rank].shmDevice = random() % containers;
    }
    const Topology topology = buildTopology(describeMachine(description));
    const auto ranksOf = [](const Machine& machine) {
      std::vector<int> ranks;
      for (const int gpu : machine.topology.of(NodeType::gpu)) {
        ranks.push_back(machine.topology.node(gpu).gpu.rank);
      }
      return ranks;
    };
    std::vector<Machine> machines;
    std::vector<std::string> answers;
    for (int rank = 0; rank < description.gpus; rank++) {
      machines.push_back(trimMachine(topology, paths, rank, description.gpus));
      const GraphSet graphs = searchGraphs(machines.back(), {});
      answers.push_back(describePaths(machines.back()) +
                        writeGraphs(namedGraphs(graphs), machines.back().topology));
    }
    for (int rank = 0; rank < description.gpus; rank++) {
      const std::vector<int> fellows = ranksOf(machines[static_cast<size_t>(rank)]);
      EXPECT_EQ(std::count(fellows.begin(), fellows.end(), rank), 1);
      for (const int fellow : fellows) {
        EXPECT_EQ(answers[static_cast<size_t>(fellow)], answers[static_cast<size_t>(rank)]);
      }
    }
    if (HasFailure()) {
      FAIL() << "in round " << round << "\n" << writeTopologyXml(describeMachine(description));
    }
  }
}

TEST(Search, EndsWithinItsBudget) {
  const Machine machine = machineOf(describeMachine(preset("scale-16x16")), 0);
  SearchSettings settings;
  settings.triesSteps = settings.sameChannelsSteps = 100;
  settings.speedSteps = 200;
  expectValid(searchGraphs(machine, settings), machine, "hardly any budget");
  settings.triesSteps = settings.sameChannelsSteps = settings.speedSteps = 1;
  const GraphSet graphs = searchGraphs(machine, settings);
  expectValid(graphs, machine, "no budget");
  EXPECT_EQ(graphs.ring.channels.size(), 1u);
}

TEST(Search, Of16GpusAnd16NicsIsFast) {
  if (!test::kTimesCount) GTEST_SKIP() << "times count in a release build only";
  const XmlTopology file = describeMachine(preset("scale-16x16"));
  auto best = std::numeric_limits<double>::max();
  for (int round = 0; round < 3; round++) {
    const std::clock_t begin = std::clock();
    const Machine machine = machineOf(file, 0);
    const GraphSet graphs = searchGraphs(machine, {});
    best = std::min(best, millisecondsSince(begin));
    EXPECT_EQ(graphs.ring.channels.size(), 16u);
  }
  std::printf("16 GPUs, 16 NICs: best of 3 %.1f ms\n", best);
  EXPECT_LT(best, 100);
}

TEST(Search, UsesEveryPortOfARailMachine) {
  const Machine machine = machineOf(describeMachine(preset("dgx-h100")), 0);
  const GraphSet graphs = searchGraphs(machine, {});
  for (const ChannelGraph* graph : {&graphs.ring, &graphs.tree, &graphs.nvls}) {
    EXPECT_EQ(graph->channels.size(), 8u);
    EXPECT_EQ(graph->speedInter, 48000);
    EXPECT_EQ(graph->typeInter, PathType::pix);
  }
  EXPECT_EQ(graphs.nvls.speedIntra, 40000);
}

// Machines where all ports are alike: as many channels enter by one as by another, and leave.
TEST(Search, UsesPortsThatAreAlikeAlike) {
  std::mt19937 random(test::seed());
  const auto pick = [&](std::initializer_list<int> choices) {
    return *(choices.begin() + random() % choices.size());
  };
  for (int round = 0; round < 40; round++) {
    MachineDescription rails;
    rails.name = "rails";
    rails.gpus = pick({2, 4, 8});
    rails.nics = rails.gpus / pick({1, 2});
    rails.switches = rails.nics;
    rails.sockets = pick({1, 2});
    rails.sm = pick({80, 90, 100});
    rails.gdr = true;
    rails.switchNvlinks = pick({12, 18});
    rails.pciSpeed = "32.0 GT/s PCIe";
    rails.nicMegabits = pick({100'000, 200'000, 400'000});
    SearchSettings settings;
    settings.crossNic = pick({0, 2});
    const Machine machine = machineOf(describeMachine(rails), 0);
    const GraphSet graphs = searchGraphs(machine, settings);
    for (const ChannelGraph* graph : {&graphs.ring, &graphs.tree}) {
      std::map<int, int> entering, leaving;
      for (const int port : machine.topology.of(NodeType::net)) entering[port] = leaving[port] = 0;
      for (const Channel& channel : graph->channels) {
        ++entering[channel.netIn];
        ++leaving[channel.netOut];
      }
      for (const auto* uses : {&entering, &leaving}) {
        int least = INT_MAX, most = 0;
        for (const auto& [port, channels] : *uses) {
          least = std::min(least, channels);
          most = std::max(most, channels);
        }
        EXPECT_LE(most - least, 1) << describeGraph(*graph, machine.topology);
      }
    }
    if (HasFailure()) {
      FAIL() << "in round " << round << "\n" << writeTopologyXml(describeMachine(rails));
    }
  }
}

// NVLink bounds them to five rings at the ports' speed; their copies find idle ports.
TEST(Search, SpreadsCopiesOverIdlePorts) {
  MachineDescription rails = preset("dgx-h100");
  rails.sm = 80;
  rails.switchNvlinks = 12;
  SearchSettings settings;
  settings.crossNic = 0;
  const Machine machine = machineOf(describeMachine(rails), 0);
  const GraphSet graphs = searchGraphs(machine, settings);
  expectValid(graphs, machine, "ten rings, eight ports");
  EXPECT_EQ(graphs.ring.channels.size(), 10u);
  std::set<int> ports;
  for (const Channel& channel : graphs.ring.channels) ports.insert(channel.netIn);
  EXPECT_EQ(ports.size(), 8u) << describeGraph(graphs.ring, machine.topology);
}

// Two adapters with one guid are one port: channels may enter by one and leave by the other. Found
// by fuzzing.
TEST(Search, KeepsToTheLinksWhereAdaptersShareAPort) {
  std::string text = ownTopology("h800x8-vm.detected.xml");
  const auto change = [&](std::string_view from, std::string_view to, size_t after = 0) {
    const size_t at = text.find(from, after);
    ASSERT_NE(at, std::string::npos) << from;
    text.replace(at, from.size(), to);
  };
  change("0x7a46cd0003ae6d94", "0x8a46cd0003ae6d94");  // of NET/7 and NET/4
  change(
      "dev=\"0\" speed=\"400000\" port=\"1\" guid=\"0xf250cd0003ae6d94\" maxconn=\"1\" gdr=\"1\"",
      "dev=\"0\" speed=\"400000\" port=\"1\" guid=\"0xf250cd0003ae6d94\" maxconn=\"1\" gdr=\"0\"");
  change("name=\"mlx5_3\" dev=\"2\"", "name=\"mlx5_3\"");  // no port for the transport
  for (const char* gpu : {"<gpu dev=\"4\"", "<gpu dev=\"5\""}) {
    change("<nvlink target=\"0000:6d:02.0\" count=\"2\" tclass=\"0x068000\"/>", "", text.find(gpu));
  }
  change("<gpu dev=\"6\" sm=\"90\"", "<gpu dev=\"6\" sm=\"45\"");
  const Machine machine = machineOf(parseTopologyXml(text, "shared port"), 0);
  SearchSettings settings;
  settings.collnet = true;
  settings.triesSteps = 500;
  settings.sameChannelsSteps = 100;
  settings.speedSteps = 5000;
  expectValid(searchGraphs(machine, settings), machine, "shared port");
}

TEST(Search, FindsEveryPattern) {
  for (const char* name : {"dgx-h100", "dgx-a100", "dgx1-v100", "gh200-x4", "scale-16x16"}) {
    const Machine machine = machineOf(describeMachine(preset(name)), 0);
    for (const Pattern pattern : {Pattern::balancedTree, Pattern::splitTree, Pattern::tree,
                                  Pattern::ring, Pattern::collnetDirect}) {
      const ChannelGraph graph = searchGraph(machine, {pattern, 1, 8, false}, {});
      const std::string what = std::string(name) + ": " + describeGraph(graph, machine.topology);
      EXPECT_FALSE(graph.channels.empty()) << what;
      EXPECT_GT(graph.speedIntra, 100) << what;
      for (const std::string& violation : validate(graph, machine)) {
        ADD_FAILURE() << violation << "\n" << what;
      }
    }
  }
}

TEST(Search, OfOneGpu) {
  MachineDescription one = preset("hgx-h200x4");
  one.gpus = 1;
  const Machine alone = machineOf(describeMachine(one), 1);
  const GraphSet graphs = searchGraphs(alone, {});
  expectValid(graphs, alone, "one GPU");
  EXPECT_EQ(graphs.ring.channels.size(), 1u);
  EXPECT_TRUE(graphs.nvls.channels.empty());
  one.nics = 2;
  const Machine many = machineOf(describeMachine(one), 2);
  expectValid(searchGraphs(many, {}), many, "one GPU per node");
  EXPECT_EQ(searchGraphs(many, {}).tree.pattern, Pattern::tree);
}

TEST(Search, OfBlackwellWithoutNvlink) {
  MachineDescription cards = preset("rtx3090-x8");
  cards.sm = 120;
  cards.nics = 0;
  const Machine machine = machineOf(describeMachine(cards), 8);
  const GraphSet graphs = searchGraphs(machine, {});
  expectValid(graphs, machine, "cards");
  EXPECT_GE(graphs.ring.totalIntra(), 6000);
}

// Sockets that nothing but the slow link between CPUs joins: tries with nearer paths only, and at
// speeds that it does not carry, must not use up the budget.
TEST(Search, OfManyGpusWithoutNvlinkFindsTheRingAcrossSockets) {
  MachineDescription description;
  description.name = "16 GPUs on PCIe";
  description.gpus = 16;
  description.nics = 8;
  description.switches = 4;
  description.sm = 89;
  description.pciSpeed = "16.0 GT/s PCIe";
  const Machine machine = machineOf(describeMachine(description), 0);
  const GraphSet graphs = searchGraphs(machine, {});
  expectValid(graphs, machine, description.name);
  EXPECT_GE(graphs.ring.totalInter(), 20'000);
  EXPECT_GE(graphs.tree.totalInter(), 15'000);
}

// Ports slower than any speed of the tables: 1 Gb/s Ethernet and less.
TEST(Search, PromisesNoMoreThanSlowPortsCarry) {
  for (const int megabits : {1000, 100, 50, 10, 8}) {
    for (const char* name : {"dgx-h100", "rtx3090-x8", "dgx1-v100"}) {
      MachineDescription slow = preset(name);
      slow.nics = 1;
      slow.nicMegabits = megabits;
      const Machine machine = machineOf(describeMachine(slow), 0);
      const GraphSet graphs = searchGraphs(machine, {});
      expectValid(graphs, machine, fmt::format("{} with {} Mb/s", name, megabits));
      EXPECT_GE(graphs.ring.channels.size(), 1u);
      EXPECT_GE(graphs.ring.totalInter(), megabits / 16) << name << " with " << megabits;
    }
  }
}

TEST(Search, ReplaysTheMachineWithoutPeerAccess) {
  // Eight GPUs on two sockets whose driver refuses P2P: all traffic goes through the CPUs.
  PathSettings settings;
  for (int a = 0; a < 8; a++) {
    for (int b = a + 1; b < 8; b++) settings.p2pRefused.insert({a, b});
  }
  const Machine machine = machineOf(describeMachine(preset("rtx3090-x8")), 0, settings);
  const GraphSet graphs = searchGraphs(machine, {});
  expectValid(graphs, machine, "no P2P");
  EXPECT_GE(graphs.ring.totalIntra(), 4000);
  EXPECT_EQ(graphs.ring.typeIntra, PathType::sys);
}

// A graph that is right, to be spoiled.
struct Spoiled {
  Machine machine = machineOf(describeMachine(preset("dgx-h100")), 0);
  GraphSet graphs = searchGraphs(machine, {});

  std::string after(ChannelGraph graph, const std::function<void(ChannelGraph&)>& change) const {
    EXPECT_TRUE(validate(graph, machine).empty());
    change(graph);
    std::string all;
    for (const std::string& violation : validate(graph, machine)) all += violation + "\n";
    return all;
  }
};

TEST(Validator, SeesWhatIsWrong) {
  const Spoiled spoiled;
  const auto expect = [&](const ChannelGraph& graph, std::string_view part,
                          const std::function<void(ChannelGraph&)>& change) {
    const std::string found = spoiled.after(graph, change);
    EXPECT_NE(found.find(part), std::string::npos) << part << " not in:\n" << found;
  };
  const ChannelGraph& ring = spoiled.graphs.ring;
  const ChannelGraph& tree = spoiled.graphs.tree;
  const ChannelGraph& nvls = spoiled.graphs.nvls;
  expect(ring, "visits GPU/0 twice",
         [](ChannelGraph& g) { g.channels[0].gpus[3] = g.channels[0].gpus[0]; });
  expect(ring, "has 7 GPUs, not 8", [](ChannelGraph& g) { g.channels[0].gpus.pop_back(); });
  expect(ring, "which is not a GPU", [](ChannelGraph& g) { g.channels[0].gpus[0] = 10000; });
  expect(ring, "does not enter and leave", [](ChannelGraph& g) { g.channels[0].netIn = -1; });
  expect(ring, "does not alternate",
         [](ChannelGraph& g) { std::swap(g.channels[0].netOut, g.channels[2].netOut); });
  expect(ring, "farther than the LOC claimed",
         [](ChannelGraph& g) { g.typeIntra = PathType::loc; });
  expect(ring, "carries", [](ChannelGraph& g) { g.speedIntra = 60000; });
  expect(ring, "of adapter", [](ChannelGraph& g) { g.speedInter = 51000; });
  expect(ring, "not positive", [](ChannelGraph& g) { g.speedIntra = 0; });
  expect(ring, "called the same", [](ChannelGraph& g) { g.sameChannels = true; });
  expect(ring, "as fast and as near, serves", [](ChannelGraph& g) {
    g.speedInter = 1000;
    for (Channel& channel : g.channels) channel.netIn = channel.netOut = g.channels[0].netIn;
    g.typeInter = PathType::sys;
    g.crossNic = 0;
  });
  expect(tree, "leaves by another port",
         [](ChannelGraph& g) { g.channels[0].netOut = g.channels[1].netOut; });
  expect(nvls, "two channels have the head",
         [](ChannelGraph& g) { g.channels[1] = g.channels[0]; });
  expect(nvls, "carries", [](ChannelGraph& g) { g.speedIntra = 42000; });
}

TEST(GraphXml, IsReadAsItWasWritten) {
  for (const std::string& name : presetNames()) {
    const Machine machine = machineOf(describeMachine(preset(name)), 0);
    const std::string text = writeGraphs(namedGraphs(searchGraphs(machine, {})), machine.topology);
    const auto graphs = parseGraphs(text, name, machine.topology);
    ASSERT_EQ(graphs.size(), 5u);
    EXPECT_EQ(writeGraphs(graphs, machine.topology), text);
  }
}

TEST(GraphXml, GivenGraphsAreTakenAsTheyAre) {
  const Machine machine = machineOf(describeMachine(preset("hgx-h200x4")), 4);
  ChannelGraph own = searchGraphs(machine, {}).ring;
  own.channels.resize(3);
  std::swap(own.channels[1].gpus[0], own.channels[1].gpus[2]);
  SearchSettings settings;
  settings.given =
      parseGraphs(writeGraphs({{GraphId::ring, own}, {GraphId::nvls, {}}}, machine.topology),
                  "given", machine.topology);
  const GraphSet graphs = searchGraphs(machine, settings);
  EXPECT_EQ(graphs.ring.channels, own.channels);
  EXPECT_EQ(graphs.tree.channels.size(), 3u) << "as many as the ring";
  EXPECT_EQ(graphs.nvls.channels.size(), 4u) << "an empty graph asks for nothing";
}

TEST(GraphXml, TakesDecimalAndHexadecimalNumbers) {
  const Machine machine = machineOf(describeMachine(preset("scale-16x16")), 16);
  std::string gpus;
  for (int gpu = 0; gpu < 16; gpu++) {
    gpus +=
        gpu % 2 ? fmt::format("<gpu dev=\"{:#x}\"/>", gpu) : fmt::format("<gpu dev=\"{}\"/>", gpu);
  }
  const auto text = [&](std::string_view members, int count) {
    return fmt::format(
        "<graphs version=\"1\">\n<graph id=\"0\" pattern=\"4\" nchannels=\"{}\" speedintra=\"20\" "
        "speedinter=\"20\" typeintra=\"NVL\" typeinter=\"PIX\">\n<channel>\n{}\n"
        "</channel></graph></graphs>",
        count, members);
  };
  const auto graphs = parseGraphs(text(gpus, 1), "file", machine.topology);
  EXPECT_TRUE(validate(graphs[0].graph, machine).empty());
  EXPECT_EQ(machine.topology.node(graphs[0].graph.channels[0].gpus[11]).gpu.dev, 11);

  // Made by hand for 2.27 and later: "10" is 16 where "a" is 10.
  std::string bare;
  for (int gpu = 0; gpu < 16; gpu++) bare += fmt::format("<gpu dev=\"{:x}\"/>", gpu);
  EXPECT_EQ(parseGraphs(text(bare, 1), "file", machine.topology)[0].graph.channels,
            graphs[0].graph.channels);
  const std::string sixteen = bare.substr(0, bare.rfind('<')) + "<gpu dev=\"10\"/>";
  EXPECT_EQ(errorOf([&] { parseGraphs(text(sixteen, 1), "file", machine.topology); }),
            "file:4: <gpu> has dev \"10\", which the topology lacks");

  const auto error = [&](std::string_view members, int count) {
    return errorOf([&] { parseGraphs(text(members, count), "file", machine.topology); });
  };
  EXPECT_EQ(error(gpus, 2), "file:2: <graph> says nchannels=\"2\" and has 1 channels");
  EXPECT_EQ(error(gpus + "<gpu dev=\"99\"/>", 1),
            "file:4: <gpu> has dev \"99\", which the topology lacks");
  EXPECT_EQ(error(gpus + "<gpu dev=\"0\"/>", 1), "file:4: <gpu> is a second time in its channel");
  EXPECT_EQ(error("<gpu dev=\"0\"/>", 1), "file:3: <channel> has 1 GPUs, the topology has 16");
  EXPECT_EQ(error("<gpu dev=\"g\"/>", 1),
            "file:4: <gpu> has dev=\"g\", which is not a whole number of at most 64 bits");
  EXPECT_EQ(error("<gpu/>", 1), "file:4: <gpu> has no attribute dev");
  // Ports of a file for several nodes: one node has no use for them.
  const std::string ported = "<net dev=\"0\"/>" + gpus + "<net dev=\"0\"/>";
  EXPECT_EQ(parseGraphs(text(ported, 1), "file", machine.topology)[0].graph.channels[0].netIn, -1);
  const Machine several = machineOf(describeMachine(preset("scale-16x16")), 32);
  EXPECT_GE(parseGraphs(text(ported, 1), "file", several.topology)[0].graph.channels[0].netIn, 0);
  EXPECT_EQ(errorOf([&] { parseGraphs(text("<net dev=\"99\"/>", 1), "file", several.topology); }),
            "file:4: <net> has dev \"99\", which the topology lacks");
}

TEST(GraphXml, RefusesWhatCannotBeJoined) {
  const Machine machine = machineOf(describeMachine(preset("hgx-h200x4")), 4);
  const auto error = [&](int id, int pattern, double speed, int channels) {
    const std::string channel =
        "<channel><gpu dev=\"0\"/><gpu dev=\"1\"/><gpu dev=\"2\"/><gpu dev=\"3\"/></channel>";
    const std::string text = fmt::format(
        "<graphs version=\"1\">\n<graph id=\"{}\" pattern=\"{}\" nchannels=\"{}\" "
        "speedintra=\"{}\" speedinter=\"{}\" typeintra=\"NVL\" "
        "typeinter=\"PIX\">{}</graph></graphs>",
        id, pattern, channels, speed, speed, channels ? channel : "");
    return errorOf([&] { parseGraphs(text, "file", machine.topology); });
  };
  EXPECT_EQ(error(0, 4, 20, 1), "");
  EXPECT_EQ(error(0, 5, 20, 1),
            "file:2: <graph> has pattern 5, which is none of the graph with id 0");
  EXPECT_EQ(error(3, 4, 20, 1),
            "file:2: <graph> has pattern 4, which is none of the graph with id 3");
  EXPECT_EQ(error(0, 4, 0, 1), "file:2: <graph> has channels, but no speed");
  EXPECT_EQ(error(4, 6, 0, 0), "") << "an empty graph, as NCCL dumps it";
  for (const int pattern : {1, 2, 3}) EXPECT_EQ(error(1, pattern, 20, 1), "");
}

}  // namespace
}  // namespace unisono::topology
