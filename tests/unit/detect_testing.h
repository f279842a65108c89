// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "detect/detect.h"

// A machine's files in a temporary folder, and a driver that answers what a test wants.
namespace unisono::detect::testing {

class FakeRoot {
 public:
  FakeRoot() {
    std::string name = (std::filesystem::temp_directory_path() / "unisono-root-XXXXXX").string();
    EXPECT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
  }
  FakeRoot(const FakeRoot&) = delete;
  FakeRoot& operator=(const FakeRoot&) = delete;
  ~FakeRoot() {
    std::error_code error;
    std::filesystem::remove_all(root_, error);
  }

  const std::filesystem::path& path() const { return root_; }

  void write(const std::filesystem::path& file, const std::string& text) {
    std::filesystem::create_directories((root_ / file).parent_path());
    std::ofstream(root_ / file) << text << "\n";
  }

  void link(const std::filesystem::path& from, const std::filesystem::path& to) {
    std::filesystem::create_directories((root_ / from).parent_path());
    std::filesystem::create_symlink(
        std::filesystem::relative(root_ / to, (root_ / from).parent_path()), root_ / from);
  }

  // A PCI device at "pci0000:17/0000:17:01.0/0000:18:00.0"; an empty attribute is left out.
  void device(const std::string& place, std::map<std::string, std::string> attributes) {
    const std::filesystem::path folder = std::filesystem::path("sys/devices") / place;
    std::filesystem::create_directories(root_ / folder);
    const std::map<std::string, std::string> usual = {
        {"class", "0x060400"},          {"vendor", "0x1000"},
        {"device", "0xc010"},           {"subsystem_vendor", "0x1000"},
        {"subsystem_device", "0xa096"}, {"max_link_speed", "16.0 GT/s PCIe"},
        {"max_link_width", "16"},       {"numa_node", "0"}};
    attributes.insert(usual.begin(), usual.end());
    for (const auto& [name, text] : attributes) {
      if (!text.empty()) write(folder / name, text);
    }
    std::filesystem::create_directories(root_ / "sys/bus/pci");
    link(folder / "subsystem", "sys/bus/pci");
    link(std::filesystem::path("sys/bus/pci/devices") / folder.filename(), folder);
  }

  void gpu(const std::string& place, std::map<std::string, std::string> attributes = {}) {
    attributes.insert({{"class", "0x030200"},
                       {"vendor", "0x10de"},
                       {"device", "0x2335"},
                       {"subsystem_vendor", "0x10de"},
                       {"subsystem_device", "0x18bf"},
                       {"max_link_speed", "32.0 GT/s PCIe"}});
    device(place, std::move(attributes));
  }

  void adapter(const std::string& place, const std::string& name, const std::string& guid) {
    device(place, {{"class", "0x020700"},
                   {"vendor", "0x15b3"},
                   {"device", "0x1021"},
                   {"max_link_speed", "32.0 GT/s PCIe"}});
    const std::filesystem::path folder = std::filesystem::path("sys/class/infiniband") / name;
    write(folder / "sys_image_guid", guid);
    write(folder / "ports/1/state", "4: ACTIVE");
    write(folder / "ports/1/rate", "400 Gb/sec (4X NDR)");
    link(folder / "device", std::filesystem::path("sys/devices") / place);
  }

  void interface(const std::string& name, const std::string& speed,
                 const std::string& device = "") {
    const std::filesystem::path folder = std::filesystem::path("sys/class/net") / name;
    write(folder / "ifindex", "2");
    write(folder / "flags", "0x1003");
    write(folder / "operstate", "up");
    if (!speed.empty()) write(folder / "speed", speed);
    if (!device.empty()) link(folder / "device", device);
  }

  void intel() {
    write("proc/cpuinfo",
          "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\n"
          "model name\t: Some Processor\n\nprocessor\t: 1\nvendor_id\t: Other\nmodel\t\t: 1");
  }

 private:
  std::filesystem::path root_;
};

class FakeNvml final : public NvmlSource {
 public:
  struct Gpu {
    int sm = 90;
    std::vector<NvLink> links;
    ChipLink chip;
    std::optional<Fabric> fabric;
  };
  std::vector<topology::BusId> order;
  std::map<topology::BusId, Gpu> known;
  std::set<std::pair<topology::BusId, topology::BusId>> refused;

  Gpu& add(const std::string& busId, int sm = 90) {
    order.push_back(topology::parseBusId(busId));
    Gpu& gpu = known[order.back()];
    gpu.sm = sm;
    return gpu;
  }

  int listings = 0;  // how often all GPUs were asked for

  std::vector<topology::BusId> gpus() override {
    listings++;
    return order;
  }
  int indexOf(topology::BusId gpu) override {
    const auto at = std::ranges::find(order, gpu);
    return at == order.end() ? -1 : static_cast<int>(at - order.begin());
  }
  int computeCapability(topology::BusId gpu) override { return known[gpu].sm; }
  std::vector<NvLink> nvlinks(topology::BusId gpu) override { return known[gpu].links; }
  ChipLink chipLink(topology::BusId gpu) override { return known[gpu].chip; }
  bool peerAllowed(topology::BusId a, topology::BusId b) override {
    return !refused.contains({a, b}) && !refused.contains({b, a});
  }
  std::optional<Fabric> fabric(topology::BusId gpu) override { return known[gpu].fabric; }
};

// So many links to one place.
inline std::vector<NvmlSource::NvLink> links(
    int count, const std::string& target,
    NvmlSource::NvLink::Remote remote = NvmlSource::NvLink::Remote::unknown) {
  return std::vector<NvmlSource::NvLink>(static_cast<size_t>(count), {target, remote});
}

}  // namespace unisono::detect::testing
