// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/settings.h"
#include "plugin/collnet.h"
#include "plugin/net.h"
#include "transport/net/network.h"

namespace unisono::transport {

// A kind of network that a communicator has opened: sockets, verbs or a net plug-in.
class NetworkDriver {
 public:
  NetworkDriver() = default;
  virtual ~NetworkDriver() = default;
  NetworkDriver(const NetworkDriver&) = delete;
  NetworkDriver& operator=(const NetworkDriver&) = delete;

  // What all ranks must agree on: "Socket", "IB", or a plug-in with its version.
  virtual std::string name() const = 0;
  // Simulated hosts of one machine use a plug-in although the user has not named it.
  virtual bool isPlugin() const { return false; }
  // What TransportOptions::ports numbers; nothing: the topology has the ports of the machine, and
  // channels take what the network has in turn.
  virtual std::optional<std::vector<plugin::NetPort>> ports() const { return std::nullopt; }
  // Opens its CollNet plug-in; null without one.
  virtual std::shared_ptr<const plugin::CollNet> openCollNet() const { return nullptr; }
  virtual std::unique_ptr<Network> makeNetwork(const TransportContext& context) const = 0;
};

// Opens the network called `name` or, if that is empty, the first that can be used: a net plug-in,
// verbs, sockets. Throws Error(invalidUsage) where the one that is named cannot be used.
std::shared_ptr<const NetworkDriver> openNetwork(const Settings& settings, const std::string& name,
                                                 const plugin::Net::Member& member);

}  // namespace unisono::transport
