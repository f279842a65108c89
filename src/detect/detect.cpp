// SPDX-License-Identifier: Apache-2.0
#include "detect/detect.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>

#include "base/error.h"
#include "base/unique_descriptor.h"
#include "detect/pci_tree.h"
#include "topology/xml_merge.h"

namespace unisono::detect {

using topology::BusId;
using topology::XmlNode;
using topology::XmlTopology;

namespace {

constexpr const char* kSwitchClass = "0x068000";
constexpr const char* kGpuClass = "0x030200";
// A board without a display is one for data centers, whose memory the driver lets adapters reach.
constexpr std::string_view kComputeBoard = "0x0302";
constexpr const char* kNvidia = "0x10de";

XmlNode& nicOf(XmlNode& parent) {
  for (XmlNode& child : parent.children) {
    if (child.name == "nic") return child;
  }
  return parent.addChild("nic");
}

void fillPort(XmlNode& nic, const NicPort& port) {
  XmlNode& net = nic.addChild("net");
  net.set("name", port.name);
  net.set("dev", std::to_string(port.dev));
  net.set("latency", fmt::format("{}", port.latency));
  net.set("speed", std::to_string(port.megabits));
  net.set("port", std::to_string(port.port));
  net.set("guid", fmt::format("{:#x}", port.guid));
  if (port.connections > 0) net.set("maxconn", std::to_string(port.connections));
  net.set("gdr", port.gdr ? "1" : "0");
  if (port.collective) net.set("coll", "1");
  net.set("keep", "1");
}

void erasePorts(XmlNode& node) {
  for (XmlNode& child : node.children) erasePorts(child);
  std::erase_if(node.children, [](const XmlNode& child) {
    return child.name == "net" || (child.name == "nic" && child.children.empty());
  });
}

class Detector {
 public:
  explicit Detector(const DetectRequest& request)
      : request_(request), sysfs_(request.root), tree_(sysfs_, request.hostHash) {}

  Detected detect() {
    findGpus();
    for (size_t index = 0; index < gpus_.size(); index++) addGpu(index);
    agreeOnLinks();
    ports_ = request_.ports ? *request_.ports : findPorts(sysfs_);
    for (const NicPort& port : ports_) {
      if (const BusId busId = pciDeviceOf(port.device); busId != topology::kNoBusId) {
        fillPort(nicOf(tree_.device(busId)), port);
      }
    }

    XmlNode system = readFiles();
    mergeTopology(system, tree_.system());
    for (const NicPort& port : ports_) {
      if (pciDeviceOf(port.device) == topology::kNoBusId) addPlainPort(system, port);
    }
    topology::trimToKept(system);
    result_.topology = topology::checkTopologyXml(std::move(system), source_);
    auto& notes = result_.topology.notes;
    notes.insert(notes.begin(), tree_.notes().begin(), tree_.notes().end());
    askPeers();
    if (!request_.dumpFile.empty()) {
      writeFile(request_.dumpFile, topology::writeTopologyXml(result_.topology));
    }
    return std::move(result_);
  }

 private:
  void findGpus() {
    gpus_ = request_.gpus;
    // To list all GPUs, the driver opens them, which takes milliseconds for each.
    const bool areNumbered =
        !gpus_.empty() && std::ranges::none_of(gpus_, [](const auto& gpu) { return gpu.dev < 0; });
    const bool lists = request_.nvml && !areNumbered;
    const std::vector<BusId> known = lists ? request_.nvml->gpus() : std::vector<BusId>();
    if (gpus_.empty()) {
      for (const BusId id : known) gpus_.push_back({id, -1, 0, -1, {}});
    }
    if (gpus_.empty()) findGpusInSysfs();
    if (areNumbered) return;
    // In a container the driver may list only some of them, and numbers those from 0.
    const bool areListed = std::ranges::all_of(gpus_, [&](const GpuRequest& gpu) {
      return std::ranges::find(known, gpu.busId) != known.end();
    });
    for (size_t index = 0; index < gpus_.size(); index++) {
      const auto at = std::ranges::find(known, gpus_[index].busId);
      int& number = gpus_[index].dev;
      if (!areListed) number = static_cast<int>(index);
      if (number < 0) number = static_cast<int>(at - known.begin());
    }
  }

  void findGpusInSysfs() {
    const auto folder = sysfs_.at("sys/bus/pci/devices");
    for (const std::string& name : Sysfs::list(folder)) {
      const auto type = Sysfs::attribute(folder / name, "class");
      if (Sysfs::attribute(folder / name, "vendor") != kNvidia || !type) continue;
      if (!type->starts_with("0x0300") && !type->starts_with(kComputeBoard)) continue;
      if (const BusId id = topology::parseBusId(name); id != topology::kNoBusId) {
        gpus_.push_back({id, -1, 0, -1, {}});
      }
    }
  }

  void addGpu(size_t index) {
    const GpuRequest& request = gpus_[index];
    XmlNode& pci = tree_.device(request.busId);
    // Anything else here is an attribute that the machine gives wrongly.
    const std::string* type = pci.find("class");
    if (!type || (!type->starts_with("0x03") && !type->starts_with("0x12"))) {
      pci.set("class", kGpuClass);
    }
    const bool compute = pci.find("class")->starts_with(kComputeBoard);
    // Several ranks on one GPU: the element is that of the first.
    for (const XmlNode& child : pci.children) {
      if (child.name == "gpu") return;
    }
    XmlNode& gpu = pci.addChild("gpu");
    gpu.set("dev", std::to_string(request.dev));
    int sm = request.sm;
    if (sm == 0 && request_.nvml) sm = request_.nvml->computeCapability(request.busId);
    if (sm > 0) gpu.set("sm", std::to_string(sm));
    if (request.rank >= 0) gpu.set("rank", std::to_string(request.rank));
    gpu.set("gdr", request.gdr.value_or(compute) ? "1" : "0");
    gpu.set("keep", "1");
    if (request_.nvml) addLinks(gpu, request.busId);
  }

  void addLinks(XmlNode& gpu, BusId self) {
    for (const NvmlSource::NvLink& link : request_.nvml->nvlinks(self)) {
      BusId target = topology::parseBusId(link.remoteBusId);
      if (target == topology::kNoBusId ||
          (target & topology::kHiddenBusId) == topology::kHiddenBusId) {
        target = topology::kHiddenBusId;
      }
      if (target == self) continue;
      const std::string name = topology::formatBusId(target);
      const auto same =
          std::find_if(gpu.children.begin(), gpu.children.end(),
                       [&](const XmlNode& child) { return *child.find("target") == name; });
      if (same != gpu.children.end()) {
        same->set("count", std::to_string(*parseInteger(*same->find("count")) + 1));
        continue;
      }
      XmlNode& nvlink = gpu.addChild("nvlink");
      nvlink.set("target", name);
      nvlink.set("count", "1");
      std::string type = target == topology::kHiddenBusId ? "" : tree_.classOf(target);
      // What a virtual machine hides is a switch, unless the driver knows better.
      if (type.empty()) {
        type = link.remote == NvmlSource::NvLink::Remote::gpu ? kGpuClass : kSwitchClass;
      }
      nvlink.set("tclass", type);
    }
    const NvmlSource::ChipLink chip = request_.nvml->chipLink(self);
    if (chip.count > 0 && chip.megabytes > 0) {
      XmlNode& c2c = gpu.addChild("c2c");
      c2c.set("bw", std::to_string(chip.megabytes));
      c2c.set("count", std::to_string(chip.count));
    }
  }

  // A link that only one of its GPUs has up carries nothing: both get the lesser count.
  void agreeOnLinks() {
    const auto linkTo = [&](BusId from, BusId to) -> XmlNode* {
      XmlNode* pci = topology::findDevice(tree_.system(), 0, from);
      if (!pci) return nullptr;
      for (XmlNode& gpu : pci->children) {
        for (XmlNode& link : gpu.children) {
          if (link.name == "nvlink" && topology::parseBusId(*link.find("target")) == to) {
            return &link;
          }
        }
      }
      return nullptr;
    };
    for (const GpuRequest& a : gpus_) {
      for (const GpuRequest& b : gpus_) {
        XmlNode* there = linkTo(a.busId, b.busId);
        XmlNode* back = linkTo(b.busId, a.busId);
        if (!there || !back || *there->find("count") == *back->find("count")) continue;
        const long long count =
            std::min(*parseInteger(*there->find("count")), *parseInteger(*back->find("count")));
        tree_.notes().push_back(fmt::format(
            "GPUs {} and {} have different numbers of NVLinks to each other up; {} are taken",
            topology::formatBusId(a.busId), topology::formatBusId(b.busId), count));
        there->set("count", std::to_string(count));
        back->set("count", std::to_string(count));
      }
    }
  }

  // A port that is not a PCI device is attached where the file has it, or else to the first CPU.
  void addPlainPort(XmlNode& system, const NicPort& port) {
    XmlNode added;
    fillPort(added, port);
    for (XmlNode& cpu : system.children) {
      for (XmlNode& nic : cpu.children) {
        for (XmlNode& net : nic.children) {
          if (const std::string* name = net.find("name");
              net.name == "net" && name && *name == port.name) {
            for (const auto& attribute : added.children.front().attributes) {
              net.setDefault(attribute.name, attribute.value);
            }
            return;
          }
        }
      }
    }
    tree_.notes().push_back(
        fmt::format("{} is not a PCI device and was attached to the first CPU", port.name));
    if (system.children.empty()) system = mergedWithOneCpu(std::move(system));
    nicOf(system.children.front()).children.push_back(std::move(added.children.front()));
  }

  XmlNode mergedWithOneCpu(XmlNode system) {
    PciTree alone(sysfs_, request_.hostHash);
    alone.addUnknownCpu();
    mergeTopology(system, alone.system());
    return system;
  }

  // The user's file, or the platform's; without either an empty system.
  XmlNode readFiles() {
    std::filesystem::path file = request_.topologyFile;
    if (file.empty()) {
      file = sysfs_.at(kPlatformFile);
      if (!Sysfs::exists(file)) {
        XmlNode system;
        system.name = "system";
        system.set("version", "1");
        return system;
      }
    }
    XmlTopology read = readTopologyFile(file);
    source_ = fmt::format("{} with this machine", file.string());
    tree_.notes().insert(tree_.notes().end(), read.notes.begin(), read.notes.end());
    dropNumbers(read.system);
    return std::move(read.system);
  }

  // Numbers of GPUs and ports are ours to give; those of a file may be another machine's. Nor does
  // what another run kept count.
  static void dropNumbers(XmlNode& node) {
    node.erase("keep");
    if (node.name == "net" || node.name == "gpu") node.erase("dev");
    if (node.name == "gpu") node.erase("rank");
    for (XmlNode& child : node.children) dropNumbers(child);
  }

  int rankOf(size_t index) const {
    return gpus_[index].rank >= 0 ? gpus_[index].rank : static_cast<int>(index);
  }

  void askPeers() {
    if (!request_.nvml) return;
    for (size_t a = 0; a < gpus_.size(); a++) {
      for (size_t b = a + 1; b < gpus_.size(); b++) {
        if (!request_.nvml->peerAllowed(gpus_[a].busId, gpus_[b].busId)) {
          result_.p2pRefused.insert(std::minmax(rankOf(a), rankOf(b)));
        }
      }
    }
  }

  const DetectRequest& request_;
  const Sysfs sysfs_;
  PciTree tree_;
  std::vector<GpuRequest> gpus_;
  std::vector<NicPort> ports_;
  std::string source_ = "this machine";
  Detected result_;
};

}  // namespace

Detected detectMachine(const DetectRequest& request) {
  return Detector(request).detect();
}

void replacePorts(XmlNode& system, const std::vector<NicPort>& ports) {
  erasePorts(system);
  for (const NicPort& port : ports) {
    const BusId busId = pciDeviceOf(port.device);
    XmlNode* parent =
        busId == topology::kNoBusId ? nullptr : topology::findDevice(system, 0, busId);
    if (parent == nullptr) {
      const auto cpu = std::find_if(system.children.begin(), system.children.end(),
                                    [](const XmlNode& child) { return child.name == "cpu"; });
      if (cpu == system.children.end()) continue;  // no machine
      parent = &*cpu;
    }
    fillPort(nicOf(*parent), port);
  }
}

XmlTopology readTopologyFile(const std::filesystem::path& file) {
  return topology::parseTopologyXml(readFile(file, "the topology file"), file.string());
}

std::string readFile(const std::filesystem::path& file, const std::string& what) {
  const auto fail = [&](int code) {
    throw systemError(code, fmt::format("reading {} {}", what, file.string()))
        .remedy("Name a file that can be read");
  };
  // Opening a FIFO for reading blocks until somebody writes to it.
  const UniqueDescriptor opened(::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!opened) fail(errno);
  struct stat status {};
  if (::fstat(opened.get(), &status) != 0) fail(errno);
  if (S_ISDIR(status.st_mode)) fail(EISDIR);
  if (!S_ISREG(status.st_mode)) {
    throw invalidArgument("{} {} is not a regular file", what, file.string())
        .remedy("Copy the text to a file and name that");
  }
  // One byte more than is accepted, so that the parser can refuse what is too much.
  std::string text(topology::XmlLimits{}.bytes + 1, '\0');
  size_t size = 0;
  while (size < text.size()) {
    const ssize_t count = ::read(opened.get(), text.data() + size, text.size() - size);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail(errno);
    if (count == 0) break;
    size += static_cast<size_t>(count);
  }
  text.resize(size);
  return text;
}

void writeFile(const std::filesystem::path& file, const std::string& text) {
  errno = 0;
  std::ofstream out(file, std::ios::binary | std::ios::trunc);
  out << text;
  out.close();
  if (!out) {
    throw systemError(errno ? errno : EIO, fmt::format("writing {}", file.string()))
        .remedy("Name a file that can be written");
  }
}

}  // namespace unisono::detect
