// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>

#include "topology/graph_xml.h"
#include "topology/presets.h"
#include "topology/search.h"
#include "topology/validate.h"
#include "topology_testing.h"

// Channels of machines that are known. The files belong to others and are not in the repository:
// see docs/results/topology_known_graphs.md for their names and where they come from.
namespace unisono::topology {
namespace {

using testing::expectValid;
using testing::foreignTopology;
using testing::machineOf;
using testing::readFile;

// The topology of a file in which the GPUs from rank `gpus` on take no part.
XmlTopology readKnown(const std::filesystem::path& file, int gpus) {
  std::string text = readFile(file);
  for (int rank = gpus; rank < 8; rank++) {
    const std::string attribute = fmt::format("rank=\"{}\"", rank);
    if (const size_t at = text.find(attribute); at != std::string::npos) {
      text.replace(at, attribute.size(), "rank=\"-1\"");
    }
  }
  return parseTopologyXml(text, file.filename().string());
}

// What NCCL chose, and what we choose.
struct Known {
  const char* topology;
  const char* graphs;
  int gpus;              // of the machine that take part
  int rankCount;         // 0: the communicator spans several nodes
  bool refused = false;  // the driver refuses P2P
};

TEST(ForeignMachines, AreServedAtLeastAsWellAsByNccl) {
  int seen = 0;
  for (const Known& known : {
           Known{"h800x8-vm.detected.xml", "h800x8-vm.graphs.xml", 8, 0},
           Known{"h200x4-vm.detected.xml", "h200x4-vm.graphs.xml", 4, 4},
           Known{"h200x4-vm.detected.xml", "h200x2-of-x4-vm.graphs.xml", 2, 2},
           Known{"simllm-h200x8.topo.xml", "simllm-h200x8.graphs.xml", 8, 8},
           Known{"simllm-b200x8.topo.xml", "simllm-b200x8.graphs.xml", 8, 8},
           Known{"simllm-a100x4.topo.xml", "simllm-a100x4.graphs.xml", 4, 4},
           Known{"panlichen-3090x8.topo.xml", "panlichen-3090x8.graphs.xml", 8, 0, true},
           Known{"yccl-a6000x4.topo.xml", "yccl-a6000x4.graphs.xml", 4, 4},
       }) {
    const auto topologyFile = foreignTopology(known.topology);
    const auto graphsFile = foreignTopology(known.graphs);
    if (!topologyFile || !graphsFile) continue;
    ++seen;
    PathSettings paths;
    paths.p2pDisable = known.refused;
    const Machine machine = machineOf(readKnown(*topologyFile, known.gpus), known.rankCount, paths);
    SearchSettings settings;
    settings.collnet = known.rankCount == 0;
    const GraphSet ours = searchGraphs(machine, settings);
    expectValid(ours, machine, known.graphs);
    const auto theirs = parseGraphs(readFile(*graphsFile), known.graphs, machine.topology);
    for (const NamedGraph& their : theirs) {
      for (const NamedGraph& our : namedGraphs(ours)) {
        if (our.id != their.id || their.graph.channels.empty()) continue;
        SCOPED_TRACE(std::string(known.graphs) +
                     "\nours: " + describeGraph(our.graph, machine.topology) +
                     "theirs: " + describeGraph(their.graph, machine.topology));
        EXPECT_GE(our.graph.totalIntra(), their.graph.totalIntra());
        EXPECT_GE(our.graph.totalInter(), their.graph.totalInter());
        EXPECT_LE(our.graph.typeIntra, their.graph.typeIntra);
        EXPECT_LE(our.graph.typeInter, their.graph.typeInter);
      }
    }
  }
  if (seen == 0) GTEST_SKIP() << "the files of known machines are not next to this checkout";
}

// Machines whose graphs are not known: a ring and a tree that are no last resort.
TEST(ForeignMachines, AllGetValidChannels) {
  int seen = 0;
  for (const char* name :
       {"simccl-1A100_1CX6.xml", "simccl-2A100_1CX6.xml", "simccl-4A100_2CX6.xml",
        "simccl-8A100_4CX6.xml", "gvisor-b200x8.topo.xml", "xla-h100x8-gcp.topo.xml",
        "xla-a100x8.topo.xml", "aws-p5.topo.xml", "rtp-llm-completed.topo.xml",
        "sugarlxn-4090x4.topo.xml", "yynil-4090x2.topo.xml", "yccl-l20x16.topo.xml",
        "yccl-h800x8.topo.xml", "miner-a6000x2.topo.xml", "ibm-h100x8.topo.xml"}) {
    const auto path = foreignTopology(name);
    if (!path) continue;
    ++seen;
    const XmlTopology file = readKnown(*path, 8);
    for (const int rankCount : {0, static_cast<int>(gpusOf(file).size())}) {
      const Machine machine = machineOf(file, rankCount);
      const GraphSet graphs = searchGraphs(machine, {});
      expectValid(graphs, machine, name);
      EXPECT_GT(graphs.ring.speedIntra, 100) << name;
      EXPECT_GT(graphs.tree.speedIntra, 100) << name;
    }
  }
  if (seen == 0) GTEST_SKIP() << "the files of known machines are not next to this checkout";
}

// Platforms' files without GPUs, which detection completes.
TEST(ForeignMachines, FilesOfPlatformsAreReadAsTheyAre) {
  int seen = 0;
  for (const char* name : {"aws-g5.48xl-topo.xml", "aws-p4d-24xl-topo.xml",
                           "aws-p4de-24xl-topo.xml", "azure-ndv2-topo.xml", "azure-ndv4-topo.xml",
                           "azure-ndv5-topo.xml", "h800x8-vm.virtual.xml", "rtp-llm.topo.xml"}) {
    const auto path = foreignTopology(name);
    if (!path) continue;
    ++seen;
    const XmlTopology file = parseTopologyXml(readFile(*path), name);
    EXPECT_TRUE(file.notes.empty()) << file.notes.front();
    EXPECT_EQ(writeTopologyXml(parseTopologyXml(writeTopologyXml(file), name)),
              writeTopologyXml(file));
  }
  if (seen == 0) GTEST_SKIP() << "the files of known machines are not next to this checkout";
}

TEST(ForeignMachines, RailsMadeByHandAreReadAndOverloadTheirLinks) {
  const auto topology = foreignTopology("gvisor-b200x8.topo.xml");
  const auto graphs = foreignTopology("gvisor-b200x8.graphs.xml");
  if (!topology || !graphs) GTEST_SKIP() << "the files are not next to this checkout";
  const Machine machine = machineOf(parseTopologyXml(readFile(*topology), "rails"), 0);
  // Its numbers are hexadecimal without 0x: the last ring uses port "c".
  const auto theirs = parseGraphs(readFile(*graphs), "rails", machine.topology);
  ASSERT_EQ(theirs[0].graph.channels.size(), 8u);
  EXPECT_EQ(machine.topology.node(theirs[0].graph.channels[7].netIn).net.dev, 12);
  // Eight rings at 160 GB/s leave a GPU with 18 NVLinks.
  EXPECT_FALSE(validate(theirs[0].graph, machine).empty());
}

TEST(ForeignMachines, TheSimulatedHostOfFourGpusGetsItsRings) {
  const auto path = foreignTopology("simccl-4A100_2CX6.xml");
  if (!path) GTEST_SKIP() << "the files of known machines are not next to this checkout";
  const Machine machine = machineOf(parseTopologyXml(readFile(*path), "4A100"), 0);
  const GraphSet graphs = searchGraphs(machine, {});
  expectValid(graphs, machine, "4A100");
  EXPECT_EQ(graphs.ring.totalInter(), 48000);
  EXPECT_EQ(graphs.tree.totalIntra(), 96000);
  EXPECT_EQ(graphs.tree.totalInter(), 48000);
}

TEST(ForeignMachines, AGraphMadeByHandCanPromiseTooMuch) {
  const auto topology = foreignTopology("azure-ncv4-topo.xml");
  const auto graphs = foreignTopology("azure-ncv4.graphs.xml");
  if (!topology || !graphs) GTEST_SKIP() << "the files are not next to this checkout";
  const Machine machine = machineOf(parseTopologyXml(readFile(*topology), "ncv4"), 4);
  // Two rings at 12 GB/s leave GPU 0 by one PCI link that the file gives no speed, taken for 12.
  const auto theirs = parseGraphs(readFile(*graphs), "ncv4", machine.topology);
  EXPECT_FALSE(validate(theirs[0].graph, machine).empty());
  const GraphSet ours = searchGraphs(machine, {});
  expectValid(ours, machine, "ncv4");
  EXPECT_EQ(ours.ring.totalIntra(), 12000);
}

TEST(ForeignMachines, GiveTheNumbersOfPublishedRuns) {
  // HGX H200: ring and tree 12 channels at 30, NVLS 8 heads at 40 / 60.
  const Machine h200 = machineOf(describeMachine(preset("hgx-h200x8")), 8);
  const GraphSet hopper = searchGraphs(h200, {});
  EXPECT_EQ(hopper.ring.channels.size(), 12u);
  EXPECT_EQ(hopper.ring.speedIntra, 30000);
  EXPECT_GE(hopper.tree.totalIntra(), 360'000);
  EXPECT_EQ(hopper.nvls.channels.size(), 8u);
  EXPECT_EQ(hopper.nvls.speedIntra, 40000);
  EXPECT_EQ(hopper.nvls.speedInter, 60000);
  // HGX B200: ring 16 at 45, tree 16 at 40, NVLS 8 heads at 80 / 90.
  const Machine b200 = machineOf(describeMachine(preset("hgx-b200x8")), 8);
  const GraphSet blackwell = searchGraphs(b200, {});
  EXPECT_EQ(blackwell.ring.channels.size(), 16u);
  EXPECT_EQ(blackwell.ring.speedIntra, 45000);
  EXPECT_GE(blackwell.tree.totalIntra(), 640'000);
  EXPECT_EQ(blackwell.nvls.channels.size(), 8u);
  EXPECT_EQ(blackwell.nvls.speedIntra, 80000);
  EXPECT_EQ(blackwell.nvls.speedInter, 90000);
}

}  // namespace
}  // namespace unisono::topology
