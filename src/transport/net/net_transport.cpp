// SPDX-License-Identifier: Apache-2.0
#include "transport/net/net_transport.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/math.h"
#include "bootstrap/frame.h"
#include "bootstrap/interfaces.h"
#include "bootstrap/reactor.h"
#include "transport/net/proxy.h"

namespace unisono::transport {
namespace {

using bootstrap::Socket;
using Clock = std::chrono::steady_clock;

// Where the receiver of a group listens.
struct NetworkOffer {
  bootstrap::Address address;
  bootstrap::Secret secret;
  uint32_t slots, fifos;
};

// The first message on a connection: which FIFO of which group it is for.
struct Hello {
  uint64_t magic = kMagic;
  bootstrap::Secret secret{};
  uint64_t group = 0;  // its tag
  uint64_t fifo = 0;

  static constexpr uint64_t kMagic = 0x6f736e65746f6e75;
};

// The memory of all FIFOs of one end of a group.
class GroupMemory {
 public:
  GroupMemory(runtime::Runtime& runtime, const ConnectionGroup& group, uint32_t slots)
      : slots_(slots) {
    size_t bytes = 0;
    for (size_t c = 0; c < group.channels.size(); c++) {
      for (size_t i = 0; i < group.slotBytes.size(); i++) {
        if (!isSimple(group, i)) continue;
        slotBytes_ = group.slotBytes[i];
        bytes += strideOf();
        fifos_++;
      }
    }
    memory_ = runtime.allocatePinned(bytes);
  }

  size_t fifos() const { return fifos_; }
  StreamMemory streamOf(size_t fifo) const {
    auto* base = static_cast<std::byte*>(memory_->hostAddress()) + fifo * strideOf();
    return {reinterpret_cast<uint64_t*>(base),
            reinterpret_cast<uint64_t*>(base + device::kCounterLineBytes), base + kSlotAlignment,
            slots_, slotBytes_};
  }
  device::Fifo fifoOf(size_t fifo) const {
    auto* base = static_cast<std::byte*>(memory_->deviceAddress()) + fifo * strideOf();
    device::Fifo result{};
    result.tail = reinterpret_cast<uint64_t*>(base);
    result.head = reinterpret_cast<uint64_t*>(base + device::kCounterLineBytes);
    result.slots = base + kSlotAlignment;
    result.reportsSizes = 1;
    return result;
  }

 private:
  static constexpr size_t kSlotAlignment = 4096;
  size_t strideOf() const {
    return kSlotAlignment + roundUp(size_t{slots_} * slotBytes_, kSlotAlignment);
  }

  const uint32_t slots_;
  uint32_t slotBytes_ = 0;
  size_t fifos_ = 0;
  std::shared_ptr<runtime::PinnedMemory> memory_;
};

class NetworkTransport final : public Transport {
 public:
  explicit NetworkTransport(const TransportContext& context);
  ~NetworkTransport() override { close(); }

  std::unique_ptr<PendingConnection> setup(const ConnectionGroup& group) override;
  void noteLaunch() override { proxy_.wake(); }
  void close() override { proxy_.remove(client_); }
  void drain() override {
    while (!proxy_.isDrained(client_)) {
      check();
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }

 private:
  class Pending;

  // A connection that has not told yet what it is for.
  struct Caller {
    Socket socket;
    Clock::time_point deadline;
    std::array<std::byte, sizeof(Hello)> hello;
    size_t bytes = 0;
    std::unique_ptr<bootstrap::Stranger> stranger = std::make_unique<bootstrap::Stranger>();
  };

  uint64_t tagOfGroup(const ConnectionGroup& group) const {
    return tagOf(group.purpose, false, group.sender, group.receiver);
  }
  void check() const {
    if (context_.options.check) context_.options.check();
  }
  std::function<bool()> givesUp() const;
  void connectSender(const ConnectionGroup& group, const GroupMemory& memory);
  void connectReceiver(const ConnectionGroup& group, const GroupMemory& memory);
  void acceptCallers(std::chrono::milliseconds patience);
  bool readHello(Caller& caller);
  Socket dial(const bootstrap::Address& address, int peer);
  Proxy::Place placeOf(int peer, const bootstrap::Address& address) const {
    return {context_.config.rank, peer,
            fmt::format("to {} over {}", address.text(), interface_.name)};
  }

  const TransportContext context_;
  const std::vector<bootstrap::NetworkInterface> interfaces_ = bootstrap::listInterfaces();
  const bootstrap::NetworkInterface interface_;
  bootstrap::Listener listener_;
  const bootstrap::Secret secret_ = bootstrap::randomSecret();
  Proxy& proxy_;
  const uint64_t client_;
  std::vector<Caller> callers_;
  std::map<std::pair<uint64_t, uint64_t>, Socket> arrived_;  // by group and FIFO
  std::vector<std::unique_ptr<GroupMemory>> memory_;
};

// Of one end of a group.
class NetworkTransport::Pending final : public PendingConnection {
 public:
  Pending(NetworkTransport& transport, const ConnectionGroup& group, const GroupMemory& memory)
      : transport_(transport), group_(group), memory_(memory) {}

  std::vector<device::Fifo> connect() override {
    if (group_.sender == transport_.context_.config.rank) {
      transport_.connectSender(group_, memory_);
    } else {
      transport_.connectReceiver(group_, memory_);
    }
    std::vector<device::Fifo> fifos;
    size_t next = 0;
    for (size_t c = 0; c < group_.channels.size(); c++) {
      for (size_t i = 0; i < group_.slotBytes.size(); i++) {
        fifos.push_back(isSimple(group_, i) ? memory_.fifoOf(next++) : device::Fifo{});
      }
    }
    return fifos;
  }

 private:
  NetworkTransport& transport_;
  const ConnectionGroup group_;
  const GroupMemory& memory_;
};

NetworkTransport::NetworkTransport(const TransportContext& context)
    : context_(context),
      interface_(bootstrap::chooseInterface(interfaces_, context.options.socketInterface,
                                            bootstrap::parseFamily(context.options.socketFamily))),
      listener_(interface_.address, bootstrap::Wait(std::chrono::milliseconds(0), {})),
      proxy_(Proxy::ofDevice(context.own().device)),
      client_(proxy_.add({context.options.isIdle, context.options.fail})) {
  logInfo("rank {}: network connections are accepted at {} ({})", context_.config.rank,
          listener_.address().text(), interface_.name);
}

std::unique_ptr<PendingConnection> NetworkTransport::setup(const ConnectionGroup& group) {
  memory_.push_back(std::make_unique<GroupMemory>(context_.runtime, group, context_.slots));
  const GroupMemory& memory = *memory_.back();
  if (group.receiver == context_.config.rank) {
    const NetworkOffer offer{listener_.address(), secret_, context_.slots,
                             static_cast<uint32_t>(memory.fifos())};
    context_.bootstrap.send(group.sender, tagOfGroup(group), std::as_bytes(std::span(&offer, 1)));
  }
  return std::make_unique<Pending>(*this, group, memory);
}

std::function<bool()> NetworkTransport::givesUp() const {
  return [this] {
    check();
    return false;
  };
}

Socket NetworkTransport::dial(const bootstrap::Address& address, int peer) {
  constexpr std::chrono::seconds kLimit{60};
  const std::function<bool()> aborted = givesUp();
  int error = 0;
  auto socket = Socket::connect(
      bootstrap::localizeScope(address, interfaces_, context_.options.socketInterface),
      bootstrap::Wait(kLimit, aborted), error);
  if (!socket) {
    throw Error(ErrorCode::remoteError,
                fmt::format("The network connection to {} from {} cannot be made: {}",
                            address.text(), interface_.name, std::strerror(error)))
        .rank(context_.config.rank)
        .peer(peer)
        .remedy(
            "Check routes and firewalls between the hosts, or choose the interface with "
            "NCCL_SOCKET_IFNAME");
  }
  return std::move(*socket);
}

void NetworkTransport::connectSender(const ConnectionGroup& group, const GroupMemory& memory) {
  const int peer = group.receiver;
  const std::vector<std::byte> bytes = context_.bootstrap.receive(peer, tagOfGroup(group));
  NetworkOffer offer;
  if (bytes.size() == sizeof(offer)) std::memcpy(&offer, bytes.data(), sizeof(offer));
  if (bytes.size() != sizeof(offer) || offer.slots != context_.slots ||
      offer.fifos != memory.fifos()) {
    throw invalidUsage("Ranks {} and {} differ on how they exchange data", context_.config.rank,
                       peer)
        .rank(context_.config.rank)
        .peer(peer)
        .remedy("Set the NCCL_* variables to the same values on all ranks");
  }
  for (size_t fifo = 0; fifo < memory.fifos(); fifo++) {
    Socket socket = dial(offer.address, peer);
    acceptCallers(std::chrono::milliseconds(0));  // keeps room for those who call this rank
    const Hello hello{.secret = offer.secret, .group = tagOfGroup(group), .fifo = fifo};
    // A new connection has room for it.
    const bootstrap::Transfer sent = socket.write(std::as_bytes(std::span(&hello, 1)));
    if (sent.bytes != sizeof(hello)) {
      throw Error(ErrorCode::remoteError,
                  fmt::format("The network connection to {} was closed", offer.address.text()))
          .rank(context_.config.rank)
          .peer(peer);
    }
    proxy_.addStream(client_,
                     std::make_unique<SendStream>(std::move(socket), memory.streamOf(fifo)),
                     placeOf(peer, offer.address));
  }
}

void NetworkTransport::connectReceiver(const ConnectionGroup& group, const GroupMemory& memory) {
  const uint64_t tag = tagOfGroup(group);
  const std::function<bool()> aborted = givesUp();
  const bootstrap::Wait wait(context_.options.timeout, aborted);
  for (size_t fifo = 0; fifo < memory.fifos(); fifo++) {
    auto found = arrived_.find({tag, fifo});
    while (found == arrived_.end()) {
      check();
      if (wait.isExpired()) {
        throw Error(
            ErrorCode::timeout,
            fmt::format("No network connection was made within {:.0f} s", wait.secondsSinceStart()))
            .rank(context_.config.rank)
            .peer(group.sender)
            .remedy(
                "Check what that rank does: it may hang, or may not make the call that this one "
                "waits in. UNISONO_BOOTSTRAP_TIMEOUT sets the limit");
      }
      acceptCallers(wait.slice());
      found = arrived_.find({tag, fifo});
    }
    Socket socket = std::move(found->second);
    arrived_.erase(found);
    const bootstrap::Address address = socket.peerAddress();
    proxy_.addStream(client_,
                     std::make_unique<ReceiveStream>(std::move(socket), memory.streamOf(fifo)),
                     placeOf(group.sender, address));
  }
}

// Waits for callers and what they say.
void NetworkTransport::acceptCallers(std::chrono::milliseconds patience) {
  std::vector<pollfd> sockets{{listener_.descriptor(), POLLIN, 0}};
  for (const Caller& caller : callers_) sockets.push_back({caller.socket.descriptor(), POLLIN, 0});
  ::poll(sockets.data(), sockets.size(), static_cast<int>(patience.count()));
  const auto isDone = [this](Caller& caller) { return readHello(caller); };
  while (auto socket = listener_.accept()) {
    const bool isFull = bootstrap::Stranger::count() >= bootstrap::Stranger::max();
    if (isFull && std::erase_if(callers_, isDone) == 0 && !callers_.empty()) {
      callers_.erase(callers_.begin());
    }
    callers_.push_back({std::move(*socket), Clock::now() + bootstrap::kStrangerTimeout, {}, 0});
  }
  std::erase_if(callers_, isDone);
}

// Returns whether the caller was accepted or refused, so that it can be forgotten.
bool NetworkTransport::readHello(Caller& caller) {
  const bootstrap::Transfer read =
      caller.socket.read(std::span(caller.hello).subspan(caller.bytes));
  caller.bytes += read.bytes;
  if (caller.bytes < sizeof(Hello)) return read.closed || Clock::now() > caller.deadline;
  Hello hello;
  std::memcpy(&hello, caller.hello.data(), sizeof(hello));
  if (hello.magic != Hello::kMagic || !bootstrap::sameSecret(hello.secret, secret_)) {
    logInfo("A connection from {} that is not one of this job was closed",
            caller.socket.peerAddress().text());
    return true;
  }
  arrived_.insert_or_assign(std::pair(hello.group, hello.fifo), std::move(caller.socket));
  return true;
}

}  // namespace

std::unique_ptr<Transport> makeNetworkTransport(const TransportContext& context) {
  if (context.slots > device::kMaxReportedSlots) {
    throw internalError("FIFOs of {} slots cannot pass a network", context.slots);
  }
  return std::make_unique<NetworkTransport>(context);
}

}  // namespace unisono::transport
