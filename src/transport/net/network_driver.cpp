// SPDX-License-Identifier: Apache-2.0
#include "transport/net/network_driver.h"

#include <strings.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "bootstrap/interfaces.h"
#include "runtime/runtime.h"
#include "transport/net/verbs_driver.h"

namespace unisono::transport {
namespace {

class SocketDriver final : public NetworkDriver {
 public:
  SocketDriver(std::vector<bootstrap::NetworkInterface> interfaces, std::string hint)
      : interfaces_(std::move(interfaces)), hint_(std::move(hint)) {
    for (const bootstrap::NetworkInterface& interface : interfaces_) {
      ports_.push_back(portOf(interface.name, ports_.size()));
    }
  }
  std::string name() const override { return "Socket"; }
  std::optional<std::vector<plugin::NetPort>> ports() const override {
    if (ports_.empty()) return std::nullopt;
    return ports_;
  }
  std::unique_ptr<Network> makeNetwork(const TransportContext& context) const override {
    return makeSocketNetwork(context, interfaces_, hint_);
  }

 private:
  static plugin::NetPort portOf(const std::string& name, size_t number);

  const std::vector<bootstrap::NetworkInterface> interfaces_;
  const std::string hint_;  // of chooseInterfaces()
  std::vector<plugin::NetPort> ports_;
};

// With the numbers of NCCL, which takes an interface without a speed for one of 10 Gbit/s.
plugin::NetPort SocketDriver::portOf(const std::string& name, size_t number) {
  const std::filesystem::path folder = std::filesystem::path("/sys/class/net") / name;
  plugin::NetPort port;
  port.name = name;
  std::error_code error;
  const auto device = std::filesystem::canonical(folder / "device", error);
  if (!error) port.pciPath = device.string();
  port.guid = number;
  std::ifstream(folder / "speed") >> port.megabits;
  if (port.megabits <= 0) port.megabits = 10'000;
  port.connections = 65'536;
  port.messageBytes = port.collectiveBytes = std::numeric_limits<size_t>::max();
  return port;
}

// The interfaces that the search for channels chooses from. None where there is no choice, and
// where it would make no sense: a simulated machine has ports of its own.
std::vector<bootstrap::NetworkInterface> interfacesOfSearch(const Settings& settings,
                                                            bool isNamed) {
  const bool isSimulated = runtime::Runtime::get().backend() == runtime::Backend::host;
  if (isSimulated && (!isNamed || !settings.hostTopologyFile.empty())) return {};
  try {
    auto interfaces =
        bootstrap::chooseInterfaces(bootstrap::listInterfaces(), settings.socketInterface,
                                    bootstrap::parseFamily(settings.socketFamily), settings.commId);
    if (interfaces.size() == 1) interfaces.clear();
    return interfaces;
  } catch (const Error& error) {
    logInfo("Sockets cannot be used: {}", error.what());  // an error once they have to be
    return {};
  }
}

class PluginDriver final : public NetworkDriver {
 public:
  explicit PluginDriver(std::shared_ptr<const plugin::Net> net) : net_(std::move(net)) {}
  std::string name() const override { return net_->name(); }
  bool isPlugin() const override { return true; }
  std::optional<std::vector<plugin::NetPort>> ports() const override { return net_->ports(); }
  std::shared_ptr<const plugin::CollNet> openCollNet() const override {
    return plugin::CollNet::open(*net_);
  }
  std::unique_ptr<Network> makeNetwork(const TransportContext& context) const override {
    return makePluginNetwork(context, net_);
  }

 private:
  const std::shared_ptr<const plugin::Net> net_;
};

}  // namespace

std::shared_ptr<const NetworkDriver> openNetwork(const Settings& settings, const std::string& name,
                                                 const plugin::Net::Member& member) {
  if (auto net = plugin::Net::open(settings.netPlugin, name, member)) {
    return std::make_shared<PluginDriver>(std::move(net));
  }
  const bool isNamed = ::strcasecmp(name.c_str(), "IB") == 0;
  if (name.empty() || isNamed) {
    std::string problem;
    if (auto verbs = openVerbs(settings, isNamed, member.trafficClass, problem)) return verbs;
    if (isNamed) {
      throw invalidUsage("NCCL_NET or ncclConfig_t.netName asks for IB, but {}", problem)
          .remedy("Use Socket, or look at ibv_devinfo and at the NCCL_IB_* variables");
    }
    logInfo("InfiniBand and RoCE are not used: {}", problem);
  }
  return std::make_shared<SocketDriver>(interfacesOfSearch(settings, !name.empty()),
                                        settings.commId);
}

}  // namespace unisono::transport
