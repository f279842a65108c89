// SPDX-License-Identifier: Apache-2.0
#include "comm/node_channels.h"

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "base/error.h"
#include "base/log.h"
#include "comm/node_machine.h"
#include "detect/detect.h"
#include "topology/graph_xml.h"
#include "topology/settings.h"
#include "transport/transports.h"

namespace unisono::comm {
namespace {

// The machines that a process remembers: communicators over the same devices come in numbers.
constexpr size_t kMostRemembered = 32;

// The graphs of the GPUs that reach each other without the network.
struct NodeDomain {
  topology::Topology topology;
  topology::GraphSet graphs;
  std::vector<int> deviceOf;  // by node of the topology: index of the device, -1 for other nodes
};

// What two devices can do for each other.
struct DevicePair {
  topology::PeerVerdict peer;  // `through` is a device
  topology::Verdict sharedMemory;
};

struct NodeChannels {
  std::vector<NodeDomain> domains;
  std::vector<int> domainOf;            // by device
  std::vector<std::string> affinityOf;  // by device: cores near it, see cpuAffinityOf
  std::vector<std::string> portAffinityOf;
  std::vector<std::vector<transport::DirectAccess>> direct;  // by device and number of a port
  std::vector<std::vector<int>> forwarders;                  // the same: a device, or -1 (PXN)
  std::vector<std::vector<int>> messageForwarders;           // the same
  std::vector<std::vector<int>> messagePorts;                // by device: numbers of ports
  std::map<std::pair<size_t, size_t>, DevicePair> pairs;     // by devices, the lower first
};

// Also says whether two nodes look alike to all ranks and communicators of this process.
struct NodeQuestion {
  topology::PathSettings rules;
  topology::SearchSettings search;  // but for the graphs of the file
  std::string graphFile, graphText;
  std::vector<topology::BusId> devices;
  int gpusInAll;
  std::string machine;  // as XML without ranks

  bool operator==(const NodeQuestion& other) const {
    return rules == other.rules && search.crossNic == other.search.crossNic &&
           search.collnet == other.search.collnet && graphFile == other.graphFile &&
           graphText == other.graphText && devices == other.devices &&
           gpusInAll == other.gpusInAll && machine == other.machine;
  }
};

// Logs that the driver disables peer-to-peer access between two GPUs: a warning where NVLink joins
// them, as that points to broken hardware.
void reportRefusal(const topology::Machine& machine, int rankA, int rankB) {
  const topology::PathSettings& rules = machine.settings;
  if (!rules.reportP2pRefused || !rules.p2pRefused.contains({rankA, rankB})) return;
  const int a = machine.topology.gpuOfRank(rankA), b = machine.topology.gpuOfRank(rankB);
  const std::string text = fmt::format(
      "The driver disables peer-to-peer access between {} and {}; NCCL_IGNORE_DISABLED_P2P=1 hides "
      "this message",
      machine.topology.nameOf(a), machine.topology.nameOf(b));
  if (machine.paths.wirePath(a, b).type <= topology::PathType::nvb) {
    logWarn("{}", text);
  } else {
    logInfo("{}", text);
  }
}

// What `valueOf` says of each port of a GPU's host, by the port's number; `none` where there is no
// port. Of several hosts in one file, only one has each bus id: files of the host backend are
// checked.
template <typename Value, typename ValueOf>
std::vector<Value> byPort(const topology::Machine& machine, int gpu, Value none, ValueOf valueOf) {
  std::vector<Value> ports;
  for (const int net : machine.topology.of(topology::NodeType::net)) {
    const topology::Node& node = machine.topology.node(net);
    if (node.host != machine.topology.node(gpu).host || node.net.dev < 0) continue;
    const auto number = static_cast<size_t>(node.net.dev);
    if (ports.size() <= number) ports.resize(number + 1, none);
    ports[number] = valueOf(net);
  }
  return ports;
}

// What each port, by its number, does with the memory of a GPU.
std::vector<transport::DirectAccess> directAccess(const topology::Machine& machine, int gpu) {
  return byPort(machine, gpu, transport::DirectAccess{}, [&](int net) {
    const auto check = [&](bool read) {
      return topology::checkGdr(machine.topology, machine.paths, machine.settings, gpu, net, read);
    };
    const topology::GdrVerdict write = check(false);
    return transport::DirectAccess{check(true).allowed, write.allowed, write.flush};
  });
}

// The device through which a GPU sends to each port, by its number: -1 for itself.
std::vector<int> forwardersOf(const topology::Machine& machine, int gpu) {
  return byPort(machine, gpu, -1, [&](int net) {
    const topology::Path& path = machine.paths.path(gpu, net);
    const bool isForwarded = path.type == topology::PathType::pxn;
    return isForwarded ? machine.topology.node(path.via).gpu.rank : -1;
  });
}

// The device that sends messages of a GPU to receivers that use a port, by the port's number: may
// be the GPU's own. -1: they leave through the GPU's own ports.
std::vector<int> messageForwardersOf(const topology::Machine& machine, int gpu, int crossNic) {
  return byPort(machine, gpu, -1, [&](int net) {
    const topology::PxnVerdict verdict =
        topology::checkMessagePxn(machine.topology, machine.paths, machine.settings, gpu, net);
    // Rails that are not joined.
    const int through = !verdict.used && crossNic == 0 ? gpu : verdict.through;
    return through >= 0 ? machine.topology.node(through).gpu.rank : -1;
  });
}

// The numbers of the ports of a GPU for messages.
std::vector<int> messagePortsOf(const topology::Machine& machine, int gpu) {
  std::vector<int> ports;
  for (const int net : topology::messagePorts(machine.topology, machine.paths, gpu)) {
    const int number = machine.topology.node(net).net.dev;
    if (number >= 0) ports.push_back(number);
  }
  return ports;
}

NodeChannels searchNode(const NodeQuestion& question, const topology::XmlTopology& file) {
  topology::Topology whole = topology::buildTopology(file);
  for (const std::string& note : file.notes) logInfo("{}: {}", file.source, note);
  for (const std::string& note : whole.notes) logInfo("{}: {}", file.source, note);
  const auto& devices = question.devices;
  for (topology::Node& node : whole.nodes) {
    if (node.type != topology::NodeType::gpu) continue;
    const auto device = std::find(devices.begin(), devices.end(), node.id);
    // Ranks of the communicator differ from one communicator to the next; devices stay.
    node.gpu.rank = device == devices.end() ? -1 : static_cast<int>(device - devices.begin());
  }
  NodeChannels node;
  node.domainOf.assign(devices.size(), -1);
  for (size_t first = 0; first < devices.size(); first++) {
    if (node.domainOf[first] >= 0) continue;
    const topology::Machine machine =
        topology::trimMachine(whole, question.rules, static_cast<int>(first), question.gpusInAll);
    NodeDomain domain;
    domain.topology = machine.topology;
    domain.deviceOf.assign(machine.topology.nodes.size(), -1);
    for (const int gpu : machine.topology.of(topology::NodeType::gpu)) {
      const int device = machine.topology.node(gpu).gpu.rank;
      domain.deviceOf[static_cast<size_t>(gpu)] = device;
      node.domainOf[static_cast<size_t>(device)] = static_cast<int>(node.domains.size());
    }
    topology::SearchSettings search = question.search;
    if (!question.graphFile.empty()) {
      search.given =
          topology::parseGraphs(question.graphText, question.graphFile, machine.topology);
    }
    domain.graphs = topology::searchGraphs(machine, search);
    node.domains.push_back(std::move(domain));
  }

  std::vector<bool> used(whole.nodes.size(), true);
  for (const int gpu : whole.of(topology::NodeType::gpu)) {
    used[static_cast<size_t>(gpu)] = whole.node(gpu).gpu.rank >= 0;
  }
  const topology::Machine machine(topology::subTopology(whole, used), question.rules);
  for (size_t a = 0; a < devices.size(); a++) {
    node.affinityOf.push_back(topology::cpuAffinityOf(machine, static_cast<int>(a)));
    node.portAffinityOf.push_back(topology::portAffinityOf(machine, static_cast<int>(a)));
    node.direct.push_back(directAccess(machine, machine.topology.gpuOfRank(static_cast<int>(a))));
    const int gpu = machine.topology.gpuOfRank(static_cast<int>(a));
    node.forwarders.push_back(forwardersOf(machine, gpu));
    node.messageForwarders.push_back(messageForwardersOf(machine, gpu, question.search.crossNic));
    node.messagePorts.push_back(messagePortsOf(machine, gpu));
    for (size_t b = a + 1; b < devices.size(); b++) {
      const int gpuA = machine.topology.gpuOfRank(static_cast<int>(a));
      const int gpuB = machine.topology.gpuOfRank(static_cast<int>(b));
      topology::PeerVerdict peer =
          topology::checkPeer(machine.topology, machine.paths, machine.settings, gpuA, gpuB);
      reportRefusal(machine, static_cast<int>(a), static_cast<int>(b));
      if (peer.through >= 0) peer.through = machine.topology.node(peer.through).gpu.rank;
      topology::Verdict sharedMemory =
          topology::checkSharedMemory(machine.topology, machine.settings, gpuA, gpuB);
      node.pairs.emplace(std::pair(a, b), DevicePair{std::move(peer), std::move(sharedMemory)});
    }
  }
  return node;
}

std::shared_ptr<const NodeChannels> nodeChannels(const Settings& settings,
                                                 const std::vector<NodeDevice>& devices,
                                                 const NodeMachine& machine, int gpusInAll) {
  NodeQuestion question{machine.rules,
                        topology::searchSettingsOf(settings),
                        settings.graphFile,
                        "",
                        {},
                        gpusInAll,
                        ""};
  if (!settings.graphFile.empty()) {
    question.graphText = detect::readFile(settings.graphFile, "NCCL_GRAPH_FILE");
  }
  for (const NodeDevice& device : devices) question.devices.push_back(device.busId);
  topology::XmlNode anonymous = machine.topology.system;
  visitGpus(anonymous, [](topology::XmlNode&, topology::XmlNode& gpu) { gpu.erase("rank"); });
  question.machine = topology::writeXml(anonymous);

  struct Remembered {
    NodeQuestion question;
    std::shared_ptr<const NodeChannels> node;
  };
  static std::mutex mutex;
  // Never destroyed: the process may exit while another thread makes a communicator.
  static auto& remembered = *new std::deque<Remembered>;
  // Held during the search: the other ranks of the process need the same answer.
  std::lock_guard lock(mutex);
  for (const Remembered& entry : remembered) {
    if (entry.question == question) return entry.node;
  }
  auto node = std::make_shared<const NodeChannels>(searchNode(question, machine.topology));
  remembered.push_front({std::move(question), node});
  if (remembered.size() > kMostRemembered) remembered.pop_back();
  return node;
}

// The link of the ranks of two devices. Nothing for the default.
std::optional<transport::PeerLink> linkOf(const DevicePair& pair, const Settings& settings,
                                          const std::vector<NodeDevice>& devices, int a, int b) {
  const auto& [peer, sharedMemory] = pair;
  const bool byUser = peer.byUser || settings.shmDisable;
  const auto chosen = transport::chooseTransport({peer.allowed, sharedMemory.allowed, byUser});
  // Containers with different /dev/shm may still reach each other's device memory.
  if (!chosen) return std::nullopt;
  if (*chosen != transport::TransportKind::peer) {
    logInfo("ranks {} and {} exchange data through {}: no peer-to-peer access, as {}", a, b,
            transport::nameOf(*chosen), peer.reason);
    const bool hostMemory = *chosen == transport::TransportKind::hostMemory;
    const int64_t copies = hostMemory && settings.shmCopies ? settings.shmCopyMode : 0;
    return transport::PeerLink{.read = hostMemory && settings.shmLocality == 1,
                               .atomics = false,
                               .transport = *chosen,
                               .copiesIn = (copies & 1) != 0,
                               .copiesOut = (copies & 2) != 0};
  }
  if (!peer.read && peer.through < 0 && peer.nvlink) return std::nullopt;
  const int through =
      peer.through < 0 ? -1 : devices[static_cast<size_t>(peer.through)].ranks.front();
  if (through >= 0) logInfo("ranks {} and {} meet in the memory of rank {}", a, b, through);
  return transport::PeerLink{.read = peer.read, .through = through, .atomics = peer.nvlink};
}

// From pairs of devices to pairs of ranks.
transport::PeerLinks linksOf(const NodeChannels& node, const Settings& settings,
                             const std::vector<NodeDevice>& devices) {
  transport::PeerLinks links;
  for (const auto& [places, pair] : node.pairs) {
    for (const int a : devices[places.first].ranks) {
      for (const int b : devices[places.second].ranks) {
        const auto link = linkOf(pair, settings, devices, a, b);
        if (link) links[std::minmax(a, b)] = *link;
      }
    }
  }
  return links;
}

// Where messages of a rank, which uses the device `own`, enter and leave the node.
void placeMessages(topology::RankPlace& place, const NodeChannels& node,
                   const std::vector<NodeDevice>& devices, size_t own, int rank) {
  const std::vector<int>& ports = node.messagePorts[own];
  for (size_t i = 0; i < std::min(ports.size(), place.messagePorts.size()); i++) {
    place.messagePorts[i] = ports[i] + 1;
  }
  const std::vector<int>& through = node.messageForwarders[own];
  for (size_t port = 0; port < std::min(through.size(), place.messageForwarders.size()); port++) {
    if (through[port] < 0) continue;
    const auto device = static_cast<size_t>(through[port]);
    place.messageForwarders[port] = 1 + (device == own ? rank : devices[device].ranks.front());
  }
}

void writeDump(const std::string& file, const char* variable, const std::string& text) {
  try {
    detect::writeFile(file, text);
  } catch (const Error& error) {
    logWarn("{}: {}", variable, error.what());
  }
}

}  // namespace

NodePlace findPlace(const std::vector<RankFacts>& ranks, const Hosts& hosts, int rank,
                    const Settings& settings, const Ports& ports) {
  const std::vector<NodeDevice> devices = devicesOfNode(ranks, hosts, rank);
  const auto backend = static_cast<runtime::Backend>(ranks[static_cast<size_t>(rank)].backend);
  const NodeMachine machine = nodeMachine(settings, backend, devices, ports);
  const std::shared_ptr<const NodeChannels> node =
      nodeChannels(settings, devices, machine, hosts.devices);

  size_t own = 0;
  while (std::find(devices[own].ranks.begin(), devices[own].ranks.end(), rank) ==
         devices[own].ranks.end()) {
    own++;
  }
  const NodeDomain& domain = node->domains[static_cast<size_t>(node->domainOf[own])];
  std::vector<std::vector<int>> ranksOf(domain.deviceOf.size());
  int first = rank;
  for (size_t i = 0; i < ranksOf.size(); i++) {
    if (domain.deviceOf[i] < 0) continue;
    ranksOf[i] = devices[static_cast<size_t>(domain.deviceOf[i])].ranks;
    first = std::min(first, ranksOf[i].front());
  }
  if (rank == settings.topologyDumpRank && !settings.topologyDumpFile.empty()) {
    writeDump(settings.topologyDumpFile, "NCCL_TOPO_DUMP_FILE",
              topology::writeTopologyXml(machine.topology));
  }
  if (rank == settings.graphDumpRank && !settings.graphDumpFile.empty()) {
    writeDump(settings.graphDumpFile, "NCCL_GRAPH_DUMP_FILE",
              topology::writeGraphs(topology::namedGraphs(domain.graphs), domain.topology));
  }
  topology::RankPlace place =
      topology::placeOf(domain.graphs, ranksOf, rank, static_cast<uint64_t>(first));
  place.machine = topology::machineFactsOf(domain.topology);
  std::vector<int> leaves;
  for (const topology::Channel& channel : domain.graphs.ring.channels) {
    if (channel.netOut >= 0) leaves.push_back(domain.topology.node(channel.netOut).net.dev);
  }
  for (size_t channel = 0; channel < place.forwarders.size() && !leaves.empty(); channel++) {
    const auto port = static_cast<size_t>(leaves[channel % leaves.size()]);
    const auto& byPort = node->forwarders[own];
    if (!ports || port >= byPort.size() || byPort[port] < 0) continue;
    place.forwarders[channel] = 1 + devices[static_cast<size_t>(byPort[port])].ranks.front();
  }
  if (ports) placeMessages(place, *node, devices, own, rank);
  std::vector<int> headPorts;
  for (const topology::ChannelGraph* graph :
       {&domain.graphs.collnetDirect, &domain.graphs.collnetChain, &domain.graphs.nvls}) {
    for (const topology::Channel& channel : graph->channels) {
      const int head = domain.deviceOf[static_cast<size_t>(channel.gpus.front())];
      if (head != static_cast<int>(own) || channel.netOut < 0) continue;
      headPorts.push_back(domain.topology.node(channel.netOut).net.dev);
    }
  }
  return {place,
          linksOf(*node, settings, devices),
          node->affinityOf[own],
          node->portAffinityOf[own],
          std::move(leaves),
          std::move(headPorts),
          node->direct[own]};
}

}  // namespace unisono::comm
