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
#include "transport/net/group_ends.h"
#include "transport/net/message_forwarder.h"
#include "transport/net/network_driver.h"
#include "transport/net/proxy.h"
#include "transport/net/transfer_log.h"

namespace unisono::transport {
namespace {

// What the blocks of a forwarder are for (BlockExchange).
constexpr uint32_t kForwarded = 1 << 16;

class NetworkTransport final : public Transport {
 public:
  explicit NetworkTransport(const TransportContext& context);
  ~NetworkTransport() override { close(); }

  std::unique_ptr<PendingConnection> setup(const ConnectionGroup& group) override;
  void forwardMessages() override;
  void noteLaunch() override {
    forwarded_.noteLaunch();
    proxy_.wake();
  }
  void close() override {
    if (messages_ != nullptr) messages_->close();
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
    if (messages_ != nullptr) messages_->close();
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
            options.hasLeft, options.noteProxy};
  }
  void addObservers(const NetworkEnd& end, Stream& stream) const {
    const TransportOptions& options = context_.options;
    if (options.noteTransfer) {
      stream.addObserver(std::make_unique<TransferLog>(end, options.noteTransfer));
    }
    if (auto observer = options.observeStream ? options.observeStream(end) : nullptr) {
      stream.addObserver(std::move(observer));
    }
  }
  void offer(const ConnectionGroup& group, const NetworkGroup& ends);
  std::vector<NetworkConnection> connect(const NetworkGroup& group, bool sends);

  const TransportContext context_;
  std::vector<std::unique_ptr<FifoMemory>> memory_;
  const std::unique_ptr<Network> network_;
  Proxy& proxy_;
  ForwardedSends forwarded_;
  std::shared_ptr<Forwarder> forwarder_;        // null while this rank forwards nothing
  std::unique_ptr<MessageForwarder> messages_;  // the same for messages
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
    std::vector<NetworkEnd> observed;
    for (const int channel : group_.channels) {
      for (const auto& fifo : group_.fifos) {
        const int peer = sends ? group_.receiver : group_.sender;
        if (!fifo.isUsed()) continue;
        observed.push_back({peer, group_.messages, channel, sends, fifo.protocol});
      }
    }
    for (auto& connection : transport_.connect(ends_, sends)) {
      if (group_.forwarder >= 0) {
        connection.name += fmt::format(" through rank {} (PXN)", group_.forwarder);
      }
      const int peer = sends ? group_.receiver : group_.sender;
      logInfo("rank {}: {} rank {} {}", rank, sends ? "sends to" : "receives from", peer,
              connection.name);
      transport_.addObservers(observed.at(ports.size()), *connection.stream);
      ports.push_back(std::move(connection.port));
      // The departure of a forwarder is none of the sender.
      transport_.proxy_.addStream(transport_.client_, std::move(connection.stream),
                                  {rank, {peer}, std::move(connection.name)});
    }
    std::vector<device::Fifo> fifos;
    size_t next = 0;
    for (size_t c = 0; c < group_.channels.size(); c++) {
      for (const auto& fifo : group_.fifos) {
        const bool isConnected = fifo.isUsed();
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
    auto connections = transport_.connect(ends_, true);
    // Only now is it known where the slots are.
    const std::vector<memory::Block> blocks = memory_->blocks();
    auto& forwarder = transport_.forwarder_;
    if (forwarder == nullptr) forwarder = std::make_shared<Forwarder>(transport_.proxy_);
    addForwarded(context, transport_.proxy_, *forwarder, std::move(memory_), std::move(connections),
                 group_);
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
        if (fifo.isUsed()) protocols.push_back(fifo.protocol);
      }
    }
    std::vector<std::byte*> blocks;
    const uint64_t tag = groupTag(group_, true);
    if (group_.messages) blocks = MessageForwarder::borrow(context, group_, protocols.size() + 1);
    while (blocks.size() < protocols.size() + 1) {
      blocks.push_back(context.blocks.receive(group_.forwarder, tag, kForwarded));
    }
    std::vector<device::Fifo> fifos;
    size_t next = 0;
    for (size_t c = 0; c < group_.channels.size(); c++) {
      for (const auto& fifo : group_.fifos) {
        fifos.push_back(fifo.isUsed() ? FifoMemory::makeFifo(blocks, next++) : device::Fifo{});
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

void NetworkTransport::forwardMessages() {
  forwarder_ = std::make_shared<Forwarder>(proxy_);
  messages_ = std::make_unique<MessageForwarder>(context_, proxy_, *forwarder_);
}

std::unique_ptr<PendingConnection> NetworkTransport::setup(const ConnectionGroup& group) {
  const int rank = context_.config.rank;
  if (group.sender == rank && group.forwarder >= 0) {
    if (group.messages) MessageForwarder::ask(context_, group);
    return std::make_unique<PendingForwarded>(*this, group);
  }
  auto memory = memoryOf(context_, group);
  NetworkGroup ends = endsOf(context_, group, *memory);
  if (group.forwarder == rank) {
    return std::make_unique<PendingForwarder>(*this, group, std::move(ends), std::move(memory));
  }
  if (group.receiver == rank) offer(group, ends);
  memory_.push_back(std::move(memory));
  return std::make_unique<Pending>(*this, group, std::move(ends), *memory_.back());
}

void NetworkTransport::offer(const ConnectionGroup& group, const NetworkGroup& ends) {
  const std::vector<std::byte> message = packOffer(context_, ends, network_->listen(ends));
  if (group.messages && group.forwarder >= 0) {
    MessageForwarder::tell(context_, group, message);
  } else {
    context_.bootstrap.send(connectedRank(group), ends.tag, message);
  }
}

std::vector<NetworkConnection> NetworkTransport::connect(const NetworkGroup& group, bool sends) {
  if (!sends) return network_->accept(group);
  const std::vector<std::byte> message = context_.bootstrap.receive(group.peer, group.tag);
  return network_->connect(group, unpackOffer(context_, group, message));
}

}  // namespace

int choosePort(const TransportContext& context, const std::vector<plugin::NetPort>& ports,
               int number, uint32_t slotBytes) {
  const size_t place = static_cast<size_t>(number) % ports.size();
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
