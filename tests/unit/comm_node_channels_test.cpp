// SPDX-License-Identifier: Apache-2.0
#include "comm/node_channels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/error.h"
#include "comm/node_machine.h"
#include "detect/detect.h"
#include "topology/presets.h"
#include "topology/topology.h"
#include "topology/xml_merge.h"

namespace unisono::comm {
namespace {

// Ranks on GPUs 0, 1, ... of hosts of `gpusPerHost`.
std::vector<RankFacts> factsOf(int ranks, int gpusPerHost, int firstBus = 1) {
  std::vector<RankFacts> all(static_cast<size_t>(ranks));
  for (int rank = 0; rank < ranks; rank++) {
    RankFacts& facts = all[static_cast<size_t>(rank)];
    facts = {};
    facts.computeCapability = 90;
    facts.host = static_cast<uint64_t>(rank / gpusPerHost) + 100;
    facts.reach.peers = 1;
    std::snprintf(facts.busId.data(), facts.busId.size(), "0000:%02x:00.0",
                  static_cast<unsigned>(firstBus + rank % gpusPerHost));
  }
  return all;
}

std::vector<topology::RankPlace> placesOf(const std::vector<RankFacts>& ranks,
                                          const Settings& settings = {}) {
  std::vector<topology::RankPlace> places;
  for (size_t rank = 0; rank < ranks.size(); rank++) {
    places.push_back(findPlace(ranks, hostsOf(ranks), static_cast<int>(rank), settings).place);
  }
  return places;
}

// A file of the test's own, gone with it.
class File {
 public:
  explicit File(const std::string& name, const std::string& text = "")
      : path_(std::filesystem::path(::testing::TempDir()) /
              (name + std::to_string(reinterpret_cast<uintptr_t>(this)))) {
    if (!text.empty()) std::ofstream(path_) << text;
  }
  ~File() { std::filesystem::remove(path_); }
  std::string path() const { return path_.string(); }
  std::string text() const {
    std::ostringstream out;
    out << std::ifstream(path_).rdbuf();
    return out.str();
  }

 private:
  std::filesystem::path path_;
};

std::string errorOf(const std::vector<RankFacts>& ranks, const Settings& settings) {
  try {
    findPlace(ranks, hostsOf(ranks), 0, settings);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(NodeMachine, TakesWhatRanksToldOfMemoryAndFabrics) {
  std::vector<RankFacts> ranks = factsOf(4, 2);
  for (size_t r = 0; r < ranks.size(); r++) {
    ranks[r].sharedMemory = 10 + r;
    ranks[r].fabric = 20 + r;
  }
  const NodeMachine machine =
      nodeMachine({}, runtime::Backend::host, devicesOfNode(ranks, hostsOf(ranks), 3));
  ASSERT_EQ(machine.rules.ranks.size(), 2u);
  EXPECT_EQ(machine.rules.ranks.at(0).shmDevice, 12u);
  EXPECT_EQ(machine.rules.ranks.at(1).fabric, 23u);
}

// In place of those of the machine: below their PCI device, or the first CPU.
TEST(NodeMachine, HasThePortsOfTheNetworkPlugin) {
  const auto ranks = factsOf(16, 8);
  Settings settings;
  settings.hostTopologyFile = UNISONO_TEST_DATA "/topologies/h800x8-vm.detected.xml";
  const auto fileRanks = [&] {
    auto facts = ranks;
    const topology::XmlTopology file =
        topology::parseTopologyXml(detect::readFile(settings.hostTopologyFile, ""), "");
    std::vector<std::string> gpus;
    topology::XmlNode system = file.system;
    visitGpus(system, [&](topology::XmlNode& pci, topology::XmlNode&) {
      gpus.push_back(*pci.find("busid"));
    });
    for (size_t r = 0; r < facts.size(); r++) {
      std::snprintf(facts[r].busId.data(), facts[r].busId.size(), "%s", gpus[r % 8].c_str());
    }
    return facts;
  }();
  Ports ports;
  for (int dev = 0; dev < 3; dev++) {
    auto& port = ports ? *ports : ports.emplace();
    detect::NicPort& added = port.emplace_back();
    added.name = "fabric" + std::to_string(dev);
    added.dev = dev;
    added.guid = 70 + static_cast<uint64_t>(dev);
    added.megabits = 200'000;
    added.latency = 2.5;
  }
  const auto devices = devicesOfNode(fileRanks, hostsOf(fileRanks), 3);
  ports->front().device = "/sys/devices/x/" + topology::formatBusId(devices.front().busId);
  const NodeMachine machine = nodeMachine(settings, runtime::Backend::host, devices, ports);
  topology::XmlNode system = machine.topology.system;
  const topology::XmlNode* device = topology::findDevice(system, 0, devices.front().busId);
  EXPECT_TRUE(std::any_of(device->children.begin(), device->children.end(),
                          [](const topology::XmlNode& child) { return child.name == "nic"; }));
  const topology::Topology graph = topology::buildTopology(machine.topology);
  ASSERT_EQ(graph.of(topology::NodeType::net).size(), 3u);
  const topology::NetInfo& net = graph.node(graph.of(topology::NodeType::net)[1]).net;
  EXPECT_EQ(net.name, "fabric1");
  EXPECT_EQ(net.dev, 1);
  EXPECT_EQ(net.guid, 71u);
  EXPECT_EQ(net.latencyUs, 2.5);
  EXPECT_GT(net.bandwidth, 0);
  const std::vector<int> leaves =
      findPlace(fileRanks, hostsOf(fileRanks), 3, settings, ports).ports;
  ASSERT_FALSE(leaves.empty());
  for (const int port : leaves) EXPECT_TRUE(port >= 0 && port < 3) << port;
  // Without a plug-in, those of the file.
  const NodeMachine own = nodeMachine(settings, runtime::Backend::host, devices);
  EXPECT_NE(topology::buildTopology(own.topology).of(topology::NodeType::net).size(), 3u);
}

TEST(NodeChannels, FillTheLinksOfGpusWithNvlink) {
  for (const int gpus : {2, 3, 4, 8}) {
    const auto ranks = factsOf(gpus, gpus);
    const topology::Joined joined = topology::join(placesOf(ranks), {});
    EXPECT_EQ(joined.channels(), 24) << gpus;
    EXPECT_EQ(joined.nodes(), 1);
    EXPECT_EQ(static_cast<int>(joined.nvlsHeads().size()), gpus);
  }
}

TEST(NodeChannels, AreFewerWithoutNvlink) {
  auto ranks = factsOf(4, 4);
  for (RankFacts& facts : ranks) facts.reach.peers = 0;
  const topology::Joined joined = topology::join(placesOf(ranks), {});
  EXPECT_LT(joined.channels(), 24);
  EXPECT_TRUE(joined.nvlsHeads().empty());
}

TEST(NodeChannels, JoinUnevenHostsAndSharedDevices) {
  auto ranks = factsOf(11, 4);
  ranks[10].busId = ranks[9].busId;
  const auto places = placesOf(ranks);
  const topology::Joined joined = topology::join(places, {});
  EXPECT_EQ(joined.nodes(), 3);
  for (int c = 0; c < joined.channels(); c++) {
    std::vector<int> ring = joined.ringOrder(c);
    EXPECT_EQ(joined.ringNext(c, 9), 10);
    std::sort(ring.begin(), ring.end());
    for (int rank = 0; rank < 11; rank++) EXPECT_EQ(ring[static_cast<size_t>(rank)], rank);
  }
  // Nodes go by their first rank.
  for (int rank = 0; rank < 11; rank++) EXPECT_EQ(joined.nodeOf(rank), rank / 4);
}

TEST(NodeChannels, FollowTheFileOfTheSimulatedMachine) {
  const topology::XmlTopology machine = topology::describeMachine(topology::preset("dgx1-v100"));
  const File file("machine", topology::writeTopologyXml(machine));
  Settings settings;
  settings.hostTopologyFile = file.path();
  auto ranks = factsOf(8, 8, 0x10);
  const topology::Joined joined = topology::join(placesOf(ranks, settings), {});
  EXPECT_EQ(joined.ring().typeIntra, static_cast<int>(topology::PathType::nvl));
  // Not every pair has an NVLink there: rings take those that have.
  for (int c = 0; c < joined.channels(); c++) {
    for (int rank = 0; rank < 8; rank++) {
      const int next = joined.ringNext(c, rank);
      EXPECT_TRUE(rank / 4 == next / 4 || rank % 4 == next % 4) << rank << " to " << next;
    }
  }
  const std::string error = errorOf(factsOf(8, 8, 0x40), settings);
  EXPECT_TRUE(has(error, "0000:40:00.0")) << error;
  EXPECT_TRUE(has(error, file.path())) << error;
}

TEST(NodeChannels, LinksFollowThePathsBetweenGpus) {
  const topology::XmlTopology machine = topology::describeMachine(topology::preset("dgx1-v100"));
  const File file("machine", topology::writeTopologyXml(machine));
  Settings settings;
  settings.hostTopologyFile = file.path();
  const auto ranks = factsOf(8, 8, 0x10);
  const auto linksOf = [&] { return findPlace(ranks, hostsOf(ranks), 3, settings).links; };
  // GPUs that no NVLink joins meet on one that has NVLinks to both.
  const transport::PeerLinks links = linksOf();
  EXPECT_EQ(links.size(), 12u);
  for (const auto& [pair, link] : links) {
    const auto [a, b] = pair;
    EXPECT_TRUE(a / 4 != b / 4 && a % 4 != b % 4) << a << " and " << b;
    EXPECT_FALSE(link.read);
    EXPECT_TRUE(link.through % 4 == a % 4 || link.through % 4 == b % 4) << link.through;
    EXPECT_TRUE(link.through != a && link.through != b) << link.through;
  }
  settings.nvbDisable = true;
  for (const auto& [pair, link] : linksOf()) {
    EXPECT_TRUE(!link.read && link.through < 0 && !link.atomics)
        << pair.first << " " << pair.second;
  }
  settings.p2pRead = 1;
  for (const auto& [pair, link] : linksOf()) {
    EXPECT_EQ(link.read, link.transport == transport::TransportKind::peer);
  }
  EXPECT_TRUE(linksOf().contains({0, 1}));
}

TEST(NodeChannels, RanksWithoutPeerAccessShareHostMemory) {
  const auto ranks = factsOf(4, 2);
  Settings settings;
  EXPECT_TRUE(findPlace(ranks, hostsOf(ranks), 0, settings).links.empty());
  const auto expectHostMemory = [&] {
    const transport::PeerLinks links = findPlace(ranks, hostsOf(ranks), 0, settings).links;
    ASSERT_EQ(links.size(), 1u);
    const transport::PeerLink link = links.at({0, 1});
    EXPECT_EQ(link.transport, transport::TransportKind::hostMemory);
    EXPECT_EQ(link.read, settings.shmLocality == 1);
    EXPECT_FALSE(link.through >= 0 || link.atomics);
    EXPECT_EQ(link.copiesIn, settings.shmCopies && settings.shmCopyMode != 2);
    EXPECT_EQ(link.copiesOut, settings.shmCopies && settings.shmCopyMode != 1);
  };
  settings.p2pDisable = true;
  expectHostMemory();
  settings.p2pDisable = false;
  settings.p2pLevel = "LOC";
  expectHostMemory();
  settings.shmLocality = 1;
  expectHostMemory();
  settings.shmCopies = true;
  for (settings.shmCopyMode = 1; settings.shmCopyMode <= 3; settings.shmCopyMode++) {
    expectHostMemory();
  }
  settings.p2pLevel = "NVL";
  EXPECT_TRUE(findPlace(ranks, hostsOf(ranks), 0, settings).links.empty());
}

TEST(NodeChannels, RanksThatMayShareNothingUseTheNetwork) {
  const auto ranks = factsOf(4, 2);
  Settings settings;
  settings.p2pDisable = settings.shmDisable = true;
  const NodePlace place = findPlace(ranks, hostsOf(ranks), 1, settings);
  EXPECT_EQ(place.links.at({0, 1}).transport, transport::TransportKind::network);
  EXPECT_NE(place.place.node, findPlace(ranks, hostsOf(ranks), 0, settings).place.node);
  settings.p2pDisable = false;
  EXPECT_TRUE(findPlace(ranks, hostsOf(ranks), 1, settings).links.empty());
}

TEST(NodeChannels, TheChosenRankWritesTheDumps) {
  const File machine("machine"), graphs("graphs");
  const auto ranks = factsOf(4, 2);
  Settings settings;
  settings.topologyDumpFile = machine.path();
  settings.graphDumpFile = graphs.path();
  settings.topologyDumpRank = 3;
  settings.graphDumpRank = -1;
  for (const int rank : {0, 1, 2}) findPlace(ranks, hostsOf(ranks), rank, settings);
  EXPECT_FALSE(std::filesystem::exists(machine.path()));
  findPlace(ranks, hostsOf(ranks), 3, settings);
  EXPECT_TRUE(has(machine.text(), "rank=\"3\"")) << machine.text();
  EXPECT_FALSE(std::filesystem::exists(graphs.path())) << "no rank was to write it";
}

TEST(NodeChannels, RanksGetTheCoresNearTheirGpus) {
  const auto ranks = factsOf(4, 4);
  const std::string machine = R"(<system version="1">
    <cpu numaid="0" affinity="0000ffff"><pci busid="0000:01:00.0"><gpu dev="0" sm="90"/></pci>
      <pci busid="0000:02:00.0"><gpu dev="1" sm="90"/></pci></cpu>
    <cpu numaid="1" affinity="ffff0000"><pci busid="0000:03:00.0"><gpu dev="2" sm="90"/></pci>
      <pci busid="0000:04:00.0"><gpu dev="3" sm="90"/></pci></cpu></system>)";
  const File file("cores", machine);
  Settings settings;
  settings.hostTopologyFile = file.path();
  EXPECT_EQ(findPlace(ranks, hostsOf(ranks), 1, settings).cpuAffinity, "0000ffff");
  EXPECT_EQ(findPlace(ranks, hostsOf(ranks), 2, settings).cpuAffinity, "ffff0000");
}

TEST(NodeChannels, FilesGoOutAndIn) {
  const File machine("machine"), graphs("graphs");
  const auto ranks = factsOf(4, 4);
  Settings settings;
  settings.topologyDumpFile = machine.path();
  settings.graphDumpFile = graphs.path();
  const auto first = placesOf(ranks, settings);
  EXPECT_TRUE(has(machine.text(), "rank=\"3\"")) << machine.text();
  EXPECT_TRUE(has(graphs.text(), "<graphs")) << graphs.text();
  // A graph file with other channels than the search finds.
  const File given("given", R"(<graphs version="1"><graph id="0" pattern="4" crossnic="0"
    nchannels="1" speedintra="20" speedinter="20" latencyinter="0" typeintra="NVL" typeinter="PIX"
    samechannels="1"><channel><gpu dev="0"/><gpu dev="2"/><gpu dev="1"/><gpu dev="3"/></channel>
    </graph></graphs>)");
  Settings wanted;
  wanted.graphFile = given.path();
  const topology::Joined joined = topology::join(placesOf(ranks, wanted), {});
  EXPECT_EQ(joined.ringOrder(0), (std::vector<int>{0, 2, 1, 3}));
  EXPECT_EQ(joined.channels(), 2);
  // The platform's file completes what is found.
  Settings platform;
  platform.topologyFile = machine.path();
  const auto again = placesOf(ranks, platform);
  EXPECT_EQ(topology::firstDifference(topology::hashOf(topology::join(first, {})),
                                      topology::hashOf(topology::join(again, {}))),
            "");
}

TEST(NodeChannels, BadFilesAndSettingsAreNamed) {
  const auto ranks = factsOf(2, 2);
  Settings settings;
  settings.topologyFile = "/no/such/file.xml";
  EXPECT_NO_THROW(placesOf(ranks, settings)) << "NCCL ignores a file that does not exist";
  const File broken("broken", "<system version=\"1\">");
  settings.topologyFile = broken.path();
  EXPECT_TRUE(has(errorOf(ranks, settings), broken.path() + ":1")) << errorOf(ranks, settings);
  settings = {};
  settings.graphFile = broken.path();
  EXPECT_TRUE(has(errorOf(ranks, settings), broken.path())) << errorOf(ranks, settings);
  settings = {};
  settings.p2pLevel = "FAR";
  EXPECT_TRUE(has(errorOf(ranks, settings), "NCCL_P2P_LEVEL=FAR")) << errorOf(ranks, settings);
}

}  // namespace
}  // namespace unisono::comm
