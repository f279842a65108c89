// SPDX-License-Identifier: Apache-2.0
#include <poll.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <map>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "bootstrap/frame.h"
#include "bootstrap/interfaces.h"
#include "bootstrap/reactor.h"
#include "transport/net/network.h"
#include "transport/net/socket_stream.h"

namespace unisono::transport {
namespace {

using bootstrap::Socket;
using Clock = std::chrono::steady_clock;

// Where the receiver of a group listens for a FIFO: the receiver chooses the port.
struct SocketOffer {
  bootstrap::Address address;
  bootstrap::Secret secret;
  LaneCounts lanes;
};

// The first message on a socket: which FIFO of which group it is for.
struct Hello {
  uint64_t magic = kMagic;
  bootstrap::Secret secret{};
  uint64_t group = 0;  // its tag
  uint32_t fifo = 0;
  uint32_t socket = 0;  // 0: the first one, then the lanes

  static constexpr uint64_t kMagic = 0x6f736e65746f6e75;
};

class SocketNetwork final : public Network {
 public:
  SocketNetwork(const TransportContext& context,
                const std::vector<bootstrap::NetworkInterface>& interfaces,
                const std::string& hint);

  std::vector<std::byte> listen(const NetworkGroup& group) override;
  std::vector<NetworkConnection> connect(const NetworkGroup& group,
                                         std::span<const std::byte> offer) override;
  std::vector<NetworkConnection> accept(const NetworkGroup& group) override;

 private:
  // A connection that has not told yet what it is for.
  struct Caller {
    Socket socket;
    Clock::time_point deadline;
    std::array<std::byte, sizeof(Hello)> hello;
    size_t bytes = 0;
    std::unique_ptr<bootstrap::Stranger> stranger = std::make_unique<bootstrap::Stranger>();
  };

  std::function<bool()> givesUp() const;
  void acceptCallers(std::chrono::milliseconds patience);
  bool readHello(Caller& caller);
  // An interface over which this rank accepts connections.
  struct Port {
    bootstrap::NetworkInterface interface;
    bootstrap::Listener listener;
    LaneCounts lanes;  // of connections that are accepted
  };

  Socket dial(const bootstrap::Address& address, int peer);
  Socket call(const SocketOffer& offer, int peer, uint64_t group, uint32_t fifo, uint32_t socket);
  Socket waitFor(const NetworkGroup& group, uint32_t fifo, uint32_t socket,
                 const bootstrap::Wait& wait);
  std::string interfaceOf(const Socket& socket) const;
  const Port& portOfFifo(const NetworkGroup& group, size_t fifo) const;

  const TransportContext& context_;
  const std::vector<bootstrap::NetworkInterface> interfaces_ = bootstrap::listInterfaces();
  std::vector<Port> ports_;
  const bootstrap::Secret secret_ = bootstrap::randomSecret();
  std::vector<Caller> callers_;
  std::map<std::tuple<uint64_t, uint32_t, uint32_t>, Socket> arrived_;  // by group, FIFO, socket
};

// The PCI vendor of an interface; empty for a virtual one.
std::string vendorOf(const std::string& interface) {
  std::string vendor;
  std::ifstream("/sys/class/net/" + interface + "/device/vendor") >> vendor;
  return vendor;
}

SocketNetwork::SocketNetwork(const TransportContext& context,
                             const std::vector<bootstrap::NetworkInterface>& interfaces,
                             const std::string& hint)
    : context_(context) {
  const TransportOptions& options = context.options;
  for (const bootstrap::NetworkInterface& interface :
       interfaces.empty()
           ? bootstrap::chooseInterfaces(interfaces_, options.socketInterface,
                                         bootstrap::parseFamily(options.socketFamily), hint)
           : interfaces) {
    Port& port = ports_.emplace_back();
    port.interface = interface;
    port.listener =
        bootstrap::Listener(interface.address, bootstrap::Wait(std::chrono::milliseconds(0), {}));
    port.lanes =
        chooseLanes(options.socketThreads, options.socketsPerThread, vendorOf(interface.name));
    logInfo(
        "rank {}: network connections are accepted at {} ({}), each with {} threads and {} more "
        "sockets",
        context_.config.rank, port.listener.address().text(), interface.name, port.lanes.threads,
        port.lanes.sockets);
  }
}

const SocketNetwork::Port& SocketNetwork::portOfFifo(const NetworkGroup& group, size_t fifo) const {
  return ports_[static_cast<size_t>(group.ports[fifo]) % ports_.size()];
}

std::vector<std::byte> SocketNetwork::listen(const NetworkGroup& group) {
  std::vector<std::byte> offers;
  for (size_t fifo = 0; fifo < group.memory->fifos(); fifo++) {
    const Port& port = portOfFifo(group, fifo);
    const SocketOffer offer{port.listener.address(), secret_, port.lanes};
    const auto bytes = std::as_bytes(std::span(&offer, 1));
    offers.insert(offers.end(), bytes.begin(), bytes.end());
  }
  return offers;
}

// By the address of this rank, as routes decide which interface is used.
std::string SocketNetwork::interfaceOf(const Socket& socket) const {
  const bootstrap::Address own = socket.localAddress();
  const auto interface = std::ranges::find_if(
      interfaces_, [&](const auto& candidate) { return candidate.address.sameHostPart(own); });
  return interface == interfaces_.end() ? own.text() : interface->name;
}

std::function<bool()> SocketNetwork::givesUp() const {
  return [this] {
    context_.checkState();
    return false;
  };
}

// Tries again for a while where an error may pass: no data are lost yet.
Socket SocketNetwork::dial(const bootstrap::Address& address, int peer) {
  constexpr std::chrono::seconds kLongestRetry{5};
  constexpr std::chrono::milliseconds kPause{100};
  const std::function<bool()> aborted = givesUp();
  const bootstrap::Address target =
      bootstrap::localizeScope(address, interfaces_, context_.options.socketInterface);
  const auto start = Clock::now();
  for (;;) {
    int error = 0;
    auto socket =
        Socket::connect(target, bootstrap::Wait(context_.options.networkTimeout, aborted), error);
    if (socket) return std::move(*socket);
    const bool mayPass = error == ECONNREFUSED || error == ECONNRESET || error == EHOSTUNREACH ||
                         error == ENETUNREACH || error == ENETDOWN;
    if (!mayPass || Clock::now() - start > kLongestRetry) {
      throw Error(ErrorCode::remoteError,
                  fmt::format("The network connection to {} cannot be made: {}", address.text(),
                              std::strerror(error)))
          .rank(context_.config.rank)
          .peer(peer)
          .remedy(
              "Check routes and firewalls between the hosts, or choose the interface with "
              "NCCL_SOCKET_IFNAME");
    }
    context_.checkState();
    acceptCallers(kPause);
  }
}

// Slots of lines are small.
uint32_t lanesOf(const StreamMemory& memory, const LaneCounts& lanes) {
  return memory.protocol == device::Protocol::ll ? 0 : lanes.sockets;
}

std::string nameOf(const Socket& socket, const std::string& port) {
  return fmt::format("to {} over {}", socket.peerAddress().text(), port);
}

// Makes one socket of a connection.
Socket SocketNetwork::call(const SocketOffer& offer, int peer, uint64_t group, uint32_t fifo,
                           uint32_t socket) {
  Socket result = dial(offer.address, peer);
  limitSilence(result, context_.options.networkTimeout);
  acceptCallers(std::chrono::milliseconds(0));  // keeps room for those who call this rank
  const Hello hello{.secret = offer.secret, .group = group, .fifo = fifo, .socket = socket};
  // A new connection has room for it.
  const bootstrap::Transfer sent = result.write(std::as_bytes(std::span(&hello, 1)));
  if (sent.bytes != sizeof(hello)) {
    throw Error(ErrorCode::remoteError,
                fmt::format("The network connection to {} was closed", offer.address.text()))
        .rank(context_.config.rank)
        .peer(peer)
        .remedy("Look for the first error in the output of that rank");
  }
  return result;
}

std::vector<NetworkConnection> SocketNetwork::connect(const NetworkGroup& group,
                                                      std::span<const std::byte> bytes) {
  std::vector<SocketOffer> offers(bytes.size() / sizeof(SocketOffer));
  if (bytes.size() != group.memory->fifos() * sizeof(SocketOffer)) {
    throw internalError("An offer of {} FIFOs has {} bytes", group.memory->fifos(), bytes.size());
  }
  std::memcpy(offers.data(), bytes.data(), bytes.size());
  std::vector<NetworkConnection> connections;
  for (uint32_t fifo = 0; fifo < group.memory->fifos(); fifo++) {
    const SocketOffer& offer = offers[fifo];
    StreamSockets sockets{call(offer, group.peer, group.tag, fifo, 0),
                          {},
                          offer.lanes.threads,
                          context_.options.networkTimeout,
                          context_.options.proxyCores,
                          context_.options.ignoresOwnCores};
    for (uint32_t i = 1; i <= lanesOf(group.memory->streamOf(fifo), offer.lanes); i++) {
      sockets.lanes.push_back(call(offer, group.peer, group.tag, fifo, i));
    }
    std::string port = interfaceOf(sockets.first);
    std::string name = nameOf(sockets.first, port);
    connections.push_back(
        {std::make_unique<SendStream>(std::move(sockets), group.memory->streamOf(fifo)),
         std::move(name), std::move(port)});
  }
  return connections;
}

// Waits until the sender of a group has made a socket.
Socket SocketNetwork::waitFor(const NetworkGroup& group, uint32_t fifo, uint32_t socket,
                              const bootstrap::Wait& wait) {
  const std::tuple key(group.tag, fifo, socket);
  auto found = arrived_.find(key);
  while (found == arrived_.end()) {
    context_.checkState();
    if (wait.isExpired()) throw connectionTimeout(context_, group, wait.secondsSinceStart());
    acceptCallers(wait.slice());
    found = arrived_.find(key);
  }
  Socket result = std::move(arrived_.extract(found).mapped());
  limitSilence(result, context_.options.networkTimeout);
  return result;
}

std::vector<NetworkConnection> SocketNetwork::accept(const NetworkGroup& group) {
  const std::function<bool()> aborted = givesUp();
  const bootstrap::Wait wait(context_.options.timeout, aborted);
  std::vector<NetworkConnection> connections;
  for (uint32_t fifo = 0; fifo < group.memory->fifos(); fifo++) {
    const LaneCounts& lanes = portOfFifo(group, fifo).lanes;
    StreamSockets sockets{waitFor(group, fifo, 0, wait),
                          {},
                          lanes.threads,
                          context_.options.networkTimeout,
                          context_.options.proxyCores,
                          context_.options.ignoresOwnCores};
    for (uint32_t i = 1; i <= lanesOf(group.memory->streamOf(fifo), lanes); i++) {
      sockets.lanes.push_back(waitFor(group, fifo, i, wait));
    }
    std::string port = interfaceOf(sockets.first);
    std::string name = nameOf(sockets.first, port);
    connections.push_back(
        {std::make_unique<ReceiveStream>(std::move(sockets), group.memory->streamOf(fifo)),
         std::move(name), std::move(port)});
  }
  return connections;
}

// Waits for callers and what they say.
void SocketNetwork::acceptCallers(std::chrono::milliseconds patience) {
  std::vector<pollfd> sockets;
  for (const Port& port : ports_) sockets.push_back({port.listener.descriptor(), POLLIN, 0});
  for (const Caller& caller : callers_) sockets.push_back({caller.socket.descriptor(), POLLIN, 0});
  ::poll(sockets.data(), sockets.size(), static_cast<int>(patience.count()));
  const auto isDone = [this](Caller& caller) { return readHello(caller); };
  for (const Port& port : ports_) {
    while (auto socket = port.listener.accept()) {
      const bool isFull = bootstrap::Stranger::count() >= bootstrap::Stranger::max();
      if (isFull && std::erase_if(callers_, isDone) == 0 && !callers_.empty()) {
        callers_.erase(callers_.begin());
      }
      callers_.push_back({std::move(*socket), Clock::now() + bootstrap::kStrangerTimeout, {}, 0});
    }
  }
  std::erase_if(callers_, isDone);
}

// Returns whether the caller was accepted or refused, so that it can be forgotten.
bool SocketNetwork::readHello(Caller& caller) {
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
  arrived_.insert_or_assign(std::tuple(hello.group, hello.fifo, hello.socket),
                            std::move(caller.socket));
  return true;
}

}  // namespace

std::unique_ptr<Network> makeSocketNetwork(
    const TransportContext& context, const std::vector<bootstrap::NetworkInterface>& interfaces,
    const std::string& hint) {
  return std::make_unique<SocketNetwork>(context, interfaces, hint);
}

}  // namespace unisono::transport
