// SPDX-License-Identifier: Apache-2.0
#include "runtime/host/devices.h"

#include <pugixml.hpp>

#include <algorithm>
#include <cctype>
#include <climits>
#include <cstring>
#include <set>

#include "base/error.h"
#include "base/math.h"

namespace unisono::runtime::host {
namespace {

constexpr int kMaxDevices = 1024;
constexpr int kDefaultCapability = 90;

DeviceProperties propertiesOf(std::string busId, int computeCapability) {
  DeviceProperties properties;
  properties.name = "Unisono simulated GPU";
  properties.busId = std::move(busId);
  properties.computeCapability = computeCapability;
  properties.multiprocessors = multiprocessorsOf(computeCapability);
  uint64_t state = 0;
  for (char letter : properties.busId) {
    state = mix64(state + static_cast<unsigned char>(letter) + 1);
  }
  for (size_t i = 0; i < properties.uuid.size(); i += sizeof(uint64_t)) {
    uint64_t part = splitMix64(state);
    std::memcpy(properties.uuid.data() + i, &part, sizeof(part));
  }
  return properties;
}

std::vector<DeviceProperties> readTopology(const std::string& file) {
  pugi::xml_document document;
  pugi::xml_parse_result parsed = document.load_file(file.c_str());
  if (!parsed) {
    throw invalidArgument("UNISONO_HOST_TOPOLOGY: {} cannot be read: {}{}", file,
                          parsed.description(),
                          parsed.offset > 0 ? fmt::format(" at byte {}", parsed.offset) : "")
        .remedy("Name a readable topology file, or unset UNISONO_HOST_TOPOLOGY");
  }
  struct Found {
    int ordinal;
    DeviceProperties properties;
  };
  std::vector<Found> found;
  std::set<std::string> busIds;
  for (pugi::xpath_node match : document.select_nodes("//gpu")) {
    pugi::xml_node gpu = match.node();
    std::string busId = gpu.parent().attribute("busid").as_string();
    if (std::strcmp(gpu.parent().name(), "pci") != 0 || busId.empty()) {
      throw invalidArgument("UNISONO_HOST_TOPOLOGY: {}: a <gpu> is not inside a <pci busid=...>",
                            file);
    }
    std::transform(busId.begin(), busId.end(), busId.begin(),
                   [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
    if (!busIds.insert(busId).second) {
      throw invalidArgument("UNISONO_HOST_TOPOLOGY: {}: two GPUs have bus id {}", file, busId);
    }
    int capability = gpu.attribute("sm").as_int(kDefaultCapability);
    int ordinal = gpu.attribute("dev").as_int(INT_MAX);
    found.push_back({ordinal, propertiesOf(busId, capability)});
  }
  if (found.empty()) {
    throw invalidArgument("UNISONO_HOST_TOPOLOGY: {} has no <gpu>", file)
        .remedy("Name a topology file of a machine with GPUs");
  }
  // The order of the file where `dev` does not say otherwise.
  std::stable_sort(found.begin(), found.end(),
                   [](const Found& a, const Found& b) { return a.ordinal < b.ordinal; });
  std::vector<DeviceProperties> devices;
  for (Found& one : found) devices.push_back(std::move(one.properties));
  return devices;
}

}  // namespace

std::vector<DeviceProperties> simulatedDevices(const Settings& settings) {
  if (!settings.hostTopologyFile.empty()) return readTopology(settings.hostTopologyFile);
  if (settings.hostDevices < 1 || settings.hostDevices > kMaxDevices) {
    throw invalidArgument("UNISONO_HOST_DEVICES={} is not from 1 to {}", settings.hostDevices,
                          kMaxDevices);
  }
  std::vector<DeviceProperties> devices;
  for (int i = 0; i < static_cast<int>(settings.hostDevices); i++) {
    // One device per bus, from 0000:01:00.0 on; the next domain follows the last bus.
    devices.push_back(
        propertiesOf(fmt::format("{:04x}:{:02x}:00.0", i / 255, i % 255 + 1), kDefaultCapability));
  }
  return devices;
}

}  // namespace unisono::runtime::host
