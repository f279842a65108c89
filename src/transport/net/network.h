// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bootstrap/interfaces.h"
#include "plugin/net.h"
#include "transport/net/fifo_memory.h"
#include "transport/net/stream.h"
#include "transport/transport.h"

namespace unisono::transport {

// One end of all FIFOs from one rank to another that a ConnectionGroup has on the network.
struct NetworkGroup {
  uint64_t tag;  // the same at both ends
  int peer;
  std::vector<int> ports;  // of this host, for each FIFO: modulo the number of ports that there are
  FifoMemory* memory;      // of the FIFOs; lives longer than their streams
};

struct NetworkConnection {
  std::unique_ptr<Stream> stream;
  std::string name;  // "to 192.0.2.1:80 over eth0"
  std::string port;  // of this host: "eth0"
};

// A network as one communicator uses it: makes a connection for each FIFO. Functions are called by
// one thread at a time, and may throw what TransportOptions::check does.
class Network {
 public:
  virtual ~Network() = default;
  // Of the receiver: begins to accept the connections of a group. Returns what the sender must know
  // to connect, as `offer`. Never waits.
  virtual std::vector<std::byte> listen(const NetworkGroup& group) = 0;
  // Of the sender and of the receiver: wait until all FIFOs of a group are connected. Connections
  // of other groups are accepted in between, so that no order of ranks can deadlock.
  virtual std::vector<NetworkConnection> connect(const NetworkGroup& group,
                                                 std::span<const std::byte> offer) = 0;
  virtual std::vector<NetworkConnection> accept(const NetworkGroup& group) = 0;
  // As connect(), but waits for no receiver that does not accept: returns whether all connections
  // are made. Else it is called again, with what it has left in `offer` and `connections`.
  virtual bool tryConnect(const NetworkGroup& group, std::span<std::byte> offer,
                          std::vector<NetworkConnection>& connections) {
    connections = connect(group, offer);
    return true;
  }
};

// TCP. `interfaces` are what TransportOptions::ports numbers; empty: those of the settings, with
// the hint of bootstrap::chooseInterfaces().
std::unique_ptr<Network> makeSocketNetwork(
    const TransportContext& context, const std::vector<bootstrap::NetworkInterface>& interfaces,
    const std::string& hint);
std::unique_ptr<Network> makePluginNetwork(const TransportContext& context,
                                           std::shared_ptr<const plugin::Net> net);

// The number of the port of a FIFO, as NetworkGroup has it, among `ports`. Throws
// Error(invalidUsage) if the port's messages are smaller than slots.
int choosePort(const TransportContext& context, const std::vector<plugin::NetPort>& ports,
               int number, uint32_t slotBytes);

// The end of a wait for the connections of a group.
Error connectionTimeout(const TransportContext& context, const NetworkGroup& group, double seconds);

}  // namespace unisono::transport
