// SPDX-License-Identifier: Apache-2.0
#include "transport/net/net_transport.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "transport/net/fifo_memory.h"
#include "transport/net/network_driver.h"
#include "transport/net/proxy.h"

namespace unisono::transport {
namespace {

// What the receiver of a group tells the sender, before what the network adds.
struct NetworkOffer {
  uint32_t slots, fifos;
  std::array<char, 64> network;  // its name
};

// Lines of LL128 have to arrive as one, and memory of the host is read in pieces of 64 bytes.
bool carries(device::Protocol protocol) {
  return protocol != device::Protocol::ll128;
}

// Whether the adapter of a channel accesses slots in memory of the device. Those of LL stay on the
// host, where the proxy looks at them.
bool isOnDevice(const TransportContext& context, const ConnectionGroup& group, int channel,
                const ConnectionGroup::FifoShape& fifo) {
  const auto ports = context.options.network->ports();
  if (!ports || fifo.protocol != device::Protocol::simple) return false;
  const auto port = static_cast<size_t>(choosePort(context, *ports, channel, fifo.slotBytes));
  const auto& known = context.options.direct;
  const DirectAccess access = port < known.size() ? known[port] : DirectAccess{};
  return group.sender == context.config.rank ? access.reads : access.writes;
}

// The memory of all FIFOs of one end of a group that the network carries, by channel.
std::unique_ptr<FifoMemory> memoryOf(const TransportContext& context,
                                     const ConnectionGroup& group) {
  std::vector<FifoMemory::Shape> shapes;
  for (const int channel : group.channels) {
    for (const auto& fifo : group.fifos) {
      if (!carries(fifo.protocol)) continue;
      shapes.push_back({fifo.slotBytes, fifo.protocol, isOnDevice(context, group, channel, fifo)});
    }
  }
  return std::make_unique<FifoMemory>(context.runtime, shapes, context.slots, context.own().device,
                                      context.options.deviceBytes);
}

class NetworkTransport final : public Transport {
 public:
  explicit NetworkTransport(const TransportContext& context);
  ~NetworkTransport() override { close(); }

  std::unique_ptr<PendingConnection> setup(const ConnectionGroup& group) override;
  void noteLaunch() override { proxy_.wake(); }
  void close() override { proxy_.remove(client_); }
  void drain() override {
    while (!proxy_.isDrained(client_)) {
      context_.checkState();
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }

 private:
  class Pending;

  std::vector<NetworkConnection> connect(const NetworkGroup& group, bool sends);
  std::string networkName() const { return context_.options.network->name(); }

  const TransportContext context_;
  std::vector<std::unique_ptr<FifoMemory>> memory_;
  const std::unique_ptr<Network> network_;
  Proxy& proxy_;
  const uint64_t client_;
};

// Of one end of a group.
class NetworkTransport::Pending final : public PendingConnection {
 public:
  Pending(NetworkTransport& transport, const ConnectionGroup& group, NetworkGroup ends,
          const FifoMemory& memory)
      : transport_(transport), group_(group), ends_(std::move(ends)), memory_(memory) {}

  std::vector<device::Fifo> connect() override {
    const int rank = transport_.context_.config.rank;
    const bool sends = group_.sender == rank;
    std::vector<std::string> ports;  // of each connection
    for (auto& connection : transport_.connect(ends_, sends)) {
      logInfo("rank {}: {} rank {} {}", rank, sends ? "sends to" : "receives from", ends_.peer,
              connection.name);
      ports.push_back(std::move(connection.port));
      transport_.proxy_.addStream(transport_.client_, std::move(connection.stream),
                                  {rank, {ends_.peer}, std::move(connection.name)});
    }
    std::vector<device::Fifo> fifos;
    size_t next = 0;
    for (size_t c = 0; c < group_.channels.size(); c++) {
      for (const auto& fifo : group_.fifos) {
        const bool isConnected = carries(fifo.protocol);
        fifos.push_back(isConnected ? memory_.fifoOf(next) : device::Fifo{});
        ports_.push_back(isConnected ? ports[next++] : "");
      }
    }
    return fifos;
  }
  std::string portOf(size_t fifo) const override { return ports_[fifo]; }

 private:
  NetworkTransport& transport_;
  const ConnectionGroup group_;
  const NetworkGroup ends_;
  const FifoMemory& memory_;
  std::vector<std::string> ports_;
};

NetworkTransport::NetworkTransport(const TransportContext& context)
    : context_(context),
      network_(context.options.network->makeNetwork(context_)),
      proxy_(Proxy::ofDevice(context.own().device, context.options.proxyCores,
                             context.options.ignoresOwnCores)),
      client_(proxy_.add({context.options.isIdle, context.options.fail, context.options.hasLeft})) {
}

std::unique_ptr<PendingConnection> NetworkTransport::setup(const ConnectionGroup& group) {
  std::vector<int> channels;  // of each FIFO
  for (const int channel : group.channels) {
    for (const auto& fifo : group.fifos) {
      if (carries(fifo.protocol)) channels.push_back(channel);
    }
  }
  memory_.push_back(memoryOf(context_, group));
  FifoMemory& memory = *memory_.back();
  const bool sends = group.sender == context_.config.rank;
  NetworkGroup ends{tagOf(group.purpose, false, group.sender, group.receiver),
                    sends ? group.receiver : group.sender, std::move(channels), &memory};
  if (!sends) {
    NetworkOffer offer{context_.slots, static_cast<uint32_t>(memory.fifos()), {}};
    const std::string name = networkName();
    std::copy_n(name.begin(), std::min(name.size(), offer.network.size() - 1),
                offer.network.begin());
    const auto bytes = std::as_bytes(std::span(&offer, 1));
    std::vector<std::byte> message(bytes.begin(), bytes.end());
    const std::vector<std::byte> added = network_->listen(ends);
    message.insert(message.end(), added.begin(), added.end());
    context_.bootstrap.send(group.sender, ends.tag, message);
  }
  return std::make_unique<Pending>(*this, group, std::move(ends), memory);
}

std::vector<NetworkConnection> NetworkTransport::connect(const NetworkGroup& group, bool sends) {
  if (!sends) return network_->accept(group);
  const std::vector<std::byte> message = context_.bootstrap.receive(group.peer, group.tag);
  NetworkOffer offer{};
  if (message.size() >= sizeof(offer)) std::memcpy(&offer, message.data(), sizeof(offer));
  offer.network.back() = '\0';
  const std::string own = networkName().substr(0, offer.network.size() - 1);
  if (own != offer.network.data() || offer.slots != context_.slots ||
      offer.fifos != group.memory->fifos()) {
    throw invalidUsage(
        "Ranks {} and {} differ on how they exchange data: over {} with {} slots, and over {} with "
        "{}",
        context_.config.rank, group.peer, own, context_.slots, offer.network.data(), offer.slots)
        .rank(context_.config.rank)
        .peer(group.peer)
        .remedy("Set the NCCL_* variables to the same values on all ranks");
  }
  return network_->connect(group, std::span(message).subspan(sizeof(offer)));
}

}  // namespace

size_t portOfChannel(const TransportContext& context, size_t ports, int channel) {
  const auto number = static_cast<size_t>(channel);
  const std::vector<int>& chosen = context.options.ports;
  return chosen.empty() ? number % ports : static_cast<size_t>(chosen[number % chosen.size()]);
}

int choosePort(const TransportContext& context, const std::vector<plugin::NetPort>& ports,
               int channel, uint32_t slotBytes) {
  const size_t place = portOfChannel(context, ports.size(), channel);
  const plugin::NetPort& port = ports[place];
  if (slotBytes > port.messageBytes) {
    throw invalidUsage("Slots have {} bytes, and messages through device {} of {} at most {}",
                       slotBytes, port.name, context.options.network->name(), port.messageBytes)
        .rank(context.config.rank)
        .remedy("Set NCCL_BUFFSIZE to less");
  }
  return static_cast<int>(place);
}

Error connectionTimeout(const TransportContext& context, const NetworkGroup& group,
                        double seconds) {
  return Error(ErrorCode::timeout,
               fmt::format("No network connection was made within {:.0f} s", seconds))
      .rank(context.config.rank)
      .peer(group.peer)
      .remedy(
          "Check what that rank does: it may hang, or may not make the call that this one waits "
          "in. UNISONO_BOOTSTRAP_TIMEOUT sets the limit");
}

std::unique_ptr<Transport> makeNetworkTransport(const TransportContext& context) {
  if (context.slots > device::kMaxReportedSlots) {
    throw internalError("FIFOs of {} slots cannot pass a network", context.slots);
  }
  return std::make_unique<NetworkTransport>(context);
}

}  // namespace unisono::transport
