// SPDX-License-Identifier: Apache-2.0
#include "detect/nics.h"

#include <charconv>

namespace unisono::detect {

namespace {

constexpr long long kUnknownSocketMegabits = 10'000;
constexpr double kMostMegabits = 1e9;  // a port that says more says nothing
constexpr long long kSocketConnections = 65536;
constexpr uint64_t kInterfaceUp = 1;  // IFF_UP

// "946d:ae03:00cd:50f2". The bytes are turned around: files give the number as the adapter's
// big-endian words look to a little-endian processor.
uint64_t parseGuid(std::string_view text) {
  std::string digits;
  for (const char c : text) {
    if (c != ':') digits += c;
  }
  uint64_t value = 0;
  const auto [end, error] =
      std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
  if (digits.size() != 16 || error != std::errc() || end != digits.data() + digits.size()) return 0;
  return __builtin_bswap64(value);
}

// "5.15.0-91-generic" is at least 5.12, the first kernel that lends memory to adapters (DMA-BUF).
bool kernelLendsMemory(std::string_view release) {
  const auto major = leadingNumber(release.substr(0, release.find('.')));
  const size_t point = release.find('.');
  if (!major || point == std::string_view::npos) return false;
  std::string_view rest = release.substr(point + 1);
  rest = rest.substr(0, rest.find_first_not_of("0123456789"));
  const auto minor = parseInteger(rest);
  return *major > 5 || (*major == 5 && minor && *minor >= 12);
}

// Whether adapters can reach GPU memory: by NVIDIA's module for it, or by DMA-BUF, which needs
// the driver's open kernel modules.
bool hasGpuDirect(const Sysfs& sysfs) {
  if (Sysfs::exists(sysfs.at("sys/module/nvidia_peermem")) ||
      Sysfs::exists(sysfs.at("sys/kernel/mm/memory_peers/nv_mem/version"))) {
    return true;
  }
  const auto driver = Sysfs::attribute(sysfs.at("proc/driver/nvidia"), "version");
  const auto release = Sysfs::attribute(sysfs.at("proc/sys/kernel"), "osrelease");
  return driver && driver->find("Open Kernel Module") != std::string::npos && release &&
         kernelLendsMemory(*release);
}

long long knownSpeed(double megabits) {
  return megabits > 0 && megabits <= kMostMegabits ? static_cast<long long>(megabits) : 0;
}

std::vector<NicPort> findRdmaPorts(const Sysfs& sysfs) {
  std::vector<NicPort> ports;
  const bool gdr = hasGpuDirect(sysfs);
  const auto all = sysfs.at("sys/class/infiniband");
  for (const std::string& name : Sysfs::list(all)) {
    const auto adapter = all / name;
    for (const std::string& number : Sysfs::list(adapter / "ports")) {
      const auto folder = adapter / "ports" / number;
      const auto state = Sysfs::attribute(folder, "state");  // "4: ACTIVE"
      if (!state || state->find("ACTIVE") == std::string::npos) continue;
      NicPort port;
      port.name = name;
      port.dev = static_cast<int>(ports.size());
      if (const auto device = Sysfs::resolve(adapter / "device")) port.device = *device;
      // "400 Gb/sec (4X NDR)"
      if (const auto rate = Sysfs::attribute(folder, "rate")) {
        port.megabits = knownSpeed(leadingNumber(*rate).value_or(0) * 1000);
      }
      port.port = static_cast<int>(parseInteger(number).value_or(1));
      if (const auto guid = Sysfs::attribute(adapter, "sys_image_guid")) {
        port.guid = parseGuid(*guid);
      }
      if (port.guid == 0) {
        if (const auto guid = Sysfs::attribute(adapter, "node_guid")) port.guid = parseGuid(*guid);
      }
      port.gdr = gdr;
      ports.push_back(std::move(port));
    }
  }
  return ports;
}

bool isUp(const std::filesystem::path& interface) {
  if (const auto flags = Sysfs::attribute(interface, "flags")) {
    uint64_t value = 0;
    const std::string_view digits = std::string_view(*flags).substr(flags->starts_with("0x") * 2);
    std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
    if (!(value & kInterfaceUp)) return false;
  }
  // "unknown" is what interfaces say that do not keep track of it.
  const auto state = Sysfs::attribute(interface, "operstate");
  return !state || (*state != "down" && *state != "notpresent" && *state != "lowerlayerdown");
}

std::vector<NicPort> findSocketPorts(const Sysfs& sysfs) {
  std::vector<NicPort> ports;
  const auto all = sysfs.at("sys/class/net");
  for (const std::string& name : Sysfs::list(all)) {
    const auto interface = all / name;
    if (!Sysfs::exists(interface / "ifindex") && !Sysfs::exists(interface / "address")) continue;
    if (name == "lo" || name.starts_with("docker") || Sysfs::exists(interface / "master") ||
        !isUp(interface)) {
      continue;
    }
    NicPort port;
    port.name = name;
    port.dev = static_cast<int>(ports.size());
    port.guid = static_cast<uint64_t>(port.dev);  // as in NCCL's files
    if (const auto device = Sysfs::resolve(interface / "device")) port.device = *device;
    const auto speed = Sysfs::attribute(interface, "speed");
    port.megabits = speed ? knownSpeed(leadingNumber(*speed).value_or(0)) : 0;
    if (port.megabits <= 0) port.megabits = kUnknownSocketMegabits;
    port.connections = kSocketConnections;
    ports.push_back(std::move(port));
  }
  return ports;
}

}  // namespace

std::vector<NicPort> findPorts(const Sysfs& sysfs) {
  std::vector<NicPort> ports = findRdmaPorts(sysfs);
  return ports.empty() ? findSocketPorts(sysfs) : ports;
}

}  // namespace unisono::detect
