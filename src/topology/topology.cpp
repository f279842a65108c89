// SPDX-License-Identifier: Apache-2.0
#include "topology/topology.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "base/error.h"

namespace unisono::topology {

namespace {

constexpr uint64_t kBroadcom = 0x1000, kBroadcomGen4 = 0xc010, kBroadcomGen5 = 0xc030;

CpuArchitecture architectureOf(const std::string* text) {
  if (!text) return CpuArchitecture::unknown;
  if (*text == "x86_64") return CpuArchitecture::x86;
  if (*text == "ppc64") return CpuArchitecture::power;
  if (*text == "arm64") return CpuArchitecture::arm;
  return CpuArchitecture::unknown;
}

CpuVendor vendorOf(const std::string* text) {
  if (!text) return CpuVendor::unknown;
  if (*text == "GenuineIntel") return CpuVendor::intel;
  if (*text == "AuthenticAMD") return CpuVendor::amd;
  if (*text == "CentaurHauls" || *text == "  Shanghai  ") return CpuVendor::zhaoxin;
  return CpuVendor::unknown;
}

// Puts nodes and links together under temporary numbers, then sorts them.
class Builder {
 public:
  explicit Builder(const XmlTopology& file) : file_(file), reader_(file.source) {
    topology_.notes = file.notes;
  }

  Topology build() {
    collectHosts();
    for (const XmlNode* cpu : cpusInOrder()) addCpu(*cpu);
    if (topology_.nodes.empty()) throw invalidArgument("{}: there is no <cpu>", file_.source);
    if (gpus_.empty()) throw invalidArgument("{}: there is no <gpu>", file_.source);
    connectCpus();
    for (const auto& [node, xml] : gpus_) addGpuLinks(node, *xml);
    for (const auto& [node, target] : pciLinks_) addPciLink(node, target);
    flattenBroadcomSwitches();
    dropEmptySwitches();
    giveRanks();
    sort();
    return std::move(topology_);
  }

 private:
  using DeviceKey = std::pair<int, BusId>;

  // Hosts are numbered by their lowest rank, then by hash: the same for every order of the file.
  void collectHosts() {
    std::map<uint64_t, int> lowestRank;
    for (const XmlNode& cpu : file_.system.children) {
      lowestRank.emplace(reader_.identifierOr(cpu, "host_hash", 0), INT32_MAX);
    }
    for (const GpuDescription& gpu : gpusOf(file_)) {
      if (gpu.rank >= 0) lowestRank[gpu.hostHash] = std::min(lowestRank[gpu.hostHash], gpu.rank);
    }
    for (const auto& [hash, rank] : lowestRank) topology_.hosts.push_back(hash);
    std::sort(topology_.hosts.begin(), topology_.hosts.end(), [&](uint64_t a, uint64_t b) {
      return std::tuple(lowestRank[a], a) < std::tuple(lowestRank[b], b);
    });
  }

  int hostOf(const XmlNode& cpu) const {
    const uint64_t hash = reader_.identifierOr(cpu, "host_hash", 0);
    return static_cast<int>(std::find(topology_.hosts.begin(), topology_.hosts.end(), hash) -
                            topology_.hosts.begin());
  }

  std::vector<const XmlNode*> cpusInOrder() const {
    std::vector<const XmlNode*> cpus;
    for (const XmlNode& cpu : file_.system.children) cpus.push_back(&cpu);
    std::sort(cpus.begin(), cpus.end(), [&](const XmlNode* a, const XmlNode* b) {
      return std::tuple(hostOf(*a), reader_.integerOr(*a, "numaid", -1, INT32_MAX, -1)) <
             std::tuple(hostOf(*b), reader_.integerOr(*b, "numaid", -1, INT32_MAX, -1));
    });
    return cpus;
  }

  int addNode(NodeType type, int64_t id) {
    Node node;
    node.type = type;
    node.host = host_;
    node.id = id;
    topology_.nodes.push_back(std::move(node));
    return static_cast<int>(topology_.nodes.size()) - 1;
  }
  Node& at(int node) { return topology_.nodes[static_cast<size_t>(node)]; }

  // One direction. Links of one kind between the same nodes are one link that carries their sum.
  void addLink(int from, int to, LinkType type, Bandwidth bandwidth) {
    for (Link& link : at(from).links) {
      if (link.to == to && link.type == type) {
        link.bandwidth += bandwidth;
        return;
      }
    }
    at(from).links.push_back({type, bandwidth, to});
  }
  void connect(int a, int b, LinkType type, Bandwidth bandwidth) {
    addLink(a, b, type, bandwidth);
    addLink(b, a, type, bandwidth);
  }

  void addCpu(const XmlNode& xml) {
    host_ = hostOf(xml);
    const int numa = static_cast<int>(reader_.integerOr(xml, "numaid", -1, INT32_MAX, -1));
    const int node = addNode(NodeType::cpu, numa);
    CpuInfo& cpu = at(node).cpu;
    cpu.numa = numa;
    cpu.architecture = architectureOf(xml.find("arch"));
    cpu.vendor = vendorOf(xml.find("vendor"));
    cpu.family = static_cast<int>(reader_.integerOr(xml, "familyid", -1, INT32_MAX, -1));
    cpu.model = static_cast<int>(reader_.integerOr(xml, "modelid", -1, INT32_MAX, -1));
    if (const std::string* affinity = xml.find("affinity")) cpu.affinity = *affinity;
    cpu_ = node;
    addChildren(xml, node);
  }

  void addChildren(const XmlNode& xml, int parent) {
    for (const XmlNode* child : inOrder(xml)) {
      if (child->name == "pci") addPci(*child, parent);
      if (child->name == "nic") addNic(*child, parent, kNoBusId, kLocalBandwidth);
    }
  }

  // The children of an element in an order that does not depend on the file: devices by bus id,
  // ports by number, adapters by their first port.
  std::vector<const XmlNode*> inOrder(const XmlNode& xml) const {
    std::vector<std::pair<long long, const XmlNode*>> keyed;
    for (const XmlNode& child : xml.children) {
      long long key = -1;
      if (child.name == "pci") key = parseBusId(reader_.text(child, "busid"));
      if (child.name == "net") key = portNumber(child);
      if (child.name == "nic") {
        key = INT32_MAX;
        for (const XmlNode& net : child.children) {
          if (net.name == "net" && portNumber(net) >= 0) {
            key = std::min<long long>(key, portNumber(net));
          }
        }
      }
      keyed.emplace_back(key, &child);
    }
    std::stable_sort(keyed.begin(), keyed.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<const XmlNode*> children;
    for (const auto& [key, child] : keyed) children.push_back(child);
    return children;
  }

  int portNumber(const XmlNode& net) const {
    return static_cast<int>(reader_.integerOr(net, "dev", 0, INT32_MAX, -1));
  }

  static const XmlNode* childOf(const XmlNode& xml, std::string_view name) {
    for (const XmlNode& child : xml.children) {
      if (child.name == name) return &child;
    }
    return nullptr;
  }

  void addPci(const XmlNode& xml, int parent) {
    const BusId busId = parseBusId(reader_.text(xml, "busid"));
    const std::string* speed = xml.find("link_speed");
    const Bandwidth bandwidth = pciBandwidth(
        speed ? *speed : "", static_cast<int>(reader_.integerOr(xml, "link_width", 0, 255, 0)));
    const auto field = [&](std::string_view name) {
      return reader_.identifierOr(xml, name, 0) & 0xffff;
    };
    int children = parent;
    if (const XmlNode* gpu = childOf(xml, "gpu")) {
      const int node = addNode(NodeType::gpu, busId);
      GpuInfo& info = at(node).gpu;
      info.dev = static_cast<int>(reader_.integer(*gpu, "dev", 0, INT32_MAX));
      info.rank = static_cast<int>(reader_.integerOr(*gpu, "rank", -1, INT32_MAX, -1));
      info.sm = static_cast<int>(reader_.integer(*gpu, "sm", 1, 1000));
      info.gdr = reader_.integerOr(*gpu, "gdr", 0, 1, 0) == 1;
      gpus_.emplace_back(node, gpu);
      for (const XmlNode& link : gpu->children) {
        if (link.name == "nvlink") targets_.emplace(node, parseBusId(reader_.text(link, "target")));
      }
      devices_[{host_, busId}] = node;
      cpuOf_[node] = cpu_;
      connect(node, parent, LinkType::pci, bandwidth);
    } else if (childOf(xml, "nic") == nullptr && isSwitch(xml)) {
      children = addNode(NodeType::pci, busId);
      at(children).pci.device = field("vendor") << 48 | field("device") << 32 |
                                field("subsystem_vendor") << 16 | field("subsystem_device");
      devices_[{host_, busId}] = children;
      connect(children, parent, LinkType::pci, bandwidth);
      for (const XmlNode& child : xml.children) {
        if (child.name == "pcilink") {
          pciLinks_.emplace_back(children, parseBusId(reader_.text(child, "target")));
        }
      }
    }
    for (const XmlNode* child : inOrder(xml)) {
      if (child->name == "pci") addPci(*child, children);
      if (child->name == "nic") addNic(*child, parent, busId, bandwidth);
    }
  }

  // A <pci> that holds devices; a leaf without <gpu> or <nic> is a device that nobody uses.
  static bool isSwitch(const XmlNode& xml) { return childOf(xml, "pci") != nullptr; }

  void addNic(const XmlNode& xml, int parent, BusId busId, Bandwidth bandwidth) {
    int nic = -1;
    for (const XmlNode* port : inOrder(xml)) {
      if (port->name != "net") continue;
      const XmlNode& child = *port;
      const int dev = portNumber(child);
      // A platform file names ports that the network transport does not offer.
      if (dev < 0) continue;
      if (!nets_.emplace(host_, dev).second) continue;
      if (nic < 0) nic = nicNode(parent, busId, dev, bandwidth);
      const int node = addNode(NodeType::net, dev);
      NetInfo& net = at(node).net;
      net.dev = dev;
      if (const std::string* name = child.find("name")) net.name = *name;
      net.guid = reader_.identifierOr(child, "guid", 0);
      if (net.guid == 0) net.guid = static_cast<uint64_t>(dev);
      net.port = static_cast<int>(reader_.integerOr(child, "port", -1, INT32_MAX, 0));
      net.bandwidth = netBandwidth(reader_.integerOr(child, "speed", -1, 1'000'000'000, 0));
      net.latencyUs = reader_.numberOr(child, "latency", 0, 1e9, 0);
      net.gdr = reader_.integerOr(child, "gdr", 0, 1, 0) == 1;
      net.collective = reader_.integerOr(child, "coll", 0, 1, 0) == 1;
      net.maxConnections = static_cast<int>(reader_.integerOr(child, "maxconn", -1, INT32_MAX, 0));
      connect(node, nic, LinkType::network, net.bandwidth);
    }
  }

  // The functions of one adapter are one NIC. A NIC that is not a PCI device is identified by the
  // number of its first port.
  int nicNode(int parent, BusId busId, int dev, Bandwidth bandwidth) {
    const int64_t id = busId == kNoBusId ? -1 - dev : busId & ~int64_t{0xf};
    const auto [entry, isNew] = devices_.try_emplace({host_, id}, -1);
    if (isNew || at(entry->second).type != NodeType::nic) {
      entry->second = addNode(NodeType::nic, id);
      connect(entry->second, parent, LinkType::pci, bandwidth);
    }
    return entry->second;
  }

  void connectCpus() {
    std::vector<std::vector<int>> cpus(topology_.hosts.size());
    for (int node = 0; node < static_cast<int>(topology_.nodes.size()); node++) {
      if (at(node).type == NodeType::cpu) {
        cpus[static_cast<size_t>(at(node).host)].push_back(node);
      }
    }
    for (const std::vector<int>& ofHost : cpus) {
      for (const int a : ofHost) {
        const CpuInfo& cpu = at(a).cpu;
        const Bandwidth bandwidth = cpuLinkBandwidth(cpu.architecture, cpu.vendor, cpu.model);
        for (const int b : ofHost) {
          if (a != b) at(a).links.push_back({LinkType::system, bandwidth, b});
        }
      }
    }
  }

  void addGpuLinks(int gpu, const XmlNode& xml) {
    host_ = at(gpu).host;
    const Bandwidth perLink = nvlinkBandwidth(at(gpu).gpu.sm);
    for (const XmlNode& child : xml.children) {
      if (child.name == "c2c") {
        const double megabytes = reader_.number(child, "bw", 0, 1e9);
        const auto count = reader_.integer(child, "count", 1, 1024);
        connect(gpu, cpuOf_[gpu], LinkType::c2c,
                static_cast<Bandwidth>(megabytes) * static_cast<Bandwidth>(count));
      }
      if (child.name != "nvlink") continue;
      const BusId target = parseBusId(reader_.text(child, "target"));
      const Bandwidth count = reader_.integer(child, "count", 1, 1024);
      const Bandwidth bandwidth = perLink * count;
      const std::string* targetClass = child.find("tclass");
      const auto device = devices_.find({host_, target});
      if (targetClass && targetClass->starts_with("0x068001")) {
        connect(gpu, cpuOf_[gpu], LinkType::nvlink, bandwidth);  // POWER9
      } else if (device != devices_.end() && at(device->second).type == NodeType::gpu) {
        // Each end adds its own direction, as wide as the weaker end; an end that does not name
        // the other is filled in below.
        if (device->second == gpu) continue;
        const Bandwidth weaker =
            std::min(bandwidth, nvlinkBandwidth(at(device->second).gpu.sm) * count);
        addLink(gpu, device->second, LinkType::nvlink, weaker);
        if (!namesTarget(device->second, at(gpu).id)) {
          addLink(device->second, gpu, LinkType::nvlink, weaker);
        }
      } else if (!targetClass && device == devices_.end() && target != kHiddenBusId) {
        topology_.notes.push_back(
            fmt::format("{}:{}: <nvlink> leads to an unknown device and is "
                        "left out",
                        file_.source, child.line));
      } else if (!targetClass || targetClass->starts_with("0x0680")) {
        if (nvSwitch_ < 0) {
          nvSwitch_ = addNode(NodeType::nvs, 0);
          at(nvSwitch_).host = 0;
        }
        connect(gpu, nvSwitch_, LinkType::nvlink, bandwidth);
      }
    }
  }

  bool namesTarget(int gpu, BusId target) const { return targets_.contains({gpu, target}); }

  void addPciLink(int node, BusId target) {
    const auto device = devices_.find({at(node).host, target});
    if (device == devices_.end() || at(device->second).type != NodeType::pci ||
        device->second == node) {
      return;
    }
    for (const Link& link : at(node).links) {
      if (link.to == device->second && link.type == LinkType::local) return;
    }
    connect(node, device->second, LinkType::local, kLocalBandwidth);
  }

  // Whether a switch is a Broadcom one whose levels inside one chip show as two switches.
  static std::optional<uint64_t> broadcomSwitch(const Node& node) {
    if (node.type != NodeType::pci) return std::nullopt;
    const uint64_t vendor = node.pci.device >> 48;
    const uint64_t device = node.pci.device >> 32 & 0xffff;
    const uint64_t board = node.pci.device >> 16 & 0xffff;
    if (vendor != kBroadcom || board != kBroadcom) return std::nullopt;
    if (device != kBroadcomGen4 && device != kBroadcomGen5) return std::nullopt;
    return device;
  }

  // The lower level goes; what hangs below it hangs below the upper level.
  void flattenBroadcomSwitches() {
    dropped_.assign(topology_.nodes.size(), false);
    const int count = static_cast<int>(topology_.nodes.size());
    for (int lower = 0; lower < count; lower++) {
      const auto generation = broadcomSwitch(at(lower));
      if (!generation) continue;
      const int upper = parentOf(lower);
      if (upper < 0 || broadcomSwitch(at(upper)) != generation || flattened_.contains(upper)) {
        continue;
      }
      flattened_[lower] = upper;
    }
    for (const auto& [lower, upper] : flattened_) {
      std::erase_if(at(upper).links,
                    [&, gone = lower](const Link& link) { return link.to == gone; });
      for (const Link& link : at(lower).links) {
        if (link.to == upper) continue;
        std::erase_if(at(link.to).links,
                      [&, gone = lower](const Link& back) { return back.to == gone; });
        connect(link.to, upper, link.type, link.bandwidth);
      }
      at(lower).links.clear();
      dropped_[static_cast<size_t>(lower)] = true;
    }
  }

  // The node above a PCI switch: its first PCI link, which was made when it was added.
  int parentOf(int node) {
    for (const Link& link : at(node).links) {
      if (link.type == LinkType::pci) return link.to;
    }
    return -1;
  }

  // Switches below which no GPU and no NIC is left carry nothing.
  void dropEmptySwitches() {
    bool changed = true;
    while (changed) {
      changed = false;
      for (int node = 0; node < static_cast<int>(topology_.nodes.size()); node++) {
        if (dropped_[static_cast<size_t>(node)] || at(node).type != NodeType::pci) continue;
        if (at(node).links.size() > 1) continue;
        for (const Link& link : at(node).links) {
          std::erase_if(at(link.to).links, [&](const Link& back) { return back.to == node; });
        }
        at(node).links.clear();
        dropped_[static_cast<size_t>(node)] = true;
        changed = true;
      }
    }
  }

  void giveRanks() {
    for (const auto& [node, xml] : gpus_) {
      if (at(node).gpu.rank >= 0) return;
    }
    std::vector<int> order;
    for (const auto& [node, xml] : gpus_) order.push_back(node);
    std::sort(order.begin(), order.end(), [&](int a, int b) {
      return std::tuple(at(a).host, at(a).gpu.dev) < std::tuple(at(b).host, at(b).gpu.dev);
    });
    int rank = 0;
    for (const int node : order) at(node).gpu.rank = rank++;
  }

  void sort() {
    std::vector<int> order;
    for (int i = 0; i < static_cast<int>(topology_.nodes.size()); i++) {
      if (!dropped_[static_cast<size_t>(i)]) order.push_back(i);
    }
    std::sort(order.begin(), order.end(), [&](int a, int b) {
      return std::tuple(at(a).type, at(a).host, at(a).id) <
             std::tuple(at(b).type, at(b).host, at(b).id);
    });
    std::vector<int> renamed(topology_.nodes.size(), -1);
    std::vector<Node> nodes;
    for (const int old : order) {
      renamed[static_cast<size_t>(old)] = static_cast<int>(nodes.size());
      nodes.push_back(std::move(at(old)));
    }
    topology_.nodes = std::move(nodes);
    for (Node& node : topology_.nodes) {
      for (Link& link : node.links) link.to = renamed[static_cast<size_t>(link.to)];
      std::sort(node.links.begin(), node.links.end(), [](const Link& a, const Link& b) {
        return std::tuple(-a.bandwidth, a.to, a.type) < std::tuple(-b.bandwidth, b.to, b.type);
      });
    }
    for (int i = 0; i < static_cast<int>(topology_.nodes.size()); i++) {
      topology_.byType[static_cast<size_t>(at(i).type)].push_back(i);
    }
  }

  const XmlTopology& file_;
  const XmlReader reader_;
  Topology topology_;
  int host_ = 0;
  int cpu_ = -1;
  int nvSwitch_ = -1;
  std::vector<std::pair<int, const XmlNode*>> gpus_;
  std::set<std::pair<int, BusId>> targets_;  // of the NVLinks that a GPU names
  std::vector<std::pair<int, BusId>> pciLinks_;
  std::map<DeviceKey, int> devices_;
  std::set<std::pair<int, int>> nets_;
  std::map<int, int> cpuOf_;
  std::map<int, int> flattened_;
  std::vector<bool> dropped_;
};

}  // namespace

int Topology::gpuOfRank(int rank) const {
  for (const int gpu : of(NodeType::gpu)) {
    if (node(gpu).gpu.rank == rank) return gpu;
  }
  return -1;
}

int Topology::lowestSm() const {
  int lowest = 0;
  for (const int gpu : of(NodeType::gpu)) {
    lowest = lowest == 0 ? node(gpu).gpu.sm : std::min(lowest, node(gpu).gpu.sm);
  }
  return lowest;
}

std::string Topology::nameOf(int index) const {
  const Node& node = this->node(index);
  std::string type(topology::nameOf(node.type));
  const std::string host = hosts.size() > 1 ? fmt::format("{}:", node.host) : "";
  switch (node.type) {
    case NodeType::gpu:
      return fmt::format("{}/{}{}", type, host, node.gpu.dev);
    case NodeType::cpu:
      return fmt::format("{}/{}{}", type, host, node.cpu.numa);
    case NodeType::net:
      return fmt::format("{}/{}{}{}", type, host, node.net.dev,
                         node.net.name.empty() ? "" : "-" + node.net.name);
    case NodeType::nvs:
      return type;
    default:
      return fmt::format("{}/{}{}", type, host, node.id < 0 ? "virtual" : formatBusId(node.id));
  }
}

int Topology::find(std::string_view name) const {
  for (int index = 0; index < static_cast<int>(nodes.size()); index++) {
    const std::string full = nameOf(index);
    if (full == name) return index;
    if (node(index).type == NodeType::net && full.substr(0, full.find('-')) == name) return index;
  }
  return -1;
}

Topology buildTopology(const XmlTopology& file) {
  return Builder(file).build();
}

Topology subTopology(const Topology& topology, const std::vector<bool>& keep) {
  Topology result;
  result.hosts = topology.hosts;
  result.notes = topology.notes;
  std::vector<int> renamed(topology.nodes.size(), -1);
  for (size_t i = 0; i < topology.nodes.size(); i++) {
    if (!keep[i]) continue;
    renamed[i] = static_cast<int>(result.nodes.size());
    result.nodes.push_back(topology.nodes[i]);
  }
  for (int i = 0; i < static_cast<int>(result.nodes.size()); i++) {
    Node& node = result.nodes[static_cast<size_t>(i)];
    std::erase_if(node.links,
                  [&](const Link& link) { return renamed[static_cast<size_t>(link.to)] < 0; });
    for (Link& link : node.links) link.to = renamed[static_cast<size_t>(link.to)];
    result.byType[static_cast<size_t>(node.type)].push_back(i);
  }
  return result;
}

}  // namespace unisono::topology
