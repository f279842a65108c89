// SPDX-License-Identifier: Apache-2.0
#include "detect/nvml.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "base/fnv.h"

namespace unisono::detect {

namespace {

// The part of NVML's binary interface that is used here, after its documentation. All calls
// return 0 for success.
using NvmlDevice = void*;

struct NvmlPciInfo {
  char busIdLegacy[16];
  unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
  char busId[32];
};
static_assert(sizeof(NvmlPciInfo) == 68);

struct NvmlFieldValue {
  unsigned fieldId, scopeId;
  long long timestamp, latencyMicroseconds;
  int valueType, result;
  union {
    double asDouble;
    unsigned asUnsigned;
    unsigned long long asUnsignedLong;
  } value;
};
static_assert(sizeof(NvmlFieldValue) == 40);

struct NvmlFabricInfo {
  unsigned version;
  unsigned char clusterUuid[16];
  int status;
  unsigned cliqueId;
  unsigned char state;
  unsigned healthMask;
};
static_assert(sizeof(NvmlFabricInfo) == 36);

constexpr unsigned kFabricVersion = sizeof(NvmlFabricInfo) | 2u << 24;
constexpr unsigned char kFabricComplete = 3;
constexpr unsigned kCapabilityPeer = 0;  // of NVLink: memory traffic between GPUs
constexpr int kPeerRead = 0, kPeerWrite = 1;
constexpr int kRemoteGpu = 0, kRemoteSwitch = 2;
constexpr unsigned kFieldChipLinks = 170, kFieldChipLinkStatus = 171, kFieldChipLinkSpeed = 172;
constexpr unsigned kLinksAtMost = 64;  // more than any GPU has; the driver refuses the others

class LoadedNvml final : public NvmlSource {
 public:
  LoadedNvml() = default;
  LoadedNvml(const LoadedNvml&) = delete;
  LoadedNvml& operator=(const LoadedNvml&) = delete;
  ~LoadedNvml() override {
    if (started_ && shutdown_) shutdown_();
    if (library_) dlclose(library_);
  }

  bool load(const std::string& name, std::string& problem) {
    library_ = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library_) {
      const char* text = dlerror();
      problem = text ? text : "it cannot be loaded";
      return false;
    }
    find("nvmlInit_v2", init_);
    find("nvmlShutdown", shutdown_);
    find("nvmlDeviceGetCount_v2", getCount_);
    find("nvmlDeviceGetHandleByIndex_v2", getByIndex_);
    find("nvmlDeviceGetHandleByPciBusId_v2", getByBusId_);
    find("nvmlDeviceGetIndex", getIndex_);
    find("nvmlDeviceGetPciInfo_v3", getPciInfo_);
    find("nvmlDeviceGetNvLinkState", getLinkState_);
    find("nvmlDeviceGetNvLinkRemotePciInfo_v2", getLinkRemote_);
    find("nvmlDeviceGetNvLinkCapability", getLinkCapability_);
    find("nvmlDeviceGetNvLinkRemoteDeviceType", getLinkRemoteType_);
    find("nvmlDeviceGetP2PStatus", getPeerStatus_);
    find("nvmlDeviceGetCudaComputeCapability", getCapability_);
    find("nvmlDeviceGetGpuFabricInfoV", getFabric_);
    find("nvmlDeviceGetFieldValues", getFields_);
    if (!init_ || !getByBusId_) {
      problem = "it lacks nvmlInit_v2 or nvmlDeviceGetHandleByPciBusId_v2";
      return false;
    }
    if (const int result = init_(); result != 0) {
      problem = fmt::format("nvmlInit_v2 returned {}", result);
      return false;
    }
    started_ = true;
    return true;
  }

  std::vector<topology::BusId> gpus() override {
    std::vector<topology::BusId> found;
    unsigned count = 0;
    if (!getCount_ || !getByIndex_ || !getPciInfo_ || getCount_(&count) != 0) return found;
    for (unsigned index = 0; index < count; index++) {
      NvmlDevice device = nullptr;
      NvmlPciInfo info{};
      // A GPU that fell off the bus is counted, but cannot be opened.
      if (getByIndex_(index, &device) != 0 || getPciInfo_(device, &info) != 0) continue;
      const topology::BusId id = topology::parseBusId(textOf(info));
      if (id != topology::kNoBusId) found.push_back(id);
    }
    return found;
  }

  int indexOf(topology::BusId gpu) override {
    unsigned index = 0;
    const NvmlDevice device = open(gpu);
    if (!device || !getIndex_ || getIndex_(device, &index) != 0) return -1;
    return static_cast<int>(index);
  }

  int computeCapability(topology::BusId gpu) override {
    int major = 0, minor = 0;
    const NvmlDevice device = open(gpu);
    if (!device || !getCapability_ || getCapability_(device, &major, &minor) != 0) return 0;
    return major * 10 + minor;
  }

  std::vector<NvLink> nvlinks(topology::BusId gpu) override {
    std::vector<NvLink> links;
    const NvmlDevice device = open(gpu);
    if (!device || !getLinkState_ || !getLinkRemote_ || !getLinkCapability_) return links;
    for (unsigned link = 0; link < kLinksAtMost; link++) {
      unsigned peer = 0;
      int active = 0;
      NvmlPciInfo info{};
      if (getLinkCapability_(device, link, kCapabilityPeer, &peer) != 0 || peer == 0) continue;
      if (getLinkState_(device, link, &active) != 0 || active == 0) continue;
      if (getLinkRemote_(device, link, &info) != 0) continue;
      NvLink found{textOf(info), NvLink::Remote::unknown};
      int kind = -1;
      if (getLinkRemoteType_ && getLinkRemoteType_(device, link, &kind) == 0) {
        if (kind == kRemoteGpu) found.remote = NvLink::Remote::gpu;
        if (kind == kRemoteSwitch) found.remote = NvLink::Remote::nvswitch;
      }
      links.push_back(std::move(found));
    }
    return links;
  }

  ChipLink chipLink(topology::BusId gpu) override {
    ChipLink result;
    const NvmlDevice device = open(gpu);
    unsigned links = 0;
    if (!device || !field(device, kFieldChipLinks, 0, links)) return result;
    for (unsigned link = 0; link < std::min(links, kLinksAtMost); link++) {
      unsigned up = 0, speed = 0;
      if (!field(device, kFieldChipLinkStatus, link, up) || up != 1) continue;
      if (!field(device, kFieldChipLinkSpeed, link, speed)) continue;
      ++result.count;
      result.megabytes = speed;
    }
    return result;
  }

  bool peerAllowed(topology::BusId a, topology::BusId b) override {
    const NvmlDevice first = open(a), second = open(b);
    if (!first || !second || !getPeerStatus_) return true;
    for (const int operation : {kPeerRead, kPeerWrite}) {
      int status = 0;
      if (getPeerStatus_(first, second, operation, &status) == 0 && status != 0) return false;
    }
    return true;
  }

  std::optional<Fabric> fabric(topology::BusId gpu) override {
    const NvmlDevice device = open(gpu);
    NvmlFabricInfo info{};
    info.version = kFabricVersion;
    if (!device || !getFabric_ || getFabric_(device, &info) != 0) return std::nullopt;
    if (info.state != kFabricComplete || info.status != 0) return std::nullopt;
    Fabric fabric;
    std::copy(std::begin(info.clusterUuid), std::end(info.clusterUuid), fabric.cluster.begin());
    fabric.clique = info.cliqueId;
    // A switch inside one host forms a fabric without a cluster, which joins no hosts.
    if (fabric.cluster == std::array<uint8_t, 16>{}) return std::nullopt;
    return fabric;
  }

 private:
  template <typename Function>
  void find(const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library_, name));
  }

  static std::string textOf(const NvmlPciInfo& info) {
    const char* end = std::find(std::begin(info.busId), std::end(info.busId), '\0');
    return std::string(std::begin(info.busId), end);
  }

  // The driver searches its GPUs for each number: they are asked for once.
  NvmlDevice open(topology::BusId gpu) {
    const std::lock_guard lock(mutex_);
    const auto known = opened_.find(gpu);
    if (known != opened_.end()) return known->second;
    NvmlDevice device = nullptr;
    if (getByBusId_(topology::formatBusId(gpu).c_str(), &device) != 0) return nullptr;
    return opened_[gpu] = device;
  }

  bool field(NvmlDevice device, unsigned id, unsigned scope, unsigned& value) {
    if (!getFields_) return false;
    NvmlFieldValue request{};
    request.fieldId = id;
    request.scopeId = scope;
    if (getFields_(device, 1, &request) != 0 || request.result != 0) return false;
    value = request.value.asUnsigned;
    return true;
  }

  void* library_ = nullptr;
  bool started_ = false;
  std::mutex mutex_;
  std::map<topology::BusId, NvmlDevice> opened_;
  int (*init_)() = nullptr;
  int (*shutdown_)() = nullptr;
  int (*getCount_)(unsigned*) = nullptr;
  int (*getByIndex_)(unsigned, NvmlDevice*) = nullptr;
  int (*getByBusId_)(const char*, NvmlDevice*) = nullptr;
  int (*getIndex_)(NvmlDevice, unsigned*) = nullptr;
  int (*getPciInfo_)(NvmlDevice, NvmlPciInfo*) = nullptr;
  int (*getLinkState_)(NvmlDevice, unsigned, int*) = nullptr;
  int (*getLinkRemote_)(NvmlDevice, unsigned, NvmlPciInfo*) = nullptr;
  int (*getLinkCapability_)(NvmlDevice, unsigned, unsigned, unsigned*) = nullptr;
  int (*getLinkRemoteType_)(NvmlDevice, unsigned, int*) = nullptr;
  int (*getPeerStatus_)(NvmlDevice, NvmlDevice, int, int*) = nullptr;
  int (*getCapability_)(NvmlDevice, int*, int*) = nullptr;
  int (*getFabric_)(NvmlDevice, NvmlFabricInfo*) = nullptr;
  int (*getFields_)(NvmlDevice, int, NvmlFieldValue*) = nullptr;
};

}  // namespace

uint64_t NvmlSource::Fabric::hash() const {
  Fnv hash;
  for (const uint8_t byte : cluster) hash.add(uint64_t{byte});
  hash.add(uint64_t{clique});
  return hash.value();
}

std::unique_ptr<NvmlSource> loadNvml(const std::string& library, std::string& problem) {
  auto nvml = std::make_unique<LoadedNvml>();
  if (!nvml->load(library, problem)) return nullptr;
  return nvml;
}

}  // namespace unisono::detect
