#include "comm/node_channels.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <set>

#include "base/error.h"
#include "base/log.h"
#include "topology/graph_xml.h"
#include "topology/presets.h"
#include "topology/xml_merge.h"

namespace unisono::comm {
namespace {

using topology::XmlNode;

// The machines that a process remembers: communicators over the same devices come in numbers.
constexpr size_t kMostRemembered = 32;

std::string readText(const std::string& file, const char* variable) {
  std::ifstream in(file, std::ios::binary);
  std::string text;
  if (in) {
    // One byte over the limit is enough for the reader to refuse.
    text.resize(topology::XmlLimits{}.bytes + 1);
    in.read(text.data(), static_cast<std::streamsize>(text.size()));
    text.resize(static_cast<size_t>(in.gcount()));
  }
  if (!in && !in.eof()) {
    throw invalidArgument("{}: {} cannot be read: {}", variable, file, std::strerror(errno))
        .remedy(fmt::format("Name a readable file, or unset {}", variable));
  }
  return text;
}

void writeText(const std::string& file, const char* variable, const std::string& text) {
  std::ofstream out(file, std::ios::binary | std::ios::trunc);
  out << text;
  out.flush();
  if (!out) logWarn("{}: {} cannot be written: {}", variable, file, std::strerror(errno));
}

std::optional<topology::PathType> levelOf(const std::string& text, const char* variable) {
  if (text.empty()) return std::nullopt;
  const std::optional<topology::PathType> level = topology::pathLevelOf(text);
  if (!level) {
    throw invalidArgument("{}={} is no level", variable, text)
        .remedy(fmt::format("Set {} to LOC, NVL, PIX, PXB, PHB or SYS, or unset it", variable));
  }
  return level;
}

topology::PathSettings pathSettingsOf(const Settings& settings) {
  topology::PathSettings paths;
  paths.p2pDisable = settings.p2pDisable;
  paths.p2pLevel = levelOf(settings.p2pLevel, "NCCL_P2P_LEVEL");
  paths.gdrLevel = levelOf(settings.gdrLevel, "NCCL_NET_GDR_LEVEL");
  return paths;
}

// Calls `visit` for each <pci> that holds a <gpu>.
void visitGpus(XmlNode& node, const std::function<void(XmlNode& pci, XmlNode& gpu)>& visit) {
  for (XmlNode& child : node.children) {
    if (node.name == "pci" && child.name == "gpu") visit(node, child);
    visitGpus(child, visit);
  }
}

// NVLinks of a GPU to the NVSwitches, by its generation.
int switchNvlinks(int computeCapability) {
  return computeCapability >= 90 ? 18 : computeCapability >= 80 ? 12 : 6;
}

XmlNode assumedMachine(const std::vector<NodeDevice>& devices) {
  topology::MachineDescription description;
  description.gpus = static_cast<int>(devices.size());
  description.sockets = description.gpus > 1 ? 2 : 1;
  bool reaches = devices.size() > 1;
  int weakest = devices.front().computeCapability;
  for (const NodeDevice& device : devices) {
    reaches = reaches && device.reachesPeers;
    weakest = std::min(weakest, device.computeCapability);
  }
  if (reaches) description.switchNvlinks = switchNvlinks(weakest);
  XmlNode system = topology::describeMachine(description).system;
  size_t next = 0;
  visitGpus(system, [&](XmlNode& pci, XmlNode& gpu) {
    const NodeDevice& device = devices[next++];
    pci.set("busid", topology::formatBusId(device.busId));
    gpu.set("sm", std::to_string(device.computeCapability));
  });
  return system;
}

// Completes the GPUs with what the runtime knows, and names their ranks.
void completeGpus(XmlNode& system, const std::vector<NodeDevice>& devices) {
  visitGpus(system, [&](XmlNode& pci, XmlNode& gpu) {
    gpu.erase("rank");
    const std::string* address = pci.find("busid");
    const topology::BusId busId = address ? topology::parseBusId(*address) : topology::kNoBusId;
    for (const NodeDevice& device : devices) {
      if (device.busId != busId) continue;
      gpu.setDefault("sm", std::to_string(device.computeCapability));
      gpu.set("rank", std::to_string(device.ranks.front()));
    }
  });
}

// The graphs of the GPUs that reach each other without the network.
struct Domain {
  topology::Topology topology;
  topology::GraphSet graphs;
  std::vector<int> deviceOf;  // by node of the topology: index of the device, -1 if it is no GPU
};

struct NodeChannels {
  std::vector<Domain> domains;
  std::vector<int> domainOf;  // by device
};

topology::SearchSettings searchSettingsOf(const Settings& settings,
                                          const topology::Topology& topology,
                                          const std::string& graphText) {
  topology::SearchSettings search;
  if (settings.crossNic < 0 || settings.crossNic > 2) {
    throw invalidArgument("NCCL_CROSS_NIC={} is not 0, 1 or 2", settings.crossNic);
  }
  search.crossNic = static_cast<int>(settings.crossNic);
  if (!settings.graphFile.empty()) {
    search.given = topology::parseGraphs(graphText, settings.graphFile, topology);
  }
  return search;
}

// Of several hosts in one file, only one has each bus id: files of the host backend are checked.
NodeChannels searchNode(const Settings& settings, const std::vector<NodeDevice>& devices,
                        const topology::XmlTopology& file, int gpusInAll,
                        const std::string& graphText) {
  topology::Topology whole = topology::buildTopology(file);
  for (const std::string& note : file.notes) logInfo("{}: {}", file.source, note);
  for (const std::string& note : whole.notes) logInfo("{}: {}", file.source, note);
  for (topology::Node& node : whole.nodes) {
    if (node.type != topology::NodeType::gpu) continue;
    const auto device = std::find_if(devices.begin(), devices.end(),
                                     [&](const NodeDevice& d) { return d.busId == node.id; });
    // Ranks of the communicator differ from one communicator to the next; devices stay.
    node.gpu.rank = device == devices.end() ? -1 : static_cast<int>(device - devices.begin());
  }
  NodeChannels node;
  node.domainOf.assign(devices.size(), -1);
  const topology::PathSettings paths = pathSettingsOf(settings);
  for (size_t first = 0; first < devices.size(); first++) {
    if (node.domainOf[first] >= 0) continue;
    const topology::Machine machine =
        topology::trimMachine(whole, paths, static_cast<int>(first), gpusInAll);
    Domain domain;
    domain.topology = machine.topology;
    domain.deviceOf.assign(machine.topology.nodes.size(), -1);
    for (const int gpu : machine.topology.of(topology::NodeType::gpu)) {
      const int device = machine.topology.node(gpu).gpu.rank;
      domain.deviceOf[static_cast<size_t>(gpu)] = device;
      node.domainOf[static_cast<size_t>(device)] = static_cast<int>(node.domains.size());
    }
    domain.graphs =
        topology::searchGraphs(machine, searchSettingsOf(settings, machine.topology, graphText));
    node.domains.push_back(std::move(domain));
  }
  return node;
}

// Searches a node once for all ranks and communicators of this process that it looks alike to.
std::shared_ptr<const NodeChannels> nodeChannels(const Settings& settings,
                                                 const std::vector<NodeDevice>& devices,
                                                 const topology::XmlTopology& file, int gpusInAll) {
  const std::string graphText =
      settings.graphFile.empty() ? "" : readText(settings.graphFile, "NCCL_GRAPH_FILE");
  // All that the answer follows from; ranks are left out.
  XmlNode anonymous = file.system;
  visitGpus(anonymous, [](XmlNode&, XmlNode& gpu) { gpu.erase("rank"); });
  std::string key =
      fmt::format("{} {} {} {} {} {} {}\n{}\n{}", settings.p2pDisable, settings.p2pLevel,
                  settings.gdrLevel, settings.crossNic, gpusInAll, devices.size(),
                  settings.graphFile, graphText, topology::writeXml(anonymous));
  for (const NodeDevice& device : devices) key += fmt::format(" {:x}", device.busId);

  struct Remembered {
    std::string key;
    std::shared_ptr<const NodeChannels> node;
  };
  static std::mutex mutex;
  static std::deque<Remembered> remembered;
  // Held during the search: the other ranks of the process need the same answer.
  std::lock_guard lock(mutex);
  for (const Remembered& entry : remembered) {
    if (entry.key == key) return entry.node;
  }
  auto node = std::make_shared<const NodeChannels>(
      searchNode(settings, devices, file, gpusInAll, graphText));
  remembered.push_front({std::move(key), node});
  if (remembered.size() > kMostRemembered) remembered.pop_back();
  return node;
}

}  // namespace

std::vector<NodeDevice> devicesOfNode(const std::vector<RankFacts>& ranks, int rank) {
  const RankFacts& own = ranks[static_cast<size_t>(rank)];
  std::vector<NodeDevice> devices;
  for (size_t r = 0; r < ranks.size(); r++) {
    const RankFacts& facts = ranks[r];
    if (facts.host != own.host) continue;
    const topology::BusId busId = topology::parseBusId(facts.busId.data());
    if (busId == topology::kNoBusId) {
      throw internalError("The device of rank {} has the bus id '{}'", r, facts.busId.data());
    }
    auto device = std::find_if(devices.begin(), devices.end(),
                               [&](const NodeDevice& d) { return d.busId == busId; });
    if (device == devices.end()) {
      devices.push_back({busId, facts.computeCapability, true, {}});
      device = devices.end() - 1;
    }
    device->reachesPeers = device->reachesPeers && facts.reachesPeers != 0;
    device->ranks.push_back(static_cast<int>(r));
  }
  std::sort(devices.begin(), devices.end(),
            [](const NodeDevice& a, const NodeDevice& b) { return a.busId < b.busId; });
  return devices;
}

topology::XmlTopology nodeTopology(const Settings& settings,
                                   const std::vector<NodeDevice>& devices) {
  const std::string& simulated = settings.hostTopologyFile;
  std::string source = "this machine";
  XmlNode found;
  if (simulated.empty()) {
    found = assumedMachine(devices);
  } else {
    source = simulated;
    found =
        topology::parseTopologyXml(readText(simulated, "UNISONO_HOST_TOPOLOGY"), simulated).system;
  }
  if (!settings.topologyFile.empty()) {
    source = settings.topologyFile;
    XmlNode platform = topology::parseTopologyXml(readText(settings.topologyFile, "NCCL_TOPO_FILE"),
                                                  settings.topologyFile)
                           .system;
    topology::mergeTopology(platform, found);
    found = std::move(platform);
  }
  completeGpus(found, devices);
  topology::XmlTopology machine = topology::checkTopologyXml(std::move(found), source);
  for (const NodeDevice& device : devices) {
    if (topology::findDevice(machine.system, 0, device.busId) == nullptr) {
      throw invalidUsage("{} has no GPU {}, the device of rank {}", source,
                         topology::formatBusId(device.busId), device.ranks.front())
          .remedy("Name the topology file of this machine");
    }
  }
  return machine;
}

topology::RankPlace findPlace(const std::vector<RankFacts>& ranks, int rank,
                              const Settings& settings) {
  const std::vector<NodeDevice> devices = devicesOfNode(ranks, rank);
  const topology::XmlTopology machine = nodeTopology(settings, devices);
  std::set<std::pair<uint64_t, std::string>> gpus;
  for (const RankFacts& facts : ranks) gpus.emplace(facts.host, facts.busId.data());
  const std::shared_ptr<const NodeChannels> node =
      nodeChannels(settings, devices, machine, static_cast<int>(gpus.size()));

  size_t own = 0;
  while (std::find(devices[own].ranks.begin(), devices[own].ranks.end(), rank) ==
         devices[own].ranks.end()) {
    own++;
  }
  const Domain& domain = node->domains[static_cast<size_t>(node->domainOf[own])];
  std::vector<std::vector<int>> ranksOf(domain.deviceOf.size());
  int first = rank;
  for (size_t i = 0; i < ranksOf.size(); i++) {
    if (domain.deviceOf[i] < 0) continue;
    ranksOf[i] = devices[static_cast<size_t>(domain.deviceOf[i])].ranks;
    first = std::min(first, ranksOf[i].front());
  }
  if (rank == 0 && !settings.topologyDumpFile.empty()) {
    writeText(settings.topologyDumpFile, "NCCL_TOPO_DUMP_FILE",
              topology::writeTopologyXml(machine));
  }
  if (rank == 0 && !settings.graphDumpFile.empty()) {
    writeText(settings.graphDumpFile, "NCCL_GRAPH_DUMP_FILE",
              topology::writeGraphs(topology::namedGraphs(domain.graphs), domain.topology));
  }
  return topology::placeOf(domain.graphs, ranksOf, rank, static_cast<uint64_t>(first));
}

}  // namespace unisono::comm
