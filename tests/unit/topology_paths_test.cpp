// SPDX-License-Identifier: Apache-2.0
// Rules of paths where NCCL's answer is known and not obvious.
#include "topology/paths.h"

#include <gtest/gtest.h>

#include "topology_layouts.h"
#include "topology_testing.h"

namespace unisono::topology {
namespace {

using testing::GpuFabric;
using testing::machineOf;

TEST(PathRules, ThroughAChipLinkAndAHostBridgeIsP2c) {
  // As a GB10: one GPU with a chip-to-chip link, ports without GPUDirect.
  MachineDescription spark;
  spark.name = "one GPU with C2C";
  spark.gpus = spark.sockets = 1;
  spark.nics = 2;
  spark.sm = 121;
  spark.chipLinkMegabytes = 300'000;
  spark.gdr = false;
  spark.cpuArchitecture = "arm64";
  spark.cpuVendor = "ARM";
  const Machine machine = machineOf(describeMachine(spark), 0);
  const int gpu = machine.topology.of(NodeType::gpu).front();
  for (const int net : machine.topology.of(NodeType::net)) {
    EXPECT_EQ(machine.path(gpu, net).type, PathType::p2c);
    EXPECT_EQ(machine.path(net, gpu).type, PathType::p2c);
    EXPECT_GE(machine.path(net, gpu).via, 0) << "not through the CPU";
  }
}

TEST(PathRules, TheWidestPortIsTheNearest) {
  const Machine machine = machineOf(
      parseTopologyXml(R"(<system version="1"><cpu numaid="0" arch="x86_64" vendor="GenuineIntel">
    <pci busid="0000:01:00.0" class="0x060400" link_speed="32 GT/s" link_width="16">
      <pci busid="0000:02:00.0" class="0x030200" link_speed="32 GT/s" link_width="16">
        <gpu dev="0" sm="90" gdr="1"/></pci>
      <pci busid="0000:03:00.0" class="0x020000" link_speed="8 GT/s" link_width="1">
        <nic><net name="slow" dev="0" guid="0x1" speed="1000" gdr="1"/></nic></pci></pci>
    <pci busid="0000:04:00.0" class="0x020700" link_speed="32 GT/s" link_width="16">
      <nic><net name="fast" dev="1" guid="0x2" speed="400000" gdr="1"/></nic></pci>
    <pci busid="0000:05:00.0" class="0x020700" link_speed="32 GT/s" link_width="16">
      <nic><net name="fast too" dev="2" guid="0x3" speed="400000" gdr="1"/></nic></pci>
    </cpu></system>)",
                       "mixed ports"),
      0);
  const auto& nets = machine.topology.of(NodeType::net);
  const int gpu = machine.topology.of(NodeType::gpu).front();
  EXPECT_EQ(machine.paths.nearest(gpu), (std::vector{nets[1], nets[2]}));
  EXPECT_EQ(machine.paths.nearest(nets[0]), std::vector{gpu});
  const GraphSet graphs = searchGraphs(machine, {});
  EXPECT_GT(graphs.ring.totalInter(), 20000) << "channels start at the slow port";
}

// Graphs are planned as NCCL plans them: GPUDirect reads as if they were writes. What a transport
// may do is told apart (docs/decisions/0007).
TEST(PathRules, RefusedReadsDoNotChangePathsAndGraphs) {
  const testing::Layout b200{100, GpuFabric::nvswitch, 8, 8, true, false};
  const testing::Layout v100{70, GpuFabric::pcie, 4, 2, true, false};
  for (const testing::Layout& layout : {b200, v100}) {
    SCOPED_TRACE(testing::nameOf(layout));
    PathSettings reads, noReads;
    reads.gdrRead = true;
    noReads.gdrRead = false;
    const XmlTopology file = describeMachine(testing::describe(layout));
    const Machine with = machineOf(file, 0, reads), without = machineOf(file, 0, noReads);
    EXPECT_EQ(describePaths(with), describePaths(without));
    EXPECT_EQ(writeGraphs(namedGraphs(searchGraphs(with, {})), with.topology),
              writeGraphs(namedGraphs(searchGraphs(without, {})), without.topology));
    const int gpu = without.topology.of(NodeType::gpu).front();
    const int net = without.topology.of(NodeType::net).front();
    const std::string why =
        explainPath(without.topology, without.paths, without.settings, gpu, net);
    EXPECT_NE(why.find("GPUDirect read: no"), std::string::npos) << why;
    EXPECT_NE(
        explainPath(with.topology, with.paths, with.settings, gpu, net).find("GPUDirect read: yes"),
        std::string::npos);
  }
}

}  // namespace
}  // namespace unisono::topology
