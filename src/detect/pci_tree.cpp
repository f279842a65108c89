// SPDX-License-Identifier: Apache-2.0
#include "detect/pci_tree.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <limits>

#include "topology/xml_merge.h"

namespace unisono::detect {

using topology::BusId;
using topology::XmlNode;

namespace {

// The processor as its first entry in /proc/cpuinfo describes it.
struct Processor {
  std::string architecture, vendor;
  int family = -1, model = -1;
};

Processor readProcessor(const Sysfs& sysfs) {
  Processor processor;
  const std::string text = Sysfs::read(sysfs.at("proc/cpuinfo")).value_or("");
  size_t begin = 0;
  while (begin < text.size()) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = std::string_view(text).substr(begin, end - begin);
    begin = end + 1;
    const size_t colon = line.find(':');
    if (colon == std::string_view::npos) continue;
    const std::string_view key = line.substr(0, line.find_last_not_of(" \t", colon - 1) + 1);
    std::string_view value = line.substr(colon + 1);
    value.remove_prefix(std::min(value.find_first_not_of(" \t"), value.size()));
    auto number = parseInteger(value);
    if (number && (*number < 0 || *number > 0xffff)) number.reset();
    if (key == "vendor_id" && processor.vendor.empty()) {
      processor.architecture = "x86_64";
      // As it stands there: one vendor's name begins and ends with spaces.
      processor.vendor = line.substr(std::min(colon + 2, line.size()));
    }
    if (key == "cpu family" && processor.family < 0 && number) {
      processor.family = static_cast<int>(*number);
    }
    if (key == "model" && processor.model < 0 && number) {
      processor.model = static_cast<int>(*number);
    }
    if (key == "CPU implementer") processor.architecture = "arm64";
    if (key == "cpu" && value.starts_with("POWER")) processor.architecture = "ppc64";
  }
  // Files give the family as the processor's two fields, side by side; the kernel adds them up.
  constexpr int kExtended = 15;
  if (processor.family >= kExtended && processor.family < kExtended + 256) {
    processor.family = kExtended | (processor.family - kExtended) << 4;
  }
#if defined(__aarch64__)
  if (processor.architecture.empty()) processor.architecture = "arm64";
#elif defined(__x86_64__)
  if (processor.architecture.empty()) processor.architecture = "x86_64";
#endif
  return processor;
}

// "00000000,ffffffff": hexadecimal words of at most eight digits.
bool isCpuMap(std::string_view text) {
  int digits = 0;
  for (const char c : text) {
    if (c == ',') {
      if (digits == 0) return false;
      digits = 0;
    } else if (!std::isxdigit(static_cast<unsigned char>(c)) || ++digits > 8) {
      return false;
    }
  }
  return digits > 0;
}

bool isHexNumber(std::string_view text) {
  if (!text.starts_with("0x") || text.size() < 3 || text.size() > 10) return false;
  return std::all_of(text.begin() + 2, text.end(),
                     [](char c) { return std::isxdigit(static_cast<unsigned char>(c)) != 0; });
}

BusId busIdOfName(const std::filesystem::path& folder) {
  const std::string name = folder.filename().string();
  // "pci0000:17" and "0000:17:01.0:pcie001" are no devices.
  return std::count(name.begin(), name.end(), ':') == 2 ? topology::parseBusId(name)
                                                        : topology::kNoBusId;
}

// What the link between a device and the port above it carries: the lesser of both ends.
void describeLink(XmlNode& pci, const std::filesystem::path& folder) {
  const auto parent = folder.parent_path();
  const auto own = Sysfs::attribute(folder, "max_link_speed");
  const auto port = Sysfs::attribute(parent, "max_link_speed");
  const auto rank = [](const std::optional<std::string>& text) {
    return text ? leadingNumber(*text).value_or(std::numeric_limits<double>::max())
                : std::numeric_limits<double>::max();
  };
  const auto& slower = rank(port) < rank(own) ? port : own;
  if (rank(slower) < std::numeric_limits<double>::max()) pci.set("link_speed", *slower);
  const auto width = [](const std::filesystem::path& end) {
    const auto text = Sysfs::attribute(end, "max_link_width");
    const long long lanes = text ? parseInteger(*text).value_or(0) : 0;
    return lanes < 0 || lanes > 255 ? 0 : lanes;
  };
  // A virtual machine hides the port: 0 lanes says that how many are wired is not known.
  pci.set("link_width", std::to_string(std::min(width(folder), width(parent))));
}

}  // namespace

BusId pciDeviceOf(const std::filesystem::path& folder) {
  if (folder.empty()) return topology::kNoBusId;
  std::error_code error;
  const auto subsystem = std::filesystem::read_symlink(folder / "subsystem", error);
  if (!error && subsystem.filename() != "pci") return topology::kNoBusId;
  return busIdOfName(folder);
}

PciTree::PciTree(const Sysfs& sysfs, uint64_t hostHash) : sysfs_(sysfs), hostHash_(hostHash) {
  system_.name = "system";
  system_.set("version", "1");
}

std::filesystem::path PciTree::folderOf(BusId busId) const {
  const std::string name = topology::formatBusId(busId);
  if (const auto folder = Sysfs::resolve(sysfs_.at("sys/bus/pci/devices") / name)) return *folder;
  const std::string bus = name.substr(0, name.rfind(':'));
  if (const auto folder = Sysfs::resolve(sysfs_.at("sys/class/pci_bus") / bus / "../.." / name)) {
    return *folder;
  }
  return {};
}

std::string PciTree::classOf(BusId busId) const {
  const auto folder = folderOf(busId);
  if (folder.empty()) return {};
  const auto text = Sysfs::attribute(folder, "class");
  return text && isHexNumber(*text) ? *text : std::string();
}

XmlNode& PciTree::cpu(int numa) {
  const std::string id = std::to_string(numa);
  for (XmlNode& cpu : system_.children) {
    if (*cpu.find("numaid") == id) return cpu;
  }
  XmlNode& cpu = system_.addChild("cpu");
  describeCpu(cpu, numa);
  return cpu;
}

void PciTree::describeCpu(XmlNode& cpu, int numa) {
  if (hostHash_ != 0) cpu.set("host_hash", fmt::format("{:#x}", hostHash_));
  cpu.set("numaid", std::to_string(numa));
  const auto map =
      Sysfs::attribute(sysfs_.at(fmt::format("sys/devices/system/node/node{}", numa)), "cpumap");
  if (map && isCpuMap(*map)) {
    cpu.set("affinity", *map);
  } else if (map) {
    notes_.push_back(fmt::format("the CPU map of NUMA node {} is unreadable, left out", numa));
  }
  const Processor processor = readProcessor(sysfs_);
  if (!processor.architecture.empty()) cpu.set("arch", processor.architecture);
  if (processor.architecture != "x86_64") return;
  if (!processor.vendor.empty()) cpu.set("vendor", processor.vendor);
  if (processor.family >= 0) cpu.set("familyid", std::to_string(processor.family));
  if (processor.model >= 0) cpu.set("modelid", std::to_string(processor.model));
}

void PciTree::describeDevice(XmlNode& pci, const std::filesystem::path& folder) {
  const std::string name = *pci.find("busid");
  for (const char* attribute :
       {"class", "vendor", "device", "subsystem_vendor", "subsystem_device"}) {
    const auto text = Sysfs::attribute(folder, attribute);
    if (text && isHexNumber(*text)) {
      pci.set(attribute, *text);
    } else {
      notes_.push_back(fmt::format("PCI device {} has no readable \"{}\"", name, attribute));
    }
  }
  describeLink(pci, folder);
}

XmlNode& PciTree::device(BusId busId) {
  if (XmlNode* known = topology::findDevice(system_, 0, busId)) return *known;
  const std::string name = topology::formatBusId(busId);
  std::filesystem::path folder = folderOf(busId);
  if (folder.empty()) {
    notes_.push_back(fmt::format("PCI device {} is not in sysfs, its place is unknown", name));
    XmlNode& pci = cpu(-1).addChild("pci");
    pci.set("busid", name);
    return pci;
  }
  // From the device up to the first switch that is known, or to the root.
  std::vector<std::filesystem::path> chain;
  XmlNode* parent = nullptr;
  int numa = -1;
  while (!parent) {
    chain.push_back(folder);
    if (numa < 0) {
      const auto text = Sysfs::attribute(folder, "numa_node");
      const long long node = text ? parseInteger(*text).value_or(-1) : -1;
      numa = node >= 0 && node < (1 << 20) ? static_cast<int>(node) : -1;
    }
    const auto port = folder.parent_path(), upstream = port.parent_path();
    if (busIdOfName(port) == topology::kNoBusId || busIdOfName(upstream) == topology::kNoBusId) {
      parent = &cpu(numa);
      break;
    }
    folder = upstream;
    parent = topology::findDevice(system_, 0, busIdOfName(folder));
  }
  for (auto entry = chain.rbegin(); entry != chain.rend(); ++entry) {
    XmlNode& pci = parent->addChild("pci");
    pci.set("busid", topology::formatBusId(busIdOfName(*entry)));
    describeDevice(pci, *entry);
    parent = &pci;
  }
  return *parent;
}

}  // namespace unisono::detect
