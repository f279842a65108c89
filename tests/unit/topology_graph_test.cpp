// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "topology/machine.h"
#include "topology/presets.h"
#include "topology_testing.h"

namespace unisono::topology {
namespace {

using testing::errorOf;
using testing::ownTopology;

Topology presetTopology(std::string_view name) {
  return buildTopology(describeMachine(preset(name)));
}

Machine machineOf(const MachineDescription& description, PathSettings settings = {}) {
  return Machine(buildTopology(describeMachine(description)), std::move(settings));
}

int gpu(const Machine& machine, int rank) {
  return machine.topology.gpuOfRank(rank);
}
int net(const Machine& machine, int number) {
  return machine.topology.of(NodeType::net)[static_cast<size_t>(number)];
}

const Link* linkBetween(const Topology& topology, int from, int to) {
  for (const Link& link : topology.node(from).links) {
    if (link.to == to) return &link;
  }
  return nullptr;
}

TEST(Bandwidths, AreThoseOfTheLinks) {
  EXPECT_EQ(nvlinkBandwidth(60), 18000);
  EXPECT_EQ(nvlinkBandwidth(70), 20000);
  EXPECT_EQ(nvlinkBandwidth(80), 20000);
  EXPECT_EQ(nvlinkBandwidth(86), 12000);
  EXPECT_EQ(nvlinkBandwidth(90), 20600);
  EXPECT_EQ(nvlinkBandwidth(100), 40100);
  EXPECT_EQ(pciBandwidth("", 0), 12000);
  EXPECT_EQ(pciBandwidth("8 GT/s", 16), 12000);
  EXPECT_EQ(pciBandwidth("16.0 GT/s PCIe", 16), 24000);
  EXPECT_EQ(pciBandwidth("32.0 GT/s PCIe", 16), 48000);
  EXPECT_EQ(pciBandwidth("64.0 GT/s PCIe", 8), 48000);
  EXPECT_EQ(pciBandwidth("2.5 GT/s PCIe", 1), 187);
  EXPECT_EQ(pciBandwidth("32.0 GT/s PCIe", 255), 48000);
  EXPECT_EQ(pciBandwidth("Unknown", 16), 12000);
  EXPECT_EQ(netBandwidth(400'000), 50000);
  EXPECT_EQ(netBandwidth(-1), 1250);
  EXPECT_EQ(netBandwidth(1), 1) << "a port carries something";
  const auto intel = [](int model) {
    return cpuLinkBandwidth(CpuArchitecture::x86, CpuVendor::intel, model);
  };
  EXPECT_EQ(intel(79), 6000);
  EXPECT_EQ(intel(106), 10000);
  EXPECT_EQ(intel(143), 22000);
  EXPECT_EQ(intel(207), 40000);
  EXPECT_EQ(cpuLinkBandwidth(CpuArchitecture::x86, CpuVendor::amd, 1), 16000);
  EXPECT_EQ(cpuLinkBandwidth(CpuArchitecture::x86, CpuVendor::zhaoxin, 0x5b), 9000);
  EXPECT_EQ(cpuLinkBandwidth(CpuArchitecture::x86, CpuVendor::zhaoxin, 1), 6000);
  EXPECT_EQ(cpuLinkBandwidth(CpuArchitecture::power, CpuVendor::unknown, 0), 32000);
  EXPECT_EQ(cpuLinkBandwidth(CpuArchitecture::arm, CpuVendor::unknown, 0), 6000);
}

TEST(PathTypes, HaveNamesAndOldNumbers) {
  for (int type = 0; type <= static_cast<int>(PathType::dis); type++) {
    EXPECT_EQ(pathTypeOf(nameOf(static_cast<PathType>(type))), static_cast<PathType>(type));
  }
  EXPECT_EQ(pathLevelOf("PXB"), PathType::pxb);
  EXPECT_EQ(pathLevelOf("0"), PathType::loc);
  EXPECT_EQ(pathLevelOf("3"), PathType::phb);
  EXPECT_EQ(pathLevelOf("5"), PathType::sys);
  for (const char* text : {"", "pxb", "10", "-1", "NVLINK"}) {
    EXPECT_FALSE(pathLevelOf(text).has_value()) << text;
  }
}

TEST(TopologyGraph, HoldsADetectedMachine) {
  const Topology topology =
      buildTopology(parseTopologyXml(ownTopology("h800x8-vm.detected.xml"), "h800"));
  EXPECT_EQ(topology.of(NodeType::gpu).size(), 8u);
  EXPECT_EQ(topology.of(NodeType::net).size(), 8u);
  EXPECT_EQ(topology.of(NodeType::nic).size(), 8u);
  EXPECT_EQ(topology.of(NodeType::pci).size(), 8u);
  EXPECT_EQ(topology.of(NodeType::cpu).size(), 2u);
  ASSERT_EQ(topology.of(NodeType::nvs).size(), 1u);
  const int nvSwitch = topology.of(NodeType::nvs).front();
  for (const int device : topology.of(NodeType::gpu)) {
    const Link* up = linkBetween(topology, device, nvSwitch);
    const Link* down = linkBetween(topology, nvSwitch, device);
    ASSERT_TRUE(up && down);
    EXPECT_EQ(up->bandwidth, 8 * 20600);  // four switches with two links each
    EXPECT_EQ(down->bandwidth, up->bandwidth);
  }
  for (const int port : topology.of(NodeType::net)) {
    const Node& node = topology.node(port);
    EXPECT_EQ(node.net.bandwidth, 50000);
    EXPECT_TRUE(node.net.collective);
    EXPECT_TRUE(node.net.gdr);
    ASSERT_EQ(node.links.size(), 1u);
    EXPECT_EQ(topology.node(node.links.front().to).type, NodeType::nic);
  }
  const auto& cpus = topology.of(NodeType::cpu);
  const Link* between = linkBetween(topology, cpus[0], cpus[1]);
  ASSERT_TRUE(between);
  EXPECT_EQ(between->type, LinkType::system);
  EXPECT_EQ(between->bandwidth, 22000);
}

TEST(TopologyGraph, FindsNodesByTheirNames) {
  const Topology topology = presetTopology("dgx-h100");
  for (int node = 0; node < static_cast<int>(topology.nodes.size()); node++) {
    EXPECT_EQ(topology.find(topology.nameOf(node)), node);
  }
  EXPECT_EQ(topology.find("NET/3"), topology.of(NodeType::net)[3]);
  EXPECT_EQ(topology.find("GPU/8"), -1);
  EXPECT_EQ(topology.find(""), -1);
}

TEST(TopologyGraph, EveryLinkHasItsOtherDirection) {
  for (const std::string& name : presetNames()) {
    const Topology topology = presetTopology(name);
    for (int node = 0; node < static_cast<int>(topology.nodes.size()); node++) {
      for (const Link& link : topology.node(node).links) {
        const auto& links = topology.node(link.to).links;
        EXPECT_TRUE(std::any_of(links.begin(), links.end(),
                                [&](const Link& back) {
                                  return back.to == node && back.type == link.type &&
                                         back.bandwidth == link.bandwidth;
                                }))
            << name << " " << topology.nameOf(node) << " " << topology.nameOf(link.to);
      }
    }
  }
}

TEST(TopologyGraph, FunctionsOfOneAdapterAreOneNic) {
  const Topology topology = buildTopology(parseTopologyXml(R"(<system version="1"><cpu numaid="0">
    <pci busid="0000:01:00.0" class="0x030200"><gpu dev="0" sm="80"/></pci>
    <pci busid="0000:02:00.0" class="0x020700">
      <nic><net name="a" dev="0" guid="0x7" port="1" speed="100000"/></nic></pci>
    <pci busid="0000:02:00.1" class="0x020700">
      <nic><net name="b" dev="1" guid="0x7" port="2" speed="100000"/>
           <net name="not offered"/></nic></pci>
    <pci busid="0000:03:00.0" class="0x060400"/>
    <nic><net name="c" dev="2"/></nic>
    </cpu></system>)",
                                                           "file"));
  EXPECT_EQ(topology.of(NodeType::nic).size(), 2u);
  EXPECT_EQ(topology.of(NodeType::net).size(), 3u);
  EXPECT_EQ(topology.of(NodeType::pci).size(), 0u);
  // The file gives no rank.
  EXPECT_EQ(topology.node(topology.of(NodeType::gpu).front()).gpu.rank, 0);
}

TEST(TopologyGraph, TwoLevelsOfABroadcomSwitchAreOne) {
  const auto machine = [](std::string_view lowerDevice) {
    return buildTopology(parseTopologyXml(fmt::format(R"(<system version="1"><cpu numaid="0">
    <pci busid="0000:01:00.0" class="0x060400" vendor="0x1000" device="0xc030"
         subsystem_vendor="0x1000" subsystem_device="0x100b" link_speed="32 GT/s" link_width="16">
      <pci busid="0000:02:00.0" class="0x060400" vendor="0x1000" device="{}"
           subsystem_vendor="0x1000" subsystem_device="0x100b" link_speed="32 GT/s" link_width="16">
        <pci busid="0000:03:00.0" class="0x030200"><gpu dev="0" sm="90"/></pci></pci>
      <pci busid="0000:04:00.0" class="0x060400" vendor="0x1000" device="{}"
           subsystem_vendor="0x1000" subsystem_device="0x100b" link_speed="32 GT/s" link_width="16">
        <pci busid="0000:05:00.0" class="0x030200"><gpu dev="1" sm="90"/></pci></pci>
    </pci></cpu></system>)",
                                                      lowerDevice, lowerDevice),
                                          "file"));
  };
  const Machine flat(machine("0xc030"), {});
  EXPECT_EQ(flat.topology.of(NodeType::pci).size(), 1u);
  EXPECT_EQ(flat.path(gpu(flat, 0), gpu(flat, 1)).type, PathType::pix);
  const Machine deep(machine("0xc040"), {});
  EXPECT_EQ(deep.topology.of(NodeType::pci).size(), 3u);
  EXPECT_EQ(deep.path(gpu(deep, 0), gpu(deep, 1)).type, PathType::pxb);
}

TEST(TopologyGraph, RefusesAMachineOfNothing) {
  const auto build = [](std::string_view text) {
    return errorOf([&] { buildTopology(parseTopologyXml(text, "file")); });
  };
  EXPECT_EQ(build("<system version=\"1\"/>"), "file: there is no <cpu>");
  EXPECT_EQ(build("<system version=\"1\"><cpu numaid=\"0\"/></system>"), "file: there is no <gpu>");
}

TEST(TopologyGraph, NeedsWhatAPlatformFileMayLeaveOut) {
  // Such a file is completed by detection before a graph is built from it.
  const XmlTopology file = parseTopologyXml(
      "<system version=\"1\"><cpu numaid=\"0\">\n<pci busid=\"0000:01:00.0\"><gpu dev=\"0\"/></pci>"
      "</cpu></system>",
      "file");
  EXPECT_EQ(gpusOf(file).front().sm, 0);
  EXPECT_EQ(errorOf([&] { buildTopology(file); }), "file:2: <gpu> has no attribute sm");
}

TEST(TopologyGraph, HoldsMoreThan256Nodes) {
  MachineDescription big;
  big.name = "big";
  big.gpus = 100;
  big.sockets = 2;
  big.switches = 50;
  big.nics = 60;
  big.switchNvlinks = 18;
  const Machine machine = machineOf(big);
  EXPECT_GT(machine.topology.nodes.size(), 256u);
  EXPECT_EQ(machine.path(gpu(machine, 0), gpu(machine, 99)).type, PathType::nvl);
}

TEST(Paths, OfASwitchedMachine) {
  const Machine machine(presetTopology("dgx-h100"), {});
  EXPECT_EQ(machine.path(gpu(machine, 0), gpu(machine, 0)).type, PathType::loc);
  EXPECT_EQ(machine.path(gpu(machine, 0), gpu(machine, 7)).type, PathType::nvl);
  EXPECT_EQ(machine.path(gpu(machine, 0), gpu(machine, 7)).bandwidth, 18 * 20600);
  EXPECT_EQ(machine.path(gpu(machine, 0), gpu(machine, 7)).hops, 2);
  EXPECT_EQ(machine.path(gpu(machine, 0), net(machine, 0)).type, PathType::pix);
  EXPECT_EQ(machine.path(net(machine, 0), gpu(machine, 0)).type, PathType::pix);
  // To a distant port through the GPU close to it; from it straight through the CPUs.
  EXPECT_EQ(machine.path(gpu(machine, 0), net(machine, 5)).type, PathType::pxn);
  EXPECT_EQ(machine.path(gpu(machine, 0), net(machine, 5)).via, gpu(machine, 5));
  EXPECT_EQ(machine.path(net(machine, 5), gpu(machine, 0)).type, PathType::sys);
  EXPECT_EQ(machine.path(net(machine, 5), gpu(machine, 0)).bandwidth, 22000);
}

TEST(Paths, LeadFromNodeToNode) {
  for (const std::string& name : presetNames()) {
    const Machine machine(presetTopology(name), {});
    std::vector<int> ends = machine.topology.of(NodeType::gpu);
    for (const int port : machine.topology.of(NodeType::net)) ends.push_back(port);
    for (const int from : ends) {
      for (const int to : ends) {
        int at = from;
        Bandwidth least = kLocalBandwidth;
        const auto hops = machine.paths.hops(from, to);
        for (const Hop& hop : hops) {
          ASSERT_EQ(hop.node, at) << name;
          const Link& link = machine.topology.node(at).links[static_cast<size_t>(hop.link)];
          least = std::min(least, link.bandwidth);
          at = link.to;
        }
        EXPECT_EQ(at, to) << name;
        EXPECT_EQ(static_cast<int>(hops.size()), machine.path(from, to).hops) << name;
        EXPECT_EQ(least, machine.path(from, to).bandwidth) << name;
      }
    }
  }
}

TEST(Paths, OfAMeshGoThroughOneGpuAtMost) {
  const Machine machine(presetTopology("dgx1-v100"), {});
  EXPECT_EQ(machine.path(gpu(machine, 0), gpu(machine, 3)).type, PathType::nvl);
  EXPECT_EQ(machine.path(gpu(machine, 0), gpu(machine, 3)).bandwidth, 40000);
  const Path& path = machine.path(gpu(machine, 0), gpu(machine, 5));
  EXPECT_EQ(path.type, PathType::nvb);
  const PeerVerdict verdict = checkPeer(machine.topology, machine.paths, machine.settings,
                                        gpu(machine, 0), gpu(machine, 5));
  EXPECT_TRUE(verdict.allowed);
  EXPECT_TRUE(verdict.through == gpu(machine, 1) || verdict.through == gpu(machine, 4));
  PathSettings direct;
  direct.nvbDisable = true;
  const Machine without(presetTopology("dgx1-v100"), direct);
  EXPECT_EQ(without.path(gpu(without, 0), gpu(without, 5)).type, PathType::sys);
}

TEST(Paths, ToAFarPortGoThroughAnyGpuCloseToIt) {
  // GPUs 6 and 7 are close to the last port; only 7 has NVLink to 3.
  const Machine machine(presetTopology("dgx1-v100"), {});
  EXPECT_EQ(machine.path(gpu(machine, 3), net(machine, 3)).via, gpu(machine, 7));
  EXPECT_EQ(machine.path(gpu(machine, 2), net(machine, 3)).via, gpu(machine, 6));
  EXPECT_EQ(machine.path(gpu(machine, 0), net(machine, 3)).type, PathType::sys);
}

TEST(Paths, OverTheChipLink) {
  const Machine machine(presetTopology("gh200-x4"), {});
  EXPECT_EQ(machine.path(gpu(machine, 0), machine.topology.of(NodeType::cpu)[0]).type,
            PathType::c2c);
  EXPECT_EQ(machine.path(gpu(machine, 0), net(machine, 0)).type, PathType::p2c);
  EXPECT_EQ(machine.path(net(machine, 0), gpu(machine, 0)).type, PathType::p2c);
  EXPECT_EQ(machine.path(gpu(machine, 1), net(machine, 0)).type, PathType::pxn);
  PathSettings settings;
  settings.gdrC2c = false;
  settings.pxnDisable = true;
  const Machine plain(presetTopology("gh200-x4"), settings);
  EXPECT_EQ(plain.path(gpu(plain, 0), net(plain, 0)).via, plain.topology.of(NodeType::cpu)[0]);
}

TEST(Paths, StepThroughTheCpuWithoutPeerAccess) {
  PathSettings settings;
  settings.p2pDisable = true;
  const Machine machine(presetTopology("rtx3090-x8"), settings);
  const Path& near = machine.path(gpu(machine, 0), gpu(machine, 1));
  EXPECT_EQ(near.type, PathType::phb);
  EXPECT_EQ(near.via, machine.topology.of(NodeType::cpu)[0]);
  EXPECT_EQ(machine.path(gpu(machine, 0), gpu(machine, 4)).type, PathType::sys);
  settings.p2pDisable = false;
  const Machine direct(presetTopology("rtx3090-x8"), settings);
  EXPECT_EQ(direct.path(gpu(direct, 0), gpu(direct, 1)).type, PathType::pix);
  EXPECT_EQ(direct.path(gpu(direct, 0), gpu(direct, 4)).type, PathType::sys);
}

TEST(Checks, OfPeersGiveTheirReason) {
  const auto reason = [](const PathSettings& settings, std::string_view name, int a, int b) {
    const Machine machine(presetTopology(name), settings);
    const PeerVerdict verdict =
        checkPeer(machine.topology, machine.paths, settings, gpu(machine, a), gpu(machine, b));
    return (verdict.allowed ? "yes: " : "no: ") + verdict.reason;
  };
  EXPECT_EQ(reason({}, "dgx-h100", 0, 1), "yes: the path is NVL, and P2P is used up to PXB");
  EXPECT_EQ(reason({}, "rtx3090-x8", 0, 4),
            "no: the path is SYS, and P2P is used up to PXB only (the default)");
  PathSettings settings;
  settings.p2pLevel = PathType::sys;
  EXPECT_EQ(reason(settings, "rtx3090-x8", 0, 4),
            "yes: the path is SYS, and P2P is used up to SYS");
  settings.p2pDisable = true;
  EXPECT_EQ(reason(settings, "dgx-h100", 0, 1), "no: NCCL_P2P_DISABLE forbids it");
  PathSettings refused;
  refused.p2pRefused.insert({0, 1});
  EXPECT_NE(reason(refused, "dgx-h100", 1, 0).find("the driver says"), std::string::npos);
  PathSettings containers;
  containers.ranks[0].shmDevice = 1;
  EXPECT_NE(reason(containers, "dgx-h100", 0, 1).find("do not share /dev/shm"), std::string::npos);
}

TEST(Checks, ReceiversReadBetweenAmpereWithNvlink) {
  const auto reads = [](std::string_view name, const PathSettings& settings) {
    const Machine machine(presetTopology(name), settings);
    return checkPeer(machine.topology, machine.paths, settings, gpu(machine, 0), gpu(machine, 1))
        .read;
  };
  EXPECT_TRUE(reads("dgx-a100", {}));
  EXPECT_FALSE(reads("dgx-h100", {}));
  EXPECT_FALSE(reads("dgx1-v100", {}));
  PathSettings settings;
  settings.p2pRead = true;
  EXPECT_TRUE(reads("dgx-h100", settings));
  settings.p2pRead = false;
  EXPECT_FALSE(reads("dgx-a100", settings));
}

TEST(Checks, OfSharedMemoryGiveTheirReason) {
  PathSettings settings;
  const Machine machine(presetTopology("rtx3090-x8"), settings);
  const auto check = [&] {
    return checkSharedMemory(machine.topology, settings, gpu(machine, 0), gpu(machine, 7));
  };
  EXPECT_TRUE(check().allowed);
  settings.ranks[7].shmDevice = 5;
  EXPECT_FALSE(check().allowed);
  EXPECT_NE(check().reason.find("/dev/shm"), std::string::npos);
  settings.ranks.clear();
  settings.shmDisable = true;
  EXPECT_EQ(check().reason, "NCCL_SHM_DISABLE forbids it");
  // Without P2P and without shared memory only the network is left.
  settings.p2pDisable = true;
  const Machine apart(machine.topology, settings);
  EXPECT_EQ(apart.path(gpu(apart, 0), gpu(apart, 1)).type, PathType::net);
  EXPECT_EQ(explainPath(apart.topology, apart.paths, settings, gpu(apart, 0), gpu(apart, 1)),
            "GPU/0 -> GPU/1: NET, only the network joins them\n"
            "P2P: no, NCCL_P2P_DISABLE forbids it\n"
            "shared memory: no, NCCL_SHM_DISABLE forbids it\n"
            "network instead: yes, nothing else joins them\n");
}

TEST(Checks, OfPxnGiveTheirReason) {
  const auto check = [](const MachineDescription& description, const PathSettings& settings) {
    const Machine machine = machineOf(description, settings);
    return checkPxn(machine.topology, machine.paths, settings, gpu(machine, 0), net(machine, 5));
  };
  const MachineDescription h100 = preset("dgx-h100");
  EXPECT_TRUE(check(h100, {}).used);
  PathSettings settings;
  settings.pxnDisable = true;
  EXPECT_EQ(check(h100, settings).reason, "NCCL_PXN_DISABLE forbids it");
  settings = {};
  settings.p2pDisable = true;
  EXPECT_EQ(check(h100, settings).reason, "P2P to GPU/5, the GPU near the port, is not allowed");
  settings = {};
  settings.gdrLevel = PathType::loc;
  EXPECT_NE(check(h100, settings).reason.find("GPU/5 cannot use GPUDirect"), std::string::npos);
  MachineDescription cards = h100;
  cards.switchNvlinks = 0;
  EXPECT_EQ(check(cards, {}).reason, "no NVLink leads to GPU/5, the GPU near the port");
}

TEST(Checks, OfMessagesThroughTheReceiversPort) {
  const auto check = [](const MachineDescription& description, const PathSettings& settings,
                        int port) {
    const Machine machine = machineOf(description, settings);
    const PxnVerdict verdict = checkMessagePxn(machine.topology, machine.paths, settings,
                                               gpu(machine, 0), net(machine, port));
    return std::pair(verdict.used && verdict.through == gpu(machine, port), verdict.reason);
  };
  const MachineDescription h100 = preset("dgx-h100");
  EXPECT_EQ(check(h100, {}, 0), std::pair(true, std::string("the port is near the GPU")));
  EXPECT_EQ(check(h100, {}, 5),
            std::pair(true, std::string("GPU/5 is near the port and forwards them")));
  PathSettings settings;
  settings.p2pPxnLevel = 1;
  EXPECT_EQ(check(h100, settings, 5),
            std::pair(true, std::string("the path is PXN, and NCCL_P2P_PXN_LEVEL=1 allows up to "
                                        "PXN")));
  settings.p2pPxnLevel = 0;
  EXPECT_EQ(check(h100, settings, 5),
            std::pair(false, std::string("NCCL_P2P_PXN_LEVEL=0 forbids it")));
  settings.p2pPxnLevel = 2;
  settings.pxnDisable = true;
  EXPECT_EQ(check(h100, settings, 5), std::pair(false, std::string("NCCL_PXN_DISABLE forbids it")));
  settings = {};
  settings.gdrLevel = PathType::loc;
  EXPECT_FALSE(check(h100, settings, 5).first);
  MachineDescription cards = h100;
  cards.switchNvlinks = 0;
  EXPECT_EQ(check(cards, {}, 5),
            std::pair(false, std::string("no NVLink leads to GPU/5, the GPU near the port")));
}

// Of GPUs at one switch each has ports of its own, and all ports have as many GPUs.
TEST(Checks, GpusShareThePortsForMessages) {
  for (const int nics : {2, 4, 8, 16}) {
    MachineDescription description = preset("dgx-a100");
    description.nics = nics;
    const Machine machine = machineOf(description);
    std::map<int, int> uses;
    for (int g = 0; g < 8; g++) {
      const std::vector<int> ports = messagePorts(machine.topology, machine.paths, gpu(machine, g));
      ASSERT_EQ(static_cast<int>(ports.size()), std::max(nics / 8, 1)) << nics;
      for (const int port : ports) {
        uses[port]++;
        const std::vector<int>& near = machine.paths.nearest(gpu(machine, g));
        EXPECT_NE(std::find(near.begin(), near.end(), port), near.end()) << nics;
      }
    }
    if (nics < 4) continue;  // some switches have none
    EXPECT_EQ(static_cast<int>(uses.size()), nics);
    for (const auto& [port, count] : uses) EXPECT_EQ(count, std::max(8 / nics, 1)) << nics;
  }
}

// Of two GPUs that are as near to the port, the one that uses it forwards. A GPU that is near
// itself needs no other one at level 1.
TEST(Checks, MessagesLeaveThroughTheGpuThatUsesThePort) {
  const Machine machine = machineOf(preset("dgx-a100"));
  for (int g = 0; g < 8; g++) {
    const int port = messagePorts(machine.topology, machine.paths, gpu(machine, g)).front();
    for (int other = 0; other < 8; other++) {
      PathSettings settings;
      const auto through = [&] {
        return checkMessagePxn(machine.topology, machine.paths, settings, gpu(machine, other), port)
            .through;
      };
      EXPECT_EQ(through(), gpu(machine, g)) << other << " to the port of " << g;
      settings.p2pPxnLevel = 1;
      const std::vector<int>& near = machine.paths.nearest(port);
      const bool isNear = std::find(near.begin(), near.end(), gpu(machine, other)) != near.end();
      EXPECT_EQ(through() == gpu(machine, other), isNear) << other << " to the port of " << g;
    }
  }
  PathSettings settings;
  settings.p2pDisable = true;
  const int port = messagePorts(machine.topology, machine.paths, gpu(machine, 7)).front();
  EXPECT_EQ(
      checkMessagePxn(machine.topology, machine.paths, settings, gpu(machine, 0), port).reason,
      "P2P to GPU/7, the GPU near the port, is not allowed");
}

TEST(Checks, TwoGpusOfAnAmdMachineReachAcrossSockets) {
  MachineDescription two = preset("a100-pcie-x4");
  two.gpus = 2;
  const Machine machine = machineOf(two);
  EXPECT_TRUE(
      checkPeer(machine.topology, machine.paths, {}, gpu(machine, 0), gpu(machine, 1)).allowed);
  const Machine four = machineOf(preset("a100-pcie-x4"));
  EXPECT_FALSE(checkPeer(four.topology, four.paths, {}, gpu(four, 0), gpu(four, 3)).allowed);
}

TEST(Checks, OfGpuDirect) {
  const auto check = [](const MachineDescription& description, const PathSettings& settings,
                        bool read) {
    const Machine machine = machineOf(description, settings);
    return checkGdr(machine.topology, machine.paths, settings, gpu(machine, 0), net(machine, 0),
                    read);
  };
  EXPECT_TRUE(check(preset("dgx-h100"), {}, true).allowed);
  EXPECT_FALSE(check(preset("dgx-h100"), {}, false).flush);
  EXPECT_TRUE(check(preset("dgx-a100"), {}, false).flush);
  EXPECT_FALSE(check(preset("rtx3090-x8"), {}, false).allowed);
  MachineDescription volta = preset("dgx-h100");
  volta.sm = 70;
  EXPECT_TRUE(check(volta, {}, true).allowed) << "NVLink makes room";
  volta.switchNvlinks = 0;
  EXPECT_FALSE(check(volta, {}, true).allowed);
  EXPECT_TRUE(check(volta, {}, false).allowed);
  PathSettings forced;
  forced.gdrRead = true;
  EXPECT_TRUE(check(volta, forced, true).allowed);
  PathSettings near;
  near.gdrLevel = PathType::loc;
  EXPECT_EQ(check(preset("dgx-h100"), near, true).reason,
            "the path is PIX, and GPUDirect is used up to LOC only (NCCL_NET_GDR_LEVEL)");
}

TEST(Checks, ExplainAPathInFull) {
  const Machine machine(presetTopology("dgx-h100"), {});
  const std::string text = explainPath(machine.topology, machine.paths, machine.settings,
                                       gpu(machine, 0), net(machine, 1));
  EXPECT_NE(text.find("GPU/0 -> NET/1-mlx5_1: PXN, 48 GB/s"), std::string::npos) << text;
  EXPECT_NE(text.find("routed through GPU/1; the shortest path is PHB"), std::string::npos) << text;
  // The port reads the memory of the GPU that PXN sends through.
  EXPECT_NE(text.find("GPUDirect read: yes, from GPU/1, which sends for GPU/0 (PXN): the path is "
                      "PIX"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("PXN: yes, GPU/1 is near the port (PIX)"), std::string::npos) << text;
}

TEST(Checks, PreferTheNetworkWhereItIsWider) {
  MachineDescription wide = preset("rtx3090-x8");
  wide.nics = 8;
  wide.switches = 8;
  wide.nicMegabits = 200'000;
  wide.gdr = true;
  const Machine machine = machineOf(wide);
  const Verdict across =
      preferNet(machine.topology, machine.paths, gpu(machine, 0), gpu(machine, 7));
  EXPECT_TRUE(across.allowed) << across.reason;
  EXPECT_FALSE(
      preferNet(machine.topology, machine.paths, gpu(machine, 0), gpu(machine, 1)).allowed);
  const Machine far(presetTopology("rtx3090-x8"), {});
  EXPECT_EQ(preferNet(far.topology, far.paths, gpu(far, 0), gpu(far, 7)).reason,
            "they have no ports as near as PXB");
}

TEST(Trim, KeepsTheDomainOfTheRank) {
  PathSettings apart;
  for (int rank = 4; rank < 8; rank++) apart.ranks[rank].shmDevice = 1;
  const Topology topology = presetTopology("dgx-h100");
  const Machine low = trimMachine(topology, apart, 0, 8);
  const Machine high = trimMachine(topology, apart, 6, 8);
  const auto ranks = [](const Machine& machine) {
    std::set<int> found;
    for (const int device : machine.topology.of(NodeType::gpu)) {
      found.insert(machine.topology.node(device).gpu.rank);
    }
    return found;
  };
  EXPECT_EQ(ranks(low), (std::set<int>{0, 1, 2, 3}));
  EXPECT_EQ(ranks(high), (std::set<int>{4, 5, 6, 7}));
  EXPECT_EQ(low.topology.of(NodeType::net).size(), 8u) << "the others are reached by the network";
}

TEST(Trim, DropsNicsWhereAllRanksAreNear) {
  const Topology topology = presetTopology("dgx-h100");
  EXPECT_TRUE(trimMachine(topology, {}, 0, 8).topology.of(NodeType::net).empty());
  EXPECT_EQ(trimMachine(topology, {}, 0, 16).topology.of(NodeType::net).size(), 8u);
  EXPECT_NE(errorOf([&] { trimMachine(topology, {}, 8, 16); }), "");
}

TEST(Trim, LeavesOutGpusWithoutRank) {
  XmlTopology file = describeMachine(preset("hgx-h200x4"));
  std::string text = writeTopologyXml(file);
  for (const char* rank : {"rank=\"2\"", "rank=\"3\""}) {
    text.replace(text.find(rank), 8, "rank=\"-1\"");
  }
  const Machine machine = trimMachine(buildTopology(parseTopologyXml(text, "file")), {}, 0, 2);
  EXPECT_EQ(machine.topology.of(NodeType::gpu).size(), 2u);
}

TEST(Machines, TellTheirBoundsAndAffinity) {
  const Machine machine = trimMachine(presetTopology("hgx-h200x4"), {}, 0, 4);
  EXPECT_EQ(bandwidthBounds(machine).widestPath, 18 * 20600);
  EXPECT_EQ(bandwidthBounds(machine).widestGpu, 18 * 20600);
  const Machine nets(presetTopology("dgx-h100"), {});
  EXPECT_EQ(bandwidthBounds(nets).widestPath, 48000);
  EXPECT_EQ(cpuAffinityOf(nets, 0), "00000000,ffffffff");
  EXPECT_EQ(cpuAffinityOf(nets, 7), "ffffffff,00000000");
  EXPECT_EQ(cpuAffinityOf(nets, 99), "");
  EXPECT_EQ(portAffinityOf(nets, 0), "00000000,ffffffff");
  EXPECT_EQ(portAffinityOf(nets, 7), "ffffffff,00000000");
  EXPECT_EQ(portAffinityOf(nets, 99), "");
}

TEST(Machines, AreDescribedWithEveryLink) {
  const Machine machine(presetTopology("dgx-h100"), {});
  const std::string tree = describeTopology(machine);
  for (const char* part :
       {"CPU/0", "+ 48 PCI GPU/0", "- 370.8 NVL NVS", "+ 50 NET NET/0-mlx5_0", "- 22 SYS CPU/1"}) {
    EXPECT_NE(tree.find(part), std::string::npos) << part << "\n" << tree;
  }
  const std::string table = describePaths(machine);
  EXPECT_NE(table.find("NVL 370.8"), std::string::npos) << table;
  EXPECT_NE(table.find("PXN 48"), std::string::npos) << table;
}

TEST(Machines, ListADeviceWithTwoLinksOnce) {
  const std::string tree = describeTopology(Machine(presetTopology("gh200-x4"), {}));
  EXPECT_NE(tree.find("  + 450 C2C, 48 PCI GPU/0\n    - 123.6 NVL GPU/1\n"), std::string::npos)
      << tree;
  EXPECT_EQ(tree.find("C2C GPU/0"), std::string::npos) << tree;
}

TEST(Machines, OfHostsThatNoWireJoinsAreApart) {
  std::string text = "<system version=\"1\">";
  for (int host = 0; host < 2; host++) {
    text += fmt::format(
        "<cpu host_hash=\"{0:#x}\" numaid=\"0\" arch=\"x86_64\">"
        "<pci busid=\"0000:01:00.0\" class=\"0x030200\"><gpu dev=\"0\" sm=\"90\" rank=\"{1}\"/>"
        "</pci><nic><net name=\"eth0\" dev=\"0\" speed=\"10000\"/></nic></cpu>",
        7 + host, host);
  }
  const Machine machine(buildTopology(parseTopologyXml(text + "</system>", "file")), {});
  EXPECT_EQ(machine.paths.wirePath(gpu(machine, 0), gpu(machine, 1)).type, PathType::dis);
  EXPECT_EQ(machine.path(gpu(machine, 0), gpu(machine, 1)).type, PathType::net);
  EXPECT_EQ(machine.path(gpu(machine, 0), net(machine, 1)).type, PathType::dis);
  const Machine own = trimMachine(machine.topology, {}, 1, 2);
  EXPECT_EQ(own.topology.of(NodeType::gpu).size(), 1u);
  EXPECT_EQ(own.topology.of(NodeType::net).size(), 1u);
}

TEST(Machines, OfSeveralHostsShareTheirNvlink) {
  std::string text = "<system version=\"1\">";
  for (int host = 0; host < 2; host++) {
    text += fmt::format("<cpu host_hash=\"{:#x}\" numaid=\"0\" arch=\"arm64\">", 7 + host);
    for (int g = 0; g < 2; g++) {
      text += fmt::format(
          "<pci busid=\"0000:0{}:00.0\" class=\"0x030200\"><gpu dev=\"{}\" sm=\"100\" rank=\"{}\">"
          "<nvlink target=\"fffffff:ff:ff.0\" count=\"18\" tclass=\"0x068000\"/></gpu></pci>",
          g + 1, g, 2 * host + g);
    }
    text += "</cpu>";
  }
  text += "</system>";
  PathSettings settings;
  for (int rank = 0; rank < 4; rank++) settings.ranks[rank].fabric = 42;
  const Machine rack(buildTopology(parseTopologyXml(text, "file")), settings);
  EXPECT_EQ(rack.topology.hosts.size(), 2u);
  EXPECT_EQ(rack.path(gpu(rack, 0), gpu(rack, 3)).type, PathType::nvl);
  EXPECT_EQ(rack.topology.nameOf(gpu(rack, 3)), "GPU/1:1");
  EXPECT_EQ(Machine(rack.topology, {}).path(gpu(rack, 0), gpu(rack, 3)).type, PathType::nvl);
  settings.ranks[0].fabric = settings.ranks[3].fabric = 0;
  EXPECT_EQ(Machine(rack.topology, settings).path(gpu(rack, 0), gpu(rack, 3)).type, PathType::net);
  settings.ranks[0].fabric = 42;
  settings.ranks[3].fabric = 43;
  const Machine apart(rack.topology, settings);
  EXPECT_EQ(apart.path(gpu(apart, 0), gpu(apart, 3)).type, PathType::net);
  EXPECT_EQ(trimMachine(rack.topology, settings, 0, 4).topology.of(NodeType::gpu).size(), 3u);
}

}  // namespace
}  // namespace unisono::topology
