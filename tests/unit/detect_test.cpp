// SPDX-License-Identifier: Apache-2.0
#include "detect/detect.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <sys/stat.h>

#include "base/error.h"
#include "detect_testing.h"
#include "topology/machine.h"
#include "topology/xml_merge.h"
#include "topology_testing.h"

namespace unisono::detect {
namespace {

using namespace testing;
using ::testing::HasSubstr;
using topology::XmlNode;
using topology::testing::errorOf;

DetectRequest requestFor(const FakeRoot& root, NvmlSource* nvml) {
  DetectRequest request;
  request.root = root.path();
  request.nvml = nvml;
  return request;
}

std::string attribute(const XmlNode& node, const char* name) {
  const std::string* value = node.find(name);
  return value ? *value : "(none)";
}

const XmlNode& only(const XmlNode& parent, const std::string& name) {
  const XmlNode* found = nullptr;
  for (const XmlNode& child : parent.children) {
    if (child.name != name) continue;
    EXPECT_EQ(found, nullptr) << "two <" << name << ">";
    found = &child;
  }
  if (!found) throw std::runtime_error("no <" + name + "> in <" + parent.name + ">");
  return *found;
}

const XmlNode& device(Detected& detected, const std::string& busId) {
  const XmlNode* found =
      topology::findDevice(detected.topology.system, 0, topology::parseBusId(busId));
  if (!found) throw std::runtime_error("no " + busId);
  return *found;
}

// Two sockets; on each a switch with two GPUs and an adapter.
void buildServer(FakeRoot& root, FakeNvml& nvml) {
  root.intel();
  root.write("sys/devices/system/node/node0/cpumap", "00000000,ffffffff");
  root.write("sys/devices/system/node/node1/cpumap", "ffffffff,00000000");
  for (int socket = 0; socket < 2; socket++) {
    const std::string numa = std::to_string(socket), b = socket ? "8" : "1";
    const std::string rootPort = fmt::format("pci0000:{0}0/0000:{0}0:01.0", b);
    const std::string upstream = fmt::format("{}/0000:{}1:00.0", rootPort, b);
    root.device(rootPort, {{"numa_node", numa}});
    root.device(upstream, {{"numa_node", numa}});
    for (int slot = 0; slot < 3; slot++) {
      const std::string s = std::to_string(slot), bus = b + std::to_string(slot + 3);
      const std::string port = fmt::format("{}/0000:{}2:0{}.0", upstream, b, s);
      root.device(port, {{"numa_node", numa}});
      if (slot < 2) {
        root.gpu(fmt::format("{}/0000:{}:00.0", port, bus), {{"numa_node", numa}});
        nvml.add(fmt::format("0000:{}:00.0", bus)).links = links(18, "00000000:C3:00.0");
      } else {
        root.adapter(fmt::format("{}/0000:{}:00.0", port, bus), socket ? "mlx5_10" : "mlx5_2",
                     socket ? "946d:ae03:00cd:50f3" : "946d:ae03:00cd:50f2");
      }
    }
  }
  root.device("pci0000:c0/0000:c0:01.0/0000:c3:00.0", {{"class", "0x068000"}});
}

TEST(Detect, ServerWithSwitches) {
  FakeRoot root;
  FakeNvml nvml;
  buildServer(root, nvml);
  Detected detected = detectMachine(requestFor(root, &nvml));
  const XmlNode& system = detected.topology.system;
  ASSERT_EQ(system.children.size(), 2u);
  const XmlNode& cpu = system.children[0];
  EXPECT_EQ(attribute(cpu, "numaid"), "0");
  EXPECT_EQ(attribute(cpu, "affinity"), "00000000,ffffffff");
  EXPECT_EQ(attribute(cpu, "vendor"), "GenuineIntel");
  EXPECT_EQ(attribute(cpu, "familyid"), "6");
  EXPECT_EQ(attribute(cpu, "modelid"), "143");
  // The switch is its upstream port; root port and downstream ports are no elements.
  const XmlNode& bridge = only(cpu, "pci");
  EXPECT_EQ(attribute(bridge, "busid"), "0000:11:00.0");
  EXPECT_EQ(bridge.children.size(), 3u);
  const XmlNode& pci = device(detected, "0000:13:00.0");
  EXPECT_EQ(attribute(pci, "link_speed"), "16.0 GT/s PCIe") << "the port is the slower end";
  EXPECT_EQ(attribute(pci, "link_width"), "16");
  const XmlNode& gpu = only(pci, "gpu");
  EXPECT_EQ(attribute(gpu, "dev"), "0");
  EXPECT_EQ(attribute(gpu, "sm"), "90");
  EXPECT_EQ(attribute(gpu, "gdr"), "1");
  EXPECT_EQ(attribute(only(gpu, "nvlink"), "target"), "0000:c3:00.0");
  EXPECT_EQ(attribute(only(gpu, "nvlink"), "count"), "18");
  EXPECT_EQ(attribute(only(gpu, "nvlink"), "tclass"), "0x068000");
  const XmlNode& net = only(only(device(detected, "0000:15:00.0"), "nic"), "net");
  EXPECT_EQ(attribute(net, "name"), "mlx5_2");
  EXPECT_EQ(attribute(net, "dev"), "0") << "mlx5_2 comes before mlx5_10";
  EXPECT_EQ(attribute(net, "speed"), "400000");
  EXPECT_EQ(attribute(net, "guid"), "0xf250cd0003ae6d94");
  EXPECT_EQ(attribute(net, "gdr"), "0") << "no module lends GPU memory";
  EXPECT_EQ(attribute(net, "keep"), "(none)");

  const topology::Machine machine(topology::buildTopology(detected.topology), {});
  const auto& gpus = machine.topology.of(topology::NodeType::gpu);
  ASSERT_EQ(gpus.size(), 4u);
  EXPECT_EQ(machine.path(gpus[0], gpus[3]).type, topology::PathType::nvl);
  const int port = machine.topology.of(topology::NodeType::net)[0];
  EXPECT_EQ(machine.path(port, gpus[0]).type, topology::PathType::phb) << "no GPUDirect";
  EXPECT_EQ(machine.paths.wirePath(port, gpus[0]).type, topology::PathType::pix);
}

// To list all GPUs, the driver opens those that other processes use.
TEST(Detect, ListsTheGpusOnlyIfNumbersAreMissing) {
  const FakeRoot root;
  FakeNvml nvml;
  nvml.add("0000:01:00.0");
  nvml.add("0000:02:00.0");
  DetectRequest request = requestFor(root, &nvml);
  request.gpus = {{nvml.order[1], 7, 90, 0, {}}};
  const std::string numbered = topology::writeTopologyXml(detectMachine(request).topology);
  EXPECT_NE(numbered.find("<gpu dev=\"7\""), std::string::npos) << numbered;
  EXPECT_EQ(nvml.listings, 0);
  request.gpus[0].dev = -1;
  const std::string listed = topology::writeTopologyXml(detectMachine(request).topology);
  EXPECT_NE(listed.find("<gpu dev=\"1\""), std::string::npos) << listed;
  EXPECT_EQ(nvml.listings, 1);
}

// The dump of a known virtual machine: every attribute of every device.
TEST(Detect, VirtualMachineWithHiddenBridgesAndSwitches) {
  FakeRoot root;
  FakeNvml nvml;
  root.write("proc/cpuinfo",
             "vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 207\nmodel name\t: X");
  for (const char* busId : {"0000:00:06.0", "0000:00:07.0"}) {
    root.gpu(std::string("pci0000:00/") + busId, {{"numa_node", "-1"}, {"max_link_width", "16"}});
    nvml.add(busId).links = links(18, "FFFFFFFF:FF:FF.0");
  }
  // A virtio interface: a device, but not of PCI.
  root.device("pci0000:00/0000:00:03.0", {{"class", "0x020000"}});
  root.write("sys/devices/pci0000:00/0000:00:03.0/virtio0/features", "1");
  std::filesystem::create_directories(root.path() / "sys/bus/virtio");
  root.link("sys/devices/pci0000:00/0000:00:03.0/virtio0/subsystem", "sys/bus/virtio");
  root.interface("eth0", "-1", "sys/devices/pci0000:00/0000:00:03.0/virtio0");
  root.interface("lo", "");
  root.interface("docker0", "10000");

  DetectRequest request = requestFor(root, &nvml);
  request.hostHash = 0x6cf3314b604ebb5d;
  request.gpus = {{nvml.order[0], -1, 0, 0, {}}, {nvml.order[1], -1, 0, 1, {}}};
  const Detected detected = detectMachine(request);
  EXPECT_EQ(topology::writeTopologyXml(detected.topology), R"(<system version="1">
  <cpu host_hash="0x6cf3314b604ebb5d" numaid="-1" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="207">
    <pci busid="0000:00:06.0" class="0x030200" vendor="0x10de" device="0x2335" subsystem_vendor="0x10de" subsystem_device="0x18bf" link_speed="32.0 GT/s PCIe" link_width="0">
      <gpu dev="0" sm="90" rank="0" gdr="1">
        <nvlink target="fffffff:ff:ff.0" count="18" tclass="0x068000"/>
      </gpu>
    </pci>
    <pci busid="0000:00:07.0" class="0x030200" vendor="0x10de" device="0x2335" subsystem_vendor="0x10de" subsystem_device="0x18bf" link_speed="32.0 GT/s PCIe" link_width="0">
      <gpu dev="1" sm="90" rank="1" gdr="1">
        <nvlink target="fffffff:ff:ff.0" count="18" tclass="0x068000"/>
      </gpu>
    </pci>
    <nic>
      <net name="eth0" dev="0" latency="0" speed="10000" port="0" guid="0x0" maxconn="65536" gdr="0"/>
    </nic>
  </cpu>
</system>
)");
}

TEST(Detect, PlatformFileGivesTheBridgesBack) {
  FakeRoot root;
  FakeNvml nvml;
  root.intel();
  root.gpu("pci0000:00/0000:00:06.0", {{"numa_node", "-1"}});
  nvml.add("0000:00:06.0");
  root.interface("eth0", "25000");
  root.write(kPlatformFile,
             R"(<system version="1"><cpu numaid="1" arch="x86_64"><pci busid="0000:64:00.0"
 class="0x060400" link_speed="16.0 GT/s PCIe" link_width="16"><pci busid="0000:00:06.0"
 class="0x030200" link_speed="16.0 GT/s PCIe" link_width="8"/><pci busid="0000:00:07.0"
 class="0x030200"/></pci></cpu></system>)");
  Detected detected = detectMachine(requestFor(root, &nvml));
  const XmlNode& cpu = only(detected.topology.system, "cpu");
  EXPECT_EQ(attribute(cpu, "numaid"), "1");
  EXPECT_EQ(attribute(only(only(cpu, "pci"), "pci"), "link_width"), "8") << "the file knows";
  EXPECT_EQ(only(only(cpu, "pci"), "pci").children.size(), 1u);
  EXPECT_EQ(attribute(only(only(cpu, "nic"), "net"), "speed"), "25000");
}

TEST(Detect, UserFileReplacesThePlatformsAndIsCompleted) {
  FakeRoot root;
  FakeNvml nvml;
  buildServer(root, nvml);
  root.write(kPlatformFile, "<broken");
  root.write("user.xml",
             R"(<system version="1"><cpu numaid="0"><pci busid="0000:aa:00.0"><pci
 busid="0000:13:00.0"><gpu dev="7" sm="90" rank="9" gdr="0" keep="1"/></pci></pci></cpu></system>)");
  EXPECT_THROW(detectMachine(requestFor(root, &nvml)), Error);
  DetectRequest request = requestFor(root, &nvml);
  request.topologyFile = root.path() / "user.xml";
  request.dumpFile = root.path() / "dump.xml";
  request.gpus = {{nvml.order[0], -1, 0, 2, {}}};
  Detected detected = detectMachine(request);
  const XmlNode& gpu = only(device(detected, "0000:13:00.0"), "gpu");
  EXPECT_EQ(attribute(gpu, "dev"), "0") << "numbers are this machine's";
  EXPECT_EQ(attribute(gpu, "rank"), "2");
  EXPECT_EQ(attribute(gpu, "gdr"), "0") << "what the file says stays";
  EXPECT_EQ(attribute(only(gpu, "nvlink"), "count"), "18");
  EXPECT_NO_THROW(only(device(detected, "0000:aa:00.0"), "pci"));
  EXPECT_EQ(topology::writeTopologyXml(readTopologyFile(root.path() / "dump.xml")),
            topology::writeTopologyXml(detected.topology));
}

TEST(Detect, FilesThatCannotBeUsed) {
  FakeRoot root;
  FakeNvml nvml;
  buildServer(root, nvml);
  const auto messageFor = [&](const std::filesystem::path& file,
                              const std::filesystem::path& dump) {
    DetectRequest request = requestFor(root, &nvml);
    request.topologyFile = file;
    request.dumpFile = dump;
    try {
      detectMachine(request);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  EXPECT_THAT(messageFor(root.path() / "none.xml", ""), HasSubstr("No such file"));
  EXPECT_THAT(messageFor(root.path(), ""), HasSubstr("directory"));
  EXPECT_THAT(messageFor("", root.path() / "no/folder.xml"), HasSubstr("folder.xml"));
  root.write("bad.xml", "<system version=\"1\">\n<cpu numaid=\"zero\"/>\n</system>");
  EXPECT_THAT(messageFor(root.path() / "bad.xml", ""), HasSubstr("bad.xml:2: "));
}

// Neither may block: nobody writes to the FIFO, and /dev/kmsg waits for the next message.
TEST(Detect, OnlyRegularFilesAreRead) {
  FakeRoot root;
  const std::filesystem::path fifo = root.path() / "fifo.xml", link = root.path() / "link.xml";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  std::filesystem::create_symlink("/dev/zero", link);
  for (const auto& file : {fifo, link, std::filesystem::path("/dev/zero")}) {
    EXPECT_THAT(errorOf([&] { readTopologyFile(file); }),
                HasSubstr(file.string() + " is not a regular file"));
    EXPECT_THAT(errorOf([&] { readFile(file, "NCCL_GRAPH_FILE"); }),
                HasSubstr("NCCL_GRAPH_FILE " + file.string() + " is not a regular file"));
  }
  // Only some users may open it, and containers may lack it.
  EXPECT_NE(errorOf([&] { readTopologyFile("/dev/kmsg"); }), "");
  root.write("text.xml", "text");
  std::filesystem::remove(link);
  std::filesystem::create_symlink(root.path() / "text.xml", link);
  EXPECT_EQ(readFile(link, "the file"), "text\n");
}

TEST(Detect, BrokenAttributesAreLeftOut) {
  const std::vector<std::string> broken = {
      "", "Unknown", "-1", "\x01\xff\xfe<>&\"", "99999999999999", "0x", std::string(9000, 'f')};
  for (const std::string& text : broken) {
    SCOPED_TRACE(text.substr(0, 20));
    FakeRoot root;
    FakeNvml nvml;
    root.write("proc/cpuinfo", fmt::format("vendor_id\ncpu family : {0}\nmodel :\n:::\n{0}", text));
    root.write("sys/devices/system/node/node0/cpumap", text);
    const std::map<std::string, std::string> all = {{"class", text},
                                                    {"vendor", text},
                                                    {"device", text},
                                                    {"subsystem_vendor", text},
                                                    {"subsystem_device", text},
                                                    {"max_link_speed", text},
                                                    {"max_link_width", text},
                                                    {"numa_node", text}};
    root.device("pci0000:10/0000:10:01.0", all);
    root.gpu("pci0000:10/0000:10:01.0/0000:11:00.0", all);
    nvml.add("0000:11:00.0").links = {{text, {}}, {text, {}}, {"0000:11:00.0", {}}};
    root.adapter("pci0000:20/0000:20:00.0", "mlx5_0", text);
    root.write("sys/class/infiniband/mlx5_0/ports/1/rate", text);
    Detected detected;
    ASSERT_NO_THROW(detected = detectMachine(requestFor(root, &nvml)));
    EXPECT_NO_THROW(topology::parseTopologyXml(topology::writeTopologyXml(detected.topology), "x"));
    const topology::Topology graph = topology::buildTopology(detected.topology);
    EXPECT_EQ(graph.of(topology::NodeType::gpu).size(), 1u);
    EXPECT_EQ(graph.of(topology::NodeType::net).size(), 1u);
    // A target that is not an address is hidden.
    const XmlNode& gpu = only(device(detected, "0000:11:00.0"), "gpu");
    EXPECT_EQ(attribute(only(gpu, "nvlink"), "target"), "fffffff:ff:ff.0");
    EXPECT_EQ(attribute(only(gpu, "nvlink"), "count"), "2");
  }
}

TEST(Detect, NothingOfAMachineButItsDriver) {
  FakeRoot root;
  FakeNvml nvml;
  nvml.add("0000:41:00.0");
  nvml.add("0000:42:00.0");
  nvml.known[nvml.order[0]].links = links(4, "0000:42:00.0", NvmlSource::NvLink::Remote::gpu);
  nvml.known[nvml.order[1]].links = links(3, "0000:41:00.0", NvmlSource::NvLink::Remote::gpu);
  nvml.known[nvml.order[0]].chip = {10, 45000};
  Detected detected = detectMachine(requestFor(root, &nvml));
  EXPECT_EQ(attribute(only(detected.topology.system, "cpu"), "numaid"), "-1");
  const XmlNode& gpu = only(device(detected, "0000:41:00.0"), "gpu");
  EXPECT_EQ(attribute(only(gpu, "nvlink"), "count"), "3") << "the lesser of both ends";
  EXPECT_EQ(attribute(only(gpu, "nvlink"), "tclass"), "0x030200");
  EXPECT_EQ(attribute(only(gpu, "c2c"), "bw"), "45000");
  EXPECT_THAT(detected.topology.notes,
              ::testing::Contains(HasSubstr("0000:41:00.0 is not in sysfs")));
  EXPECT_NO_THROW(topology::buildTopology(detected.topology));
}

TEST(Detect, GpusWithoutDriverAreFoundInSysfs) {
  FakeRoot root;
  root.gpu("pci0000:10/0000:10:00.0");
  root.gpu("pci0000:10/0000:10:00.1", {{"class", "0x040300"}});  // its sound device
  Detected detected = detectMachine(requestFor(root, nullptr));
  const auto gpus = topology::gpusOf(detected.topology);
  ASSERT_EQ(gpus.size(), 1u);
  EXPECT_EQ(gpus[0].sm, 0);
}

TEST(Detect, NumaIsThatOfTheDeviceOrOfWhatIsAboveIt) {
  FakeRoot root;
  FakeNvml nvml;
  root.device("pci0000:80/0000:80:01.0", {{"numa_node", "1"}});
  root.device("pci0000:80/0000:80:01.0/0000:81:00.0", {{"numa_node", "1"}});
  root.device("pci0000:80/0000:80:01.0/0000:81:00.0/0000:82:00.0", {{"numa_node", "-1"}});
  root.gpu("pci0000:80/0000:80:01.0/0000:81:00.0/0000:82:00.0/0000:83:00.0", {{"numa_node", "-1"}});
  root.gpu("pci0000:90/0000:90:00.0", {{"numa_node", "-1"}});
  nvml.add("0000:83:00.0");
  nvml.add("0000:90:00.0");
  const auto gpus = topology::gpusOf(detectMachine(requestFor(root, &nvml)).topology);
  ASSERT_EQ(gpus.size(), 2u);
  EXPECT_EQ(gpus[0].numa, 1);
  EXPECT_EQ(gpus[1].numa, -1);
}

TEST(Detect, AmdFamilyIsWordedAsInFiles) {
  FakeRoot root;
  FakeNvml nvml;
  root.write("proc/cpuinfo", "vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 1");
  root.gpu("pci0000:10/0000:10:00.0");
  nvml.add("0000:10:00.0");
  const Detected detected = detectMachine(requestFor(root, &nvml));
  EXPECT_EQ(attribute(only(detected.topology.system, "cpu"), "familyid"), "175");
}

TEST(Detect, VendorKeepsItsSpaces) {
  FakeRoot root;
  FakeNvml nvml;
  root.write("proc/cpuinfo", "vendor_id\t:   Shanghai  \ncpu family\t: 7\nmodel\t\t: 91");
  root.gpu("pci0000:10/0000:10:00.0");
  nvml.add("0000:10:00.0");
  const Detected detected = detectMachine(requestFor(root, &nvml));
  EXPECT_EQ(attribute(only(detected.topology.system, "cpu"), "vendor"), "  Shanghai  ");
  const topology::Topology built = topology::buildTopology(detected.topology);
  EXPECT_EQ(built.node(built.of(topology::NodeType::cpu).front()).cpu.vendor,
            topology::CpuVendor::zhaoxin);
}

// A superchip: the GPU is reached over the link in its package, the adapter over PCI.
TEST(Detect, GraceWithChipLinks) {
  FakeRoot root;
  FakeNvml nvml;
  root.write("proc/cpuinfo", "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f");
  root.write("sys/devices/system/node/node0/cpumap", "00ff,ffffffff,ffffffff");
  root.gpu("pci0009:00/0009:00:00.0/0009:01:00.0", {{"numa_node", "0"}});
  root.adapter("pci0000:00/0000:00:00.0", "mlx5_0", "946d:ae03:00cd:50f2");
  root.write("sys/module/nvidia_peermem/version", "1");
  nvml.add("0009:01:00.0").chip = {10, 45000};
  Detected detected = detectMachine(requestFor(root, &nvml));
  const XmlNode& cpu = only(detected.topology.system, "cpu");
  EXPECT_EQ(attribute(cpu, "arch"), "arm64");
  EXPECT_EQ(attribute(cpu, "familyid"), "(none)");
  EXPECT_EQ(attribute(cpu, "affinity"), "00ff,ffffffff,ffffffff");
  const XmlNode& chip = only(only(device(detected, "0009:01:00.0"), "gpu"), "c2c");
  EXPECT_EQ(attribute(chip, "count"), "10");

  const topology::Machine machine(topology::buildTopology(detected.topology), {});
  const int gpu = machine.topology.of(topology::NodeType::gpu)[0];
  const topology::Path& path = machine.path(gpu, machine.topology.of(topology::NodeType::cpu)[0]);
  EXPECT_EQ(path.type, topology::PathType::c2c);
  EXPECT_EQ(path.bandwidth, 450'000);
  EXPECT_EQ(machine.path(gpu, machine.topology.of(topology::NodeType::net)[0]).type,
            topology::PathType::p2c);
}

TEST(Detect, OnlyWhatWasAskedForStays) {
  FakeRoot root;
  FakeNvml nvml;
  buildServer(root, nvml);
  DetectRequest request = requestFor(root, &nvml);
  request.gpus = {{topology::parseBusId("0000:83:00.0"), -1, 0, 5, true}};
  request.ports = std::vector<NicPort>();
  const Detected detected = detectMachine(request);
  ASSERT_EQ(detected.topology.system.children.size(), 1u);
  const auto gpus = topology::gpusOf(detected.topology);
  ASSERT_EQ(gpus.size(), 1u);
  EXPECT_EQ(gpus[0].dev, 2) << "the driver's number";
  EXPECT_EQ(gpus[0].rank, 5);
}

// A container shows the driver only some of the GPUs, and numbers those from 0.
TEST(Detect, GpusThatTheDriverDoesNotListAreNumberedByTheirPlace) {
  FakeRoot root;
  FakeNvml all, own;
  buildServer(root, all);
  own.add(topology::formatBusId(all.order[2]));
  DetectRequest request = requestFor(root, &own);
  request.gpus = {{all.order[0], -1, 90, 0, {}}, {all.order[2], -1, 90, 1, {}}};
  const auto gpus = topology::gpusOf(detectMachine(request).topology);
  ASSERT_EQ(gpus.size(), 2u);
  EXPECT_EQ(gpus[0].dev, 0);
  EXPECT_EQ(gpus[1].dev, 1);
}

TEST(Detect, SeveralRanksOnOneGpuAreOneElement) {
  FakeRoot root;
  FakeNvml nvml;
  buildServer(root, nvml);
  DetectRequest request = requestFor(root, &nvml);
  request.gpus = {{nvml.order[1], -1, 0, 3, {}}, {nvml.order[1], -1, 0, 4, {}}};
  const auto gpus = topology::gpusOf(detectMachine(request).topology);
  ASSERT_EQ(gpus.size(), 1u);
  EXPECT_EQ(gpus[0].rank, 3);
  EXPECT_EQ(gpus[0].dev, 1);
}

TEST(Detect, RefusedPeers) {
  FakeRoot root;
  FakeNvml nvml;
  buildServer(root, nvml);
  nvml.refused = {{nvml.order[2], nvml.order[1]}};
  const Detected detected = detectMachine(requestFor(root, &nvml));
  EXPECT_EQ(detected.p2pRefused, (std::set<std::pair<int, int>>{{1, 2}}));
}

TEST(Detect, FabricsDifferInClusterAndClique) {
  NvmlSource::Fabric fabric;
  fabric.cluster[3] = 7;
  fabric.clique = 1;
  NvmlSource::Fabric same = fabric, cluster = fabric, clique = fabric;
  cluster.cluster[15] = 1;
  clique.clique = 1 << 24 | 1;
  EXPECT_EQ(fabric.hash(), same.hash());
  EXPECT_NE(fabric.hash(), cluster.hash());
  EXPECT_NE(fabric.hash(), clique.hash());
}

TEST(DetectPorts, StatesNamesAndGpuDirect) {
  FakeRoot root;
  root.adapter("pci0000:10/0000:10:00.0", "mlx5_0", "946d:ae03:00cd:50f2");
  root.adapter("pci0000:10/0000:11:00.0", "mlx5_1", "946d:ae03:00cd:50f3");
  root.write("sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN");
  root.interface("eth0", "100000");
  auto ports = findPorts(Sysfs(root.path()));
  ASSERT_EQ(ports.size(), 1u) << "a port that is down does not count, sockets neither";
  EXPECT_EQ(ports[0].name, "mlx5_1");
  EXPECT_FALSE(ports[0].gdr);
  root.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module 570");
  root.write("proc/sys/kernel/osrelease", "5.10.0-8");
  EXPECT_FALSE(findPorts(Sysfs(root.path()))[0].gdr) << "a kernel without DMA-BUF for adapters";
  root.write("proc/sys/kernel/osrelease", "5.12-rc");
  EXPECT_TRUE(findPorts(Sysfs(root.path()))[0].gdr);
  root.write("proc/sys/kernel/osrelease", "4.18.0");
  root.write("sys/module/nvidia_peermem/version", "1");
  EXPECT_TRUE(findPorts(Sysfs(root.path()))[0].gdr);

  root.write("sys/class/infiniband/mlx5_1/ports/1/state", "2: INIT");
  root.interface("eth1", "");
  root.interface("veth0", "10000");
  root.write("sys/class/net/veth0/master/x", "");
  root.interface("down0", "10000");
  root.write("sys/class/net/down0/operstate", "down");
  root.interface("off0", "10000");
  root.write("sys/class/net/off0/flags", "0x1002");
  root.write("sys/class/net/bonding_masters", "bond0");
  ports = findPorts(Sysfs(root.path()));
  ASSERT_EQ(ports.size(), 2u);
  EXPECT_EQ(ports[0].megabits, 100000);
  EXPECT_EQ(ports[1].name, "eth1");
  EXPECT_EQ(ports[1].guid, 1u) << "two interfaces are two adapters";
  EXPECT_EQ(ports[1].megabits, 10000) << "unknown speeds are taken for 10 Gb/s";
}

// Eight GPUs and eight adapters of a virtual machine that shows no bridges, with the file that its
// platform gives, are the machine that was dumped there.
TEST(DetectKnownMachines, PlatformFileOfEightGpus) {
  const auto platform = topology::testing::foreignTopology("h800x8-vm.virtual.xml");
  const auto dump = topology::testing::foreignTopology("h800x8-vm.detected.xml");
  if (!platform || !dump) GTEST_SKIP() << "the files are not here";
  FakeRoot root;
  FakeNvml nvml;
  root.write(kPlatformFile, topology::testing::readFile(*platform));
  root.write("proc/cpuinfo", "vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143");
  const char* const buses[] = {"65", "67", "69", "6b", "6f", "71", "73", "75"};
  for (int gpu = 0; gpu < 8; gpu++) {
    const std::string bus = std::string("0000:") + buses[gpu];
    const std::string bridge = "pci0000:" + std::string(buses[gpu]);
    root.adapter(fmt::format("{}/{}:01.0", bridge, bus), "mlx5_" + std::to_string(gpu + 1),
                 "946d:ae03:00cd:50f" + std::to_string(gpu));
    root.gpu(fmt::format("{}/{}:02.0", bridge, bus), {{"numa_node", "-1"}, {"device", "0x2324"}});
    auto& links = nvml.add(bus + ":02.0").links;
    for (int target = 1; target <= 4; target++) {
      links.insert(
          links.end(), 2,
          {"0000:6D:0" + std::to_string(target) + ".0", NvmlSource::NvLink::Remote::unknown});
    }
  }
  root.write("sys/module/nvidia_peermem/version", "1");
  const Detected detected = detectMachine(requestFor(root, &nvml));
  const topology::Topology ours = topology::buildTopology(detected.topology);
  const topology::Topology theirs = topology::buildTopology(readTopologyFile(*dump));
  ASSERT_EQ(ours.nodes.size(), theirs.nodes.size());
  for (size_t i = 0; i < ours.nodes.size(); i++) {
    const int index = static_cast<int>(i);
    SCOPED_TRACE(theirs.nameOf(index));
    EXPECT_EQ(ours.nameOf(index), theirs.nameOf(index));
    const auto& own = ours.nodes[i].links;
    const auto& other = theirs.nodes[i].links;
    ASSERT_EQ(own.size(), other.size());
    for (size_t k = 0; k < own.size(); k++) {
      EXPECT_EQ(own[k].to, other[k].to);
      EXPECT_EQ(own[k].type, other[k].type);
      EXPECT_EQ(own[k].bandwidth, other[k].bandwidth);
    }
  }
}

}  // namespace
}  // namespace unisono::detect
