// SPDX-License-Identifier: Apache-2.0
#include "transport/net/network_driver.h"

#include <strings.h>

#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "transport/net/verbs_driver.h"

namespace unisono::transport {
namespace {

class SocketDriver final : public NetworkDriver {
 public:
  std::string name() const override { return "Socket"; }
  std::unique_ptr<Network> makeNetwork(const TransportContext& context) const override {
    return makeSocketNetwork(context);
  }
};

class PluginDriver final : public NetworkDriver {
 public:
  explicit PluginDriver(std::shared_ptr<const plugin::Net> net) : net_(std::move(net)) {}
  std::string name() const override { return net_->name(); }
  bool joinsSimulatedHosts() const override { return true; }
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
  return std::make_shared<SocketDriver>();
}

}  // namespace unisono::transport
