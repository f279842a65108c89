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
#include "transport/net/forwarding.h"
#include "transport/net/network_driver.h"
#include "transport/net/proxy.h"

namespace unisono::transport {
namespace {

// What the blocks of a forwarder are for (BlockExchange).
constexpr uint32_t kForwarded = 1 << 16;

// What the receiver of a group tells the rank that sends, before what the network adds.
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
  return group.receiver == context.config.rank ? access.writes : access.reads;
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
  const bool forwards = group.forwarder == context.config.rank;
  // What is forwarded may outlive the communicator.
  return std::make_unique<FifoMemory>(
      context.runtime, shapes, context.slots, context.own().device,
      forwards ? nullptr : context.options.deviceBytes,
      forwards ? FifoMemory::User::otherRank : FifoMemory::User::ownRank);
}

// Whose connection leads to the receiver.
int connectedRank(const ConnectionGroup& group) {
  return group.forwarder >= 0 ? group.forwarder : group.sender;
}

// One rank may send to another one directly and through forwarders, on different channels.
uint64_t groupTag(const ConnectionGroup& group, bool ofSender) {
  constexpr int kPurposeBits = 4;
  const int channel = group.forwarder >= 0 ? group.channels.front() + 1 : 0;
  return tagOf(group.purpose | static_cast<uint64_t>(channel) << kPurposeBits, ofSender,
               group.sender, group.receiver);
}

class NetworkTransport final : public Transport {
 public:
  explicit NetworkTransport(const TransportContext& context);
  ~NetworkTransport() override { close(); }

  std::unique_ptr<PendingConnection> setup(const ConnectionGroup& group) override;
  void noteLaunch() override {
    forwarded_.noteLaunch();
    proxy_.wake();
  }
  void close() override {
    proxy_.remove(client_);
    forwarded_.end(isSound() ? ForwardingPage::inOrder : ForwardingPage::byAbort);
    forwarder_.reset();
  }
  void drain() override {
    while (!proxy_.isDrained(client_) || !forwarded_.isDrained()) {
      context_.checkState();
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }
  std::shared_ptr<Service> handOver() override {
    if (forwarder_ == nullptr || !isSound()) return nullptr;
    forwarder_->leaveCommunicator();
    return std::move(forwarder_);
  }

 private:
  class Pending;
  class PendingForwarder;
  class PendingForwarded;

  // Whether the communicator has neither failed nor been aborted.
  bool isSound() const {
    try {
      context_.checkState();
      return true;
    } catch (const Error&) {
      return false;
    }
  }
  // Of the proxy, for what this rank sends and receives.
  Proxy::Client clientOf() {
    const TransportOptions& options = context_.options;
    return {[this] { return forwarded_.noteIdle(context_.options.isIdle); }, options.fail,
            options.hasLeft};
  }
  NetworkGroup endsOf(const ConnectionGroup& group, FifoMemory& memory) const;
  void offer(const ConnectionGroup& group, const NetworkGroup& ends);
  std::vector<NetworkConnection> connect(const NetworkGroup& group, bool sends);
  std::string networkName() const { return context_.options.network->name(); }

  const TransportContext context_;
  std::vector<std::unique_ptr<FifoMemory>> memory_;
  const std::unique_ptr<Network> network_;
  Proxy& proxy_;
  ForwardedSends forwarded_;
  std::shared_ptr<Forwarder> forwarder_;  // null while this rank forwards nothing
  const uint64_t client_;
};

// Of one end of a group that nobody forwards, or the receiver.
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
      if (group_.forwarder >= 0) {
        connection.name += fmt::format(" through rank {} (PXN)", group_.forwarder);
      }
      const int peer = sends ? group_.receiver : group_.sender;
      logInfo("rank {}: {} rank {} {}", rank, sends ? "sends to" : "receives from", peer,
              connection.name);
      ports.push_back(std::move(connection.port));
      // The departure of a forwarder is none of the sender.
      transport_.proxy_.addStream(transport_.client_, std::move(connection.stream),
                                  {rank, {peer}, std::move(connection.name)});
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

// Of the rank that sends for the sender.
class NetworkTransport::PendingForwarder final : public PendingConnection {
 public:
  PendingForwarder(NetworkTransport& transport, const ConnectionGroup& group, NetworkGroup ends,
                   std::unique_ptr<FifoMemory> memory)
      : transport_(transport), group_(group), ends_(std::move(ends)), memory_(std::move(memory)) {}

  std::vector<device::Fifo> connect() override {
    const TransportContext& context = transport_.context_;
    const int rank = context.config.rank;
    auto connections = transport_.connect(ends_, true);
    // Only now is it known where the slots are.
    const std::vector<memory::Block> blocks = memory_->blocks();
    auto& forwarder = transport_.forwarder_;
    if (forwarder == nullptr) forwarder = std::make_shared<Forwarder>(transport_.proxy_);
    const uint64_t client =
        forwarder->add(std::move(memory_), {{}, context.options.fail, context.options.hasLeft});
    for (auto& connection : connections) {
      connection.name += fmt::format(" for rank {} (PXN)", group_.sender);
      logInfo("rank {}: sends to rank {} {}", rank, group_.receiver, connection.name);
      transport_.proxy_.addStream(client, std::move(connection.stream),
                                  {rank, {group_.receiver}, std::move(connection.name)});
    }
    for (const memory::Block& block : blocks) {
      context.blocks.send(group_.sender, groupTag(group_, true), kForwarded, block);
    }
    return {};
  }

 private:
  NetworkTransport& transport_;
  const ConnectionGroup group_;
  const NetworkGroup ends_;
  std::unique_ptr<FifoMemory> memory_;
};

// Of the sender, for which another rank sends.
class NetworkTransport::PendingForwarded final : public PendingConnection {
 public:
  PendingForwarded(NetworkTransport& transport, const ConnectionGroup& group)
      : transport_(transport), group_(group) {}

  std::vector<device::Fifo> connect() override {
    const TransportContext& context = transport_.context_;
    std::vector<device::Protocol> protocols;
    for (size_t c = 0; c < group_.channels.size(); c++) {
      for (const auto& fifo : group_.fifos) {
        if (carries(fifo.protocol)) protocols.push_back(fifo.protocol);
      }
    }
    std::vector<std::byte*> blocks;
    while (blocks.size() < protocols.size() + 1) {
      blocks.push_back(
          context.blocks.receive(group_.forwarder, groupTag(group_, true), kForwarded));
    }
    std::vector<device::Fifo> fifos;
    size_t next = 0;
    for (size_t c = 0; c < group_.channels.size(); c++) {
      for (const auto& fifo : group_.fifos) {
        fifos.push_back(carries(fifo.protocol) ? FifoMemory::makeFifo(blocks, next++)
                                               : device::Fifo{});
      }
    }
    transport_.forwarded_.add(blocks, protocols, context.slots);
    logInfo("rank {}: sends to rank {} through rank {} (PXN)", context.config.rank, group_.receiver,
            group_.forwarder);
    return fifos;
  }
  std::string portOf(size_t) const override {
    return fmt::format("PXN, rank {}", group_.forwarder);
  }

 private:
  NetworkTransport& transport_;
  const ConnectionGroup group_;
};

NetworkTransport::NetworkTransport(const TransportContext& context)
    : context_(context),
      network_(context.options.network->makeNetwork(context_)),
      proxy_(Proxy::ofDevice(context.own().device, context.options.proxyCores,
                             context.options.ignoresOwnCores)),
      client_(proxy_.add(clientOf())) {}

NetworkGroup NetworkTransport::endsOf(const ConnectionGroup& group, FifoMemory& memory) const {
  std::vector<int> channels;  // of each FIFO
  for (const int channel : group.channels) {
    for (const auto& fifo : group.fifos) {
      if (carries(fifo.protocol)) channels.push_back(channel);
    }
  }
  const bool receives = group.receiver == context_.config.rank;
  return {groupTag(group, false), receives ? connectedRank(group) : group.receiver,
          std::move(channels), &memory};
}

std::unique_ptr<PendingConnection> NetworkTransport::setup(const ConnectionGroup& group) {
  const int rank = context_.config.rank;
  if (group.sender == rank && group.forwarder >= 0) {
    return std::make_unique<PendingForwarded>(*this, group);
  }
  auto memory = memoryOf(context_, group);
  NetworkGroup ends = endsOf(group, *memory);
  if (group.forwarder == rank) {
    return std::make_unique<PendingForwarder>(*this, group, std::move(ends), std::move(memory));
  }
  if (group.receiver == rank) offer(group, ends);
  memory_.push_back(std::move(memory));
  return std::make_unique<Pending>(*this, group, std::move(ends), *memory_.back());
}

void NetworkTransport::offer(const ConnectionGroup& group, const NetworkGroup& ends) {
  NetworkOffer offer{context_.slots, static_cast<uint32_t>(ends.memory->fifos()), {}};
  const std::string name = networkName();
  std::copy_n(name.begin(), std::min(name.size(), offer.network.size() - 1), offer.network.begin());
  const auto bytes = std::as_bytes(std::span(&offer, 1));
  std::vector<std::byte> message(bytes.begin(), bytes.end());
  const std::vector<std::byte> added = network_->listen(ends);
  message.insert(message.end(), added.begin(), added.end());
  context_.bootstrap.send(connectedRank(group), ends.tag, message);
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
