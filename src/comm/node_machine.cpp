// SPDX-License-Identifier: Apache-2.0
#include "comm/node_machine.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <system_error>

#include "base/error.h"
#include "base/log.h"
#include "comm/node_links.h"
#include "detect/detect.h"
#include "topology/presets.h"
#include "topology/settings.h"
#include "topology/xml_merge.h"

namespace unisono::comm {
namespace {

using topology::XmlNode;

constexpr int64_t kDoNotAskTheDriver = 2;  // of NCCL_IGNORE_DISABLED_P2P

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
    const std::string* address = pci.find("busid");
    const topology::BusId busId = address ? topology::parseBusId(*address) : topology::kNoBusId;
    const auto device = std::find_if(devices.begin(), devices.end(),
                                     [&](const NodeDevice& d) { return d.busId == busId; });
    if (device == devices.end()) {
      gpu.erase("rank");
      return;
    }
    gpu.setDefault("sm", std::to_string(device->computeCapability));
    gpu.set("rank", std::to_string(device->ranks.front()));
  });
}

// The driver's management library, which alone knows the NVLinks; null where it is missing.
detect::NvmlSource* nvml() {
  // Never destroyed: the process may exit while another thread makes a communicator.
  static detect::NvmlSource* const loaded = [] {
    std::string problem;
    auto source = detect::loadNvml("libnvidia-ml.so.1", problem);
    if (source == nullptr) {
      logWarn(
          "NVLinks cannot be detected: {}. Channels are made as for GPUs on NVSwitches if all "
          "reach each other, else as for PCI",
          problem);
    }
    return source.release();
  }();
  return loaded;
}

// Whether the ranks have given all devices numbers, which differ unless ranks are in containers
// that show each its own GPUs.
bool haveNumbers(const std::vector<NodeDevice>& devices) {
  std::set<int> numbers;
  for (const NodeDevice& device : devices) {
    if (device.links.isKnown != 0) numbers.insert(device.links.index);
  }
  return numbers.size() == devices.size();
}

// Detects the machine around the devices, whose places stand for ranks. Machines do not change
// while a process lives: each set of devices is looked at once. Null without nvml().
std::shared_ptr<const detect::Detected> detectNode(const Settings& settings,
                                                   const std::vector<NodeDevice>& devices,
                                                   const Ports& ports) {
  static std::mutex mutex;
  static auto& detected = *new std::map<std::string, std::shared_ptr<const detect::Detected>>;
  if (nvml() == nullptr) return nullptr;
  // Held during detection: the other ranks of the process need the same answer.
  std::lock_guard lock(mutex);
  NodeLinks links(*nvml(), devices);
  detect::DetectRequest request;
  request.nvml = &links;
  request.topologyFile = settings.topologyFile;
  std::string key = settings.topologyFile;
  const bool areNumbered = haveNumbers(devices);
  for (const NodeDevice& device : devices) {
    detect::GpuRequest gpu;
    gpu.busId = device.busId;
    gpu.sm = device.computeCapability;
    gpu.rank = static_cast<int>(request.gpus.size());
    if (areNumbered) gpu.dev = device.links.index;
    request.gpus.push_back(gpu);
    key += fmt::format(" {:x}", device.busId);
  }
  request.ports = ports;
  for (const detect::NicPort& port : ports.value_or(std::vector<detect::NicPort>())) {
    key += fmt::format(" {} {} {}", port.name, port.device.string(), port.gdr);
  }
  auto& known = detected[key];
  if (known == nullptr) {
    known = std::make_shared<const detect::Detected>(detect::detectMachine(request));
    for (const std::string& note : known->topology.notes) logInfo("this machine: {}", note);
  }
  return known;
}

// As with NCCL, a file of NCCL_TOPO_FILE that cannot be opened counts as none: configuration files
// and images name files that not every container has.
Settings withReadableFile(Settings settings) {
  const std::string& file = settings.topologyFile;
  if (file.empty() || ::access(file.c_str(), R_OK) == 0) return settings;
  warnOnce(fmt::format("NCCL_TOPO_FILE is ignored, because {} cannot be read: {}", file,
                       std::generic_category().message(errno)));
  settings.topologyFile.clear();
  return settings;
}

topology::XmlTopology readTopology(const std::string& file, const std::string& variable) {
  return topology::parseTopologyXml(detect::readFile(file, variable), file);
}

// The machine of the file that the host backend simulates, or one like most that have such GPUs,
// below the file of NCCL_TOPO_FILE.
topology::XmlTopology assembleMachine(const Settings& settings, runtime::Backend backend,
                                      const std::vector<NodeDevice>& devices, const Ports& ports) {
  const bool simulated = backend == runtime::Backend::host && !settings.hostTopologyFile.empty();
  topology::XmlTopology machine;
  machine.source = "this machine";
  if (simulated) {
    machine = readTopology(settings.hostTopologyFile, "UNISONO_HOST_TOPOLOGY");
  } else {
    machine.system = assumedMachine(devices);
  }
  if (ports) detect::replacePorts(machine.system, *ports);
  if (settings.topologyFile.empty()) return machine;
  topology::XmlTopology platform = readTopology(settings.topologyFile, "NCCL_TOPO_FILE");
  topology::mergeTopology(platform.system, machine.system);
  return platform;
}

}  // namespace

uint64_t fabricOf(const std::string& busId) {
  if (nvml() == nullptr) return 0;
  const auto fabric = nvml()->fabric(topology::parseBusId(busId));
  return fabric ? fabric->hash() : 0;
}

LinkFacts linksOf(const std::string& busId) {
  static std::mutex mutex;
  static auto& known = *new std::map<std::string, LinkFacts>;
  if (nvml() == nullptr) return {};
  {
    const std::lock_guard lock(mutex);
    if (const auto found = known.find(busId); found != known.end()) return found->second;
  }
  const LinkFacts links = packLinks(*nvml(), topology::parseBusId(busId));
  const std::lock_guard lock(mutex);
  return known.try_emplace(busId, links).first->second;
}

int driverDeviceOf(const std::string& busId, int otherwise) {
  if (runtime::Runtime::get().backend() == runtime::Backend::host || nvml() == nullptr) {
    return otherwise;
  }
  const int index = nvml()->indexOf(topology::parseBusId(busId));
  return index < 0 ? otherwise : index;
}

void visitGpus(XmlNode& node, const std::function<void(XmlNode& pci, XmlNode& gpu)>& visit) {
  for (XmlNode& child : node.children) {
    if (node.name == "pci" && child.name == "gpu") visit(node, child);
    visitGpus(child, visit);
  }
}

std::vector<NodeDevice> devicesOfNode(const std::vector<RankFacts>& ranks, const Hosts& hosts,
                                      int rank) {
  std::vector<NodeDevice> devices;
  for (const int r : hosts.ranks.at(ranks[static_cast<size_t>(rank)].host)) {
    const RankFacts& facts = ranks[static_cast<size_t>(r)];
    const topology::BusId busId = topology::parseBusId(facts.busId.data());
    if (busId == topology::kNoBusId) {
      throw internalError("The device of rank {} has the bus id '{}'", r, facts.busId.data());
    }
    auto device = std::find_if(devices.begin(), devices.end(),
                               [&](const NodeDevice& d) { return d.busId == busId; });
    if (device == devices.end()) {
      devices.push_back({busId,
                         facts.computeCapability,
                         true,
                         true,
                         facts.sharedMemory,
                         facts.fabric,
                         facts.links,
                         {}});
      device = devices.end() - 1;
    }
    device->reachesPeers = device->reachesPeers && facts.reach.peers != 0;
    device->reachIsCertain =
        device->reachIsCertain && facts.reach.peers != 0 && facts.reach.sees != 0;
    device->ranks.push_back(r);
  }
  std::sort(devices.begin(), devices.end(),
            [](const NodeDevice& a, const NodeDevice& b) { return a.busId < b.busId; });
  return devices;
}

NodeMachine nodeMachine(const Settings& given, runtime::Backend backend,
                        const std::vector<NodeDevice>& devices, const Ports& ports) {
  const Settings settings = withReadableFile(given);
  NodeMachine machine;
  machine.rules = topology::pathSettingsOf(settings);
  std::shared_ptr<const detect::Detected> detected;
  if (backend == runtime::Backend::cuda) detected = detectNode(settings, devices, ports);
  if (detected != nullptr) {
    machine.topology = detected->topology;
    if (settings.ignoreDisabledP2p != kDoNotAskTheDriver) {
      machine.rules.p2pRefused = detected->p2pRefused;
    }
  } else {
    machine.topology = assembleMachine(settings, backend, devices, ports);
  }
  for (size_t i = 0; i < devices.size(); i++) {
    topology::RankInfo& facts = machine.rules.ranks[static_cast<int>(i)];
    facts.shmDevice = devices[i].sharedMemory;
    facts.fabric = devices[i].fabric;
  }
  completeGpus(machine.topology.system, devices);
  const std::string source = machine.topology.source;
  machine.topology = topology::checkTopologyXml(std::move(machine.topology.system), source);
  for (const NodeDevice& device : devices) {
    if (topology::findDevice(machine.topology.system, 0, device.busId) == nullptr) {
      throw invalidUsage("{} has no GPU {}, the device of rank {}", source,
                         topology::formatBusId(device.busId), device.ranks.front())
          .remedy("Name the topology file of this machine");
    }
  }
  return machine;
}

}  // namespace unisono::comm
