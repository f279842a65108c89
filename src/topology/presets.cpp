// SPDX-License-Identifier: Apache-2.0
#include "topology/presets.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"

namespace unisono::topology {

namespace {

BusId gpuBusId(int gpu) {
  return static_cast<BusId>(0x10 + gpu) << 12;
}

XmlNode& addDevice(XmlNode& parent, BusId busId, std::string_view deviceClass,
                   std::string_view vendor, const MachineDescription& description) {
  XmlNode& pci = parent.addChild("pci");
  pci.set("busid", formatBusId(busId));
  pci.set("class", std::string(deviceClass));
  pci.set("vendor", std::string(vendor));
  pci.set("device", "0x0001");
  pci.set("subsystem_vendor", "0x0000");
  pci.set("subsystem_device", "0x0000");
  pci.set("link_speed", description.pciSpeed);
  pci.set("link_width", "16");
  return pci;
}

void addGpu(XmlNode& parent, int gpu, const MachineDescription& description) {
  XmlNode& pci = addDevice(parent, gpuBusId(gpu), "0x030200", "0x10de", description);
  XmlNode& node = pci.addChild("gpu");
  node.set("dev", std::to_string(gpu));
  node.set("sm", std::to_string(description.sm));
  node.set("rank", std::to_string(gpu));
  node.set("gdr", description.gdr ? "1" : "0");
  if (description.switchNvlinks > 0) {
    XmlNode& link = node.addChild("nvlink");
    link.set("target", formatBusId(kHiddenBusId));
    link.set("count", std::to_string(description.switchNvlinks));
    link.set("tclass", "0x068000");
  }
  if (!description.peerNvlinks.empty()) {
    const auto& counts = description.peerNvlinks[static_cast<size_t>(gpu)];
    for (int peer = 0; peer < static_cast<int>(counts.size()); peer++) {
      if (counts[static_cast<size_t>(peer)] == 0) continue;
      XmlNode& link = node.addChild("nvlink");
      link.set("target", formatBusId(gpuBusId(peer)));
      link.set("count", std::to_string(counts[static_cast<size_t>(peer)]));
      link.set("tclass", "0x030200");
    }
  }
  if (description.chipLinkMegabytes > 0) {
    XmlNode& link = node.addChild("c2c");
    link.set("bw", fmt::format("{:g}", description.chipLinkMegabytes));
    link.set("count", "1");
  }
}

void addNic(XmlNode& parent, int nic, const MachineDescription& description) {
  const BusId busId = static_cast<BusId>(0x90 + nic) << 12;
  XmlNode& pci = addDevice(parent, busId, "0x020700", "0x15b3", description);
  XmlNode& net = pci.addChild("nic").addChild("net");
  net.set("name", fmt::format("mlx5_{}", nic));
  net.set("dev", std::to_string(nic));
  net.set("latency", "0");
  net.set("speed", std::to_string(description.nicMegabits));
  net.set("port", "1");
  net.set("guid", fmt::format("{:#x}", 0x1000 + nic));
  net.set("maxconn", "131072");
  net.set("gdr", description.gdr ? "1" : "0");
}

// The links of eight V100 in two groups of four, each GPU with six.
std::vector<std::vector<int>> cubeMesh() {
  std::vector<std::vector<int>> links(8, std::vector<int>(8, 0));
  const auto join = [&](int a, int b, int count) {
    links[static_cast<size_t>(a)][static_cast<size_t>(b)] = count;
    links[static_cast<size_t>(b)][static_cast<size_t>(a)] = count;
  };
  for (const int base : {0, 4}) {
    join(base, base + 1, 1);
    join(base, base + 2, 1);
    join(base, base + 3, 2);
    join(base + 1, base + 2, 2);
    join(base + 1, base + 3, 1);
    join(base + 2, base + 3, 1);
  }
  for (int gpu = 0; gpu < 4; gpu++) join(gpu, gpu + 4, 2);
  return links;
}

std::vector<std::vector<int>> allPairs(int gpus, int count) {
  std::vector<std::vector<int>> links(static_cast<size_t>(gpus),
                                      std::vector<int>(static_cast<size_t>(gpus), count));
  for (size_t gpu = 0; gpu < links.size(); gpu++) links[gpu][gpu] = 0;
  return links;
}

std::vector<MachineDescription> allPresets() {
  std::vector<MachineDescription> all;
  const auto add = [&](std::string_view name) -> MachineDescription& {
    MachineDescription& description = all.emplace_back();
    description.name = name;
    return description;
  };
  {
    MachineDescription& m = add("dgx-h100");
    m.nics = m.switches = 8;
    m.switchNvlinks = 18;
  }
  {
    MachineDescription& m = add("hgx-h200x4");
    m.gpus = 4;
    m.sockets = 1;
    m.switchNvlinks = 18;
    m.cpuModel = 207;
  }
  {
    MachineDescription& m = add("hgx-h200x8");
    m.switches = 8;
    m.switchNvlinks = 18;
    m.cpuModel = 207;
  }
  {
    MachineDescription& m = add("hgx-b200x8");
    m.switches = 4;
    m.sm = 100;
    m.switchNvlinks = 18;
    m.cpuModel = 207;
  }
  {
    MachineDescription& m = add("dgx-a100");
    m.nics = 8;
    m.switches = 4;
    m.sm = 80;
    m.switchNvlinks = 12;
    m.cpuVendor = "AuthenticAMD";
    m.cpuFamily = 143;
    m.cpuModel = 49;
    m.pciSpeed = "16.0 GT/s PCIe";
    m.nicMegabits = 200'000;
  }
  {
    MachineDescription& m = add("dgx1-v100");
    m.nics = m.switches = 4;
    m.sm = 70;
    m.peerNvlinks = cubeMesh();
    m.cpuModel = 79;
    m.pciSpeed = "8.0 GT/s PCIe";
    m.nicMegabits = 100'000;
  }
  {
    MachineDescription& m = add("a100-pcie-x4");
    m.gpus = 4;
    m.sm = 80;
    m.cpuVendor = "AuthenticAMD";
    m.cpuFamily = 175;
    m.cpuModel = 1;
    m.pciSpeed = "16.0 GT/s PCIe";
  }
  {
    MachineDescription& m = add("rtx3090-x8");
    m.nics = 1;
    m.switches = 2;
    m.sm = 86;
    m.cpuModel = 106;
    m.pciSpeed = "16.0 GT/s PCIe";
    m.nicMegabits = 56'000;
    m.gdr = false;
  }
  {
    MachineDescription& m = add("gh200-x4");
    m.gpus = m.nics = m.sockets = 4;
    m.peerNvlinks = allPairs(4, 6);
    m.chipLinkMegabytes = 450'000;
    m.cpuArchitecture = "arm64";
    m.cpuVendor = "ARM";
    m.cpuFamily = m.cpuModel = 0;
  }
  {
    MachineDescription& m = add("scale-16x16");
    m.gpus = m.nics = m.switches = 16;
    m.switchNvlinks = 18;
  }
  return all;
}

}  // namespace

XmlTopology describeMachine(const MachineDescription& description) {
  const auto share = [](int item, int items, int places) { return item * places / items; };
  XmlNode system;
  system.name = "system";
  system.set("version", "1");
  for (int socket = 0; socket < description.sockets; socket++) {
    XmlNode& cpu = system.addChild("cpu");
    cpu.set("numaid", std::to_string(socket));
    // Thirty-two cores a socket.
    std::string affinity;
    for (int word = description.sockets - 1; word >= 0; --word) {
      if (!affinity.empty()) affinity += ',';
      affinity += word == socket ? "ffffffff" : "00000000";
    }
    cpu.set("affinity", affinity);
    cpu.set("arch", description.cpuArchitecture);
    cpu.set("vendor", description.cpuVendor);
    cpu.set("familyid", std::to_string(description.cpuFamily));
    cpu.set("modelid", std::to_string(description.cpuModel));
    const int places = std::max(description.switches, description.sockets);
    for (int place = 0; place < places; place++) {
      if (share(place, places, description.sockets) != socket) continue;
      XmlNode* parent = &cpu;
      if (description.switches > 0) {
        parent = &addDevice(cpu, static_cast<BusId>(0xd0 + place) << 12, "0x060400", "0x11f8",
                            description);
      }
      for (int gpu = 0; gpu < description.gpus; gpu++) {
        if (share(gpu, description.gpus, places) == place) addGpu(*parent, gpu, description);
      }
      // A single NIC is at the last socket, the far end of the machine.
      for (int nic = 0; nic < description.nics; nic++) {
        const int home = description.nics == 1 ? places - 1 : share(nic, description.nics, places);
        if (home == place) addNic(*parent, nic, description);
      }
    }
  }
  return checkTopologyXml(std::move(system), description.name);
}

std::vector<std::string> presetNames() {
  std::vector<std::string> names;
  for (const MachineDescription& description : allPresets()) names.push_back(description.name);
  return names;
}

MachineDescription preset(std::string_view name) {
  for (MachineDescription& description : allPresets()) {
    if (description.name == name) return description;
  }
  throw invalidArgument("there is no machine preset \"{}\"", name)
      .remedy(fmt::format("The presets are {}.", fmt::join(presetNames(), ", ")));
}

}  // namespace unisono::topology
