// SPDX-License-Identifier: Apache-2.0
#include "topology/xml.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <set>
#include <tuple>

#include "base/error.h"

namespace unisono::topology {

namespace {

constexpr int kTopologyVersion = 1;
constexpr int kMaxNumber = 1 << 20;  // of a rank, device, NUMA node or count

// Parses up to `maxDigits` hexadecimal digits that fill `text`.
bool parseHex(std::string_view text, size_t maxDigits, uint64_t& value) {
  if (text.empty() || text.size() > maxDigits) return false;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  return error == std::errc() && end == text.data() + text.size();
}

// Which elements may stand inside which.
bool knownElement(std::string_view name) {
  static constexpr std::string_view kNames[] = {"cpu", "pci", "gpu", "nvlink",
                                                "c2c", "nic", "net", "pcilink"};
  return std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
}

bool allowedInside(std::string_view parent, std::string_view child) {
  if (parent == "system") return child == "cpu";
  if (parent == "cpu") return child == "pci" || child == "nic";
  if (parent == "pci") {
    return child == "pci" || child == "gpu" || child == "nic" || child == "pcilink";
  }
  if (parent == "gpu") return child == "nvlink" || child == "c2c";
  if (parent == "nic") return child == "net";
  return false;
}

class Checker {
 public:
  Checker(XmlTopology& topology) : topology_(topology), reader_(topology.source) {}

  void check() {
    XmlNode& system = topology_.system;
    if (system.name != "system") reader_.fail(system, "is the root, but it must be <system>");
    const long long version = reader_.integer(system, "version", 0, kMaxNumber);
    if (version != kTopologyVersion) {
      reader_.fail(system, fmt::format("has version {}, this library reads version {}", version,
                                       kTopologyVersion));
    }
    visit(system);
    checkLinkEnds();
  }

 private:
  struct GpuLink {
    int count = 0;
    const XmlNode* node = nullptr;
  };

  void note(const XmlNode& node, const std::string& text) {
    topology_.notes.push_back(
        fmt::format("{}:{}: <{}> {}", topology_.source, node.line, node.name, text));
  }

  void visit(XmlNode& node) {
    std::erase_if(node.children, [&](const XmlNode& child) {
      if (knownElement(child.name)) return false;
      note(child, "is unknown and left out");
      return true;
    });
    for (XmlNode& child : node.children) {
      if (!allowedInside(node.name, child.name)) {
        reader_.fail(child, fmt::format("is not allowed inside <{}>", node.name));
      }
      checkElement(node, child);
      visit(child);
    }
  }

  // Refuses the first element beyond `most`.
  void count(const XmlNode& node, int& counted, int most, std::string_view where) {
    if (++counted > most) {
      reader_.fail(node, fmt::format("is number {}; {} has at most {}", counted, where, most));
    }
  }

  void checkElement(const XmlNode& parent, const XmlNode& node) {
    if (node.name == "cpu") {
      checkCpu(node);
    } else if (node.name == "pci") {
      checkPci(node);
    } else if (node.name == "gpu") {
      checkGpu(parent, node);
    } else if (node.name == "net") {
      checkNet(node);
    } else if (node.name == "pcilink") {
      busId(node, "target");
    } else if (node.name == "c2c") {
      reader_.number(node, "bw", 0, 1e9);
      reader_.integer(node, "count", 1, 1024);
    }
  }

  void checkCpu(const XmlNode& node) {
    host_ = reader_.identifierOr(node, "host_hash", 0);
    const long long numa = reader_.integerOr(node, "numaid", -1, kMaxNumber, -1);
    reader_.integerOr(node, "familyid", -1, INT32_MAX, -1);
    reader_.integerOr(node, "modelid", -1, INT32_MAX, -1);
    numa_ = numa;
    count(node, numaNodeCount_, kMaxNumaNodes, "a topology");
    count(node, numaNodesOfHost_[host_], kMaxNumaNodesOfHost, "a host");
    if (!numaNodes_.emplace(host_, numa).second) {
      reader_.fail(node, fmt::format("names NUMA node {} a second time", numa));
    }
    if (const std::string* affinity = node.find("affinity")) {
      size_t begin = 0;
      while (begin <= affinity->size() && !affinity->empty()) {
        const size_t end = std::min(affinity->find(',', begin), affinity->size());
        uint64_t word = 0;
        if (!parseHex(std::string_view(*affinity).substr(begin, end - begin), 8, word)) {
          reader_.fail(node, fmt::format("has affinity=\"{}\", which is not a list of hexadecimal "
                                         "words",
                                         *affinity));
        }
        begin = end + 1;
      }
    }
  }

  BusId busId(const XmlNode& node, std::string_view attribute) {
    const std::string& value = reader_.text(node, attribute);
    const BusId id = parseBusId(value);
    if (id == kNoBusId) {
      reader_.fail(node,
                   fmt::format("has {}=\"{}\", which is not a PCI address", attribute, value));
    }
    return id;
  }

  void checkPci(const XmlNode& node) {
    count(node, pciCount_, kMaxPciDevices, "a topology");
    const BusId id = busId(node, "busid");
    if (const auto [at, isNew] = devices_.try_emplace({host_, id}, &node); !isNew) {
      reader_.fail(node, fmt::format("has bus id {}, which line {} has too", formatBusId(id),
                                     at->second->line));
    }
    for (const char* attribute :
         {"class", "vendor", "device", "subsystem_vendor", "subsystem_device"}) {
      reader_.identifierOr(node, attribute, 0);
    }
    // Virtual machines show widths of 0, 63 and 255 where they hide the link.
    reader_.integerOr(node, "link_width", 0, 255, 0);
    pci_ = id;
  }

  void checkGpu(const XmlNode& parent, const XmlNode& node) {
    count(node, gpuCount_, kMaxGpus, "a topology");
    const auto siblings = std::count_if(parent.children.begin(), parent.children.end(),
                                        [](const XmlNode& child) { return child.name == "gpu"; });
    if (siblings > 1) reader_.fail(node, "is one of several in one <pci>");
    const std::string* deviceClass = parent.find("class");
    if (deviceClass && !deviceClass->empty() && !deviceClass->starts_with("0x03") &&
        !deviceClass->starts_with("0x12")) {
      reader_.fail(node,
                   fmt::format("is in a <pci> of class {}, which is not a GPU", *deviceClass));
    }
    const long long dev = reader_.integer(node, "dev", 0, kMaxNumber);
    reader_.integerOr(node, "sm", 1, 1000, 0);
    const long long rank = reader_.integerOr(node, "rank", -1, kMaxNumber * 64LL, -1);
    reader_.integerOr(node, "gdr", 0, 1, 0);
    if (!gpuDevices_.emplace(host_, dev).second) {
      reader_.fail(node, fmt::format("has dev {}, which another GPU of its host has", dev));
    }
    if (rank >= 0 && !ranks_.insert(rank).second) {
      reader_.fail(node, fmt::format("has rank {}, which another GPU has", rank));
    }
    std::set<BusId> targets;
    for (const XmlNode& link : node.children) {
      if (link.name != "nvlink") continue;
      const BusId target = busId(link, "target");
      const int count = static_cast<int>(reader_.integer(link, "count", 1, 1024));
      reader_.identifierOr(link, "tclass", 0);
      if (!targets.insert(target).second) {
        reader_.fail(link, fmt::format("names target {} a second time", formatBusId(target)));
      }
      if (target == pci_) note(link, "leads from a GPU to itself and is left out");
      links_[{host_, pci_, target}] = {count, &link};
    }
    gpus_.emplace(host_, pci_);
  }

  void checkNet(const XmlNode& node) {
    count(node, portCount_, kMaxPorts, "a topology");
    const long long dev = reader_.integerOr(node, "dev", 0, kMaxNumber, -1);
    reader_.integerOr(node, "speed", -1, 1'000'000'000, 0);
    reader_.integerOr(node, "port", -1, kMaxNumber, 0);
    reader_.identifierOr(node, "guid", 0);
    reader_.integerOr(node, "maxconn", -1, INT32_MAX, 0);
    reader_.integerOr(node, "gdr", 0, 1, 0);
    reader_.integerOr(node, "coll", 0, 1, 0);
    reader_.numberOr(node, "latency", 0, 1e9, 0);
    const std::string* name = node.find("name");
    if (dev < 0) return;
    const NetDevice port{name ? *name : "", numa_};
    const auto [at, isNew] = netDevices_.try_emplace({host_, dev}, port);
    if (isNew) return;
    // Dumps of virtual machines repeat a port that is not a PCI device below each CPU.
    if (at->second.name != port.name || at->second.numa == port.numa) {
      reader_.fail(node, fmt::format("has dev {}, which another net of its host has", dev));
    }
    at->second.numa = port.numa;
    note(node, fmt::format("repeats dev {}", dev));
  }

  // Two GPUs that are linked must say so with the same count.
  void checkLinkEnds() {
    for (const auto& [key, link] : links_) {
      const auto& [host, from, to] = key;
      if (from == to || !gpus_.contains({host, to})) continue;
      const auto back = links_.find({host, to, from});
      if (back == links_.end()) {
        note(*link.node, "is named by one of its two GPUs only; both ends are taken to have it");
      } else if (back->second.count != link.count) {
        reader_.fail(*link.node,
                     fmt::format("has count {}, its other end in line {} has {}", link.count,
                                 back->second.node->line, back->second.count));
      }
    }
  }

  XmlTopology& topology_;
  XmlReader reader_;
  uint64_t host_ = 0;
  BusId pci_ = kNoBusId;
  int gpuCount_ = 0, portCount_ = 0, pciCount_ = 0, numaNodeCount_ = 0;
  std::map<uint64_t, int> numaNodesOfHost_;
  std::set<std::pair<uint64_t, long long>> numaNodes_, gpuDevices_;
  struct NetDevice {
    std::string name;
    long long numa = -1;  // of the CPU that it was seen below last
  };
  std::map<std::pair<uint64_t, long long>, NetDevice> netDevices_;
  long long numa_ = -1;
  std::map<std::pair<uint64_t, BusId>, const XmlNode*> devices_;
  std::set<std::pair<uint64_t, BusId>> gpus_;
  std::set<long long> ranks_;
  std::map<std::tuple<uint64_t, BusId, BusId>, GpuLink> links_;
};

void collectGpus(const XmlReader& reader, const XmlNode& node, GpuDescription where,
                 std::vector<GpuDescription>& gpus) {
  if (node.name == "pci") where.busId = parseBusId(reader.text(node, "busid"));
  if (node.name == "gpu") {
    where.dev = static_cast<int>(reader.integer(node, "dev", 0, kMaxNumber));
    where.sm = static_cast<int>(reader.integerOr(node, "sm", 1, 1000, 0));
    where.rank = static_cast<int>(reader.integerOr(node, "rank", -1, kMaxNumber * 64LL, -1));
    gpus.push_back(where);
  }
  for (const XmlNode& child : node.children) collectGpus(reader, child, where, gpus);
}

}  // namespace

BusId parseBusId(std::string_view text) {
  const size_t point = text.rfind('.');
  if (point == std::string_view::npos) return kNoBusId;
  const size_t second = text.rfind(':', point);
  if (second == std::string_view::npos) return kNoBusId;
  uint64_t domain = 0, bus = 0, device = 0, function = 0;
  std::string_view busText = text.substr(0, second);
  if (const size_t first = busText.find(':'); first != std::string_view::npos) {
    if (!parseHex(busText.substr(0, first), 8, domain)) return kNoBusId;
    busText = busText.substr(first + 1);
  }
  if (!parseHex(busText, 2, bus) ||
      !parseHex(text.substr(second + 1, point - second - 1), 2, device) ||
      !parseHex(text.substr(point + 1), 1, function)) {
    return kNoBusId;
  }
  return static_cast<BusId>(domain << 20 | bus << 12 | device << 4 | function);
}

std::string formatBusId(BusId id) {
  return fmt::format("{:04x}:{:02x}:{:02x}.{:x}", id >> 20, id >> 12 & 0xff, id >> 4 & 0xff,
                     id & 0xf);
}

XmlTopology checkTopologyXml(XmlNode system, std::string_view source) {
  XmlTopology topology{std::move(system), std::string(source), {}};
  Checker(topology).check();
  return topology;
}

XmlTopology parseTopologyXml(std::string_view text, std::string_view source,
                             const XmlLimits& limits) {
  return checkTopologyXml(parseXml(text, source, limits), source);
}

std::string writeTopologyXml(const XmlTopology& topology) {
  return writeXml(topology.system);
}

std::vector<GpuDescription> gpusOf(const XmlTopology& topology) {
  const XmlReader reader(topology.source);
  std::vector<GpuDescription> gpus;
  std::vector<uint64_t> hosts;
  int cpuIndex = 0;
  for (const XmlNode& cpu : topology.system.children) {
    GpuDescription where;
    where.hostHash = reader.identifierOr(cpu, "host_hash", 0);
    auto host = std::find(hosts.begin(), hosts.end(), where.hostHash);
    if (host == hosts.end()) host = hosts.insert(hosts.end(), where.hostHash);
    where.host = static_cast<int>(host - hosts.begin());
    where.numa = static_cast<int>(reader.integerOr(cpu, "numaid", -1, kMaxNumber, -1));
    where.cpu = cpuIndex++;
    collectGpus(reader, cpu, where, gpus);
  }
  std::sort(gpus.begin(), gpus.end(), [](const GpuDescription& a, const GpuDescription& b) {
    return std::tie(a.host, a.dev) < std::tie(b.host, b.dev);
  });
  return gpus;
}

}  // namespace unisono::topology
