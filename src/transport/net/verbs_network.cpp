// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "transport/net/slot_registration.h"
#include "transport/net/verbs_driver.h"
#include "transport/net/verbs_stream.h"

namespace unisono::transport {
namespace {

const char* nameOfLinks(bool isEthernet) {
  return isEthernet ? "RoCE" : "InfiniBand";
}

class VerbsDriver final : public NetworkDriver {
 public:
  VerbsDriver(std::vector<VerbsPort> ports, const VerbsOptions& options)
      : verbsPorts_(std::move(ports)), options_(options) {}
  std::string name() const override { return "IB"; }
  std::optional<std::vector<plugin::NetPort>> ports() const override {
    std::vector<plugin::NetPort> facts;
    for (const VerbsPort& port : verbsPorts_) facts.push_back(port.facts);
    return facts;
  }
  std::unique_ptr<Network> makeNetwork(const TransportContext& context) const override;

 private:
  const std::vector<VerbsPort> verbsPorts_;
  const VerbsOptions options_;
};

// Endpoints go over the bootstrap connections of the ranks, which refuse strangers.
class VerbsNetwork final : public Network {
 public:
  VerbsNetwork(const TransportContext& context, std::vector<VerbsPort> ports,
               const VerbsOptions& options)
      : context_(context), ports_(std::move(ports)), options_(options) {
    for (const VerbsPort& port : ports_) facts_.push_back(port.facts);
  }

  std::vector<std::byte> listen(const NetworkGroup& group) override;
  std::vector<NetworkConnection> connect(const NetworkGroup& group,
                                         std::span<const std::byte> offer) override;
  std::vector<NetworkConnection> accept(const NetworkGroup& group) override;

 private:
  const VerbsPort& portOf(const NetworkGroup& group, size_t fifo) const {
    const int port = choosePort(context_, facts_, group.ports[fifo], group.memory->slotBytes(fifo));
    return ports_[static_cast<size_t>(port)];
  }
  template <typename Make>
  auto make(const NetworkGroup& group, Make make) const;
  std::vector<VerbsEndpoint> read(const NetworkGroup& group,
                                  std::span<const std::byte> message) const;
  void check(const NetworkGroup& group, size_t fifo, const VerbsEndpoint& remote) const;
  struct DirectSlots {
    VerbsRegion region{nullptr, nullptr};  // null: the slots are in memory of the host
    std::string how;                       // data pass, as of registerOnDevice()
  };
  DirectSlots registerSlots(const NetworkGroup& group, size_t fifo, bool sends) const;
  bool flushes(const NetworkGroup& group, size_t fifo) const;
  static NetworkConnection connectionOf(std::unique_ptr<VerbsStream> stream, const VerbsPort& port,
                                        const VerbsEndpoint& remote, const std::string& how);

  const TransportContext& context_;
  const std::vector<VerbsPort> ports_;
  std::vector<plugin::NetPort> facts_;
  const VerbsOptions options_;
  // Receivers that are not connected yet, by group and FIFO.
  struct Listening {
    std::unique_ptr<VerbsReceiveStream> stream;
    std::string how;
  };
  std::map<std::pair<uint64_t, size_t>, Listening> listening_;
};

// What a stream tells the other end.
VerbsEndpoint endpointOf(const VerbsStream& stream, const NetworkGroup& group, size_t fifo) {
  VerbsEndpoint endpoint = stream.endpoint();
  endpoint.group = group.tag;
  endpoint.fifo = fifo;
  endpoint.seal();
  return endpoint;
}

// Makes a stream; what fails names the ranks.
template <typename Make>
auto VerbsNetwork::make(const NetworkGroup& group, Make make) const {
  try {
    return make();
  } catch (Error& error) {
    throw Error(error).rank(context_.config.rank).peer(group.peer);
  }
}

VerbsNetwork::DirectSlots VerbsNetwork::registerSlots(const NetworkGroup& group, size_t fifo,
                                                      bool sends) const {
  const VerbsPort& port = portOf(group, fifo);
  const VerbsLibrary& library = port.device->library();
  const int access = sends ? 0 : VerbsReceiveStream::accessOf(options_, true);
  DirectSlots slots;
  const auto take = [&](const char* function, ibv_mr* region) {
    const int error = errno;
    if (region == nullptr) return fmt::format("{} failed: {}", function, std::strerror(error));
    slots.region = {region, library.dereg_mr};
    return std::string();
  };
  slots.how = registerOnDevice(
      context_, *group.memory, fifo, port.facts,
      {[&](const StreamMemory& memory, const runtime::DmaBuf& dmaBuf) {
         return take("ibv_reg_dmabuf_mr",
                     library.reg_dmabuf_mr(port.device->domain(), dmaBuf.offset, memory.bytes(),
                                           reinterpret_cast<uintptr_t>(memory.slots),
                                           dmaBuf.descriptor.get(), access));
       },
       [&](const StreamMemory& memory) {
         return take(
             "ibv_reg_mr of GPU memory",
             library.registerMemory(port.device->domain(), memory.slots, memory.bytes(), access));
       }});
  return slots;
}

bool VerbsNetwork::flushes(const NetworkGroup& group, size_t fifo) const {
  const int port = choosePort(context_, facts_, group.ports[fifo], group.memory->slotBytes(fifo));
  return group.memory->streamOf(fifo).onDevice &&
         context_.options.direct[static_cast<size_t>(port)].flushes;
}

std::vector<std::byte> VerbsNetwork::listen(const NetworkGroup& group) {
  std::vector<VerbsEndpoint> offer;
  for (size_t fifo = 0; fifo < group.memory->fifos(); fifo++) {
    DirectSlots slots = registerSlots(group, fifo, false);
    auto stream = make(group, [&] {
      return std::make_unique<VerbsReceiveStream>(portOf(group, fifo), options_,
                                                  group.memory->streamOf(fifo),
                                                  std::move(slots.region), flushes(group, fifo));
    });
    offer.push_back(endpointOf(*stream, group, fifo));
    listening_.insert_or_assign(std::pair(group.tag, fifo),
                                Listening{std::move(stream), std::move(slots.how)});
  }
  return pack(offer);
}

std::vector<NetworkConnection> VerbsNetwork::connect(const NetworkGroup& group,
                                                     std::span<const std::byte> offer) {
  std::vector<VerbsEndpoint> remotes = read(group, offer);
  std::vector<NetworkConnection> connections;
  std::vector<VerbsEndpoint> reply;
  for (size_t fifo = 0; fifo < group.memory->fifos(); fifo++) {
    VerbsEndpoint& remote = remotes[fifo];
    const VerbsPort& port = portOf(group, fifo);
    DirectSlots slots = registerSlots(group, fifo, true);
    auto stream = make(group, [&] {
      auto made = std::make_unique<VerbsSendStream>(
          port, options_, remote.queuePairs, group.memory->streamOf(fifo), std::move(slots.region));
      remote.serviceLevel = made->endpoint().serviceLevel;
      remote.trafficClass = made->endpoint().trafficClass;
      made->connect(remote);
      return made;
    });
    reply.push_back(endpointOf(*stream, group, fifo));
    connections.push_back(connectionOf(std::move(stream), port, remote, slots.how));
  }
  context_.bootstrap.send(group.peer, group.tag, pack(reply));
  return connections;
}

std::vector<NetworkConnection> VerbsNetwork::accept(const NetworkGroup& group) {
  const std::vector<std::byte> reply = context_.bootstrap.receive(group.peer, group.tag);
  const std::vector<VerbsEndpoint> remotes = read(group, reply);
  std::vector<NetworkConnection> connections;
  for (size_t fifo = 0; fifo < group.memory->fifos(); fifo++) {
    Listening end = std::move(listening_.extract({group.tag, fifo}).mapped());
    make(group, [&] { end.stream->connect(remotes[fifo]); });
    connections.push_back(
        connectionOf(std::move(end.stream), portOf(group, fifo), remotes[fifo], end.how));
  }
  return connections;
}

std::vector<VerbsEndpoint> VerbsNetwork::read(const NetworkGroup& group,
                                              std::span<const std::byte> message) const {
  const size_t count = group.memory->fifos();
  std::vector<VerbsEndpoint> remotes = unpack(message, count);
  bool isIntact = remotes.size() == count;
  for (size_t fifo = 0; isIntact && fifo < count; fifo++) {
    isIntact = remotes[fifo].isFor(group.tag, fifo, group.memory->streamOf(fifo));
  }
  if (!isIntact) {
    throw Error(ErrorCode::remoteError,
                "What the peer tells of its end of a network connection is not intact")
        .rank(context_.config.rank)
        .peer(group.peer)
        .remedy("Run the same version of the library on all ranks");
  }
  for (size_t fifo = 0; fifo < count; fifo++) check(group, fifo, remotes[fifo]);
  return remotes;
}

// Whether the two ports can reach each other.
void VerbsNetwork::check(const NetworkGroup& group, size_t fifo,
                         const VerbsEndpoint& remote) const {
  const VerbsPort& port = portOf(group, fifo);
  if (remote.linkLayer == port.attributes.link_layer) return;
  throw invalidUsage("Port {} of rank {} is one of {}, and port {} of rank {} one of {}",
                     port.name(), context_.config.rank, nameOfLinks(port.isEthernet()),
                     remote.port.data(), group.peer, nameOfLinks(!port.isEthernet()))
      .remedy("Choose ports of one kind with NCCL_IB_HCA");
}

NetworkConnection VerbsNetwork::connectionOf(std::unique_ptr<VerbsStream> stream,
                                             const VerbsPort& port, const VerbsEndpoint& remote,
                                             const std::string& how) {
  return {std::move(stream),
          fmt::format("through port {} ({}) to port {}{}", port.name(),
                      nameOfLinks(port.isEthernet()), remote.port.data(), how),
          port.name()};
}

std::unique_ptr<Network> VerbsDriver::makeNetwork(const TransportContext& context) const {
  return std::make_unique<VerbsNetwork>(context, verbsPorts_, options_);
}

VerbsOptions optionsOf(const Settings& settings, int trafficClass) {
  const auto classOf = [trafficClass](int64_t setting) {
    return static_cast<uint8_t>(setting >= 0 ? setting : std::max(trafficClass, 0));
  };
  VerbsOptions options;
  options.timeout = static_cast<uint8_t>(settings.ibTimeout);
  options.retries = static_cast<uint8_t>(settings.ibRetries);
  options.keyIndex = static_cast<uint16_t>(settings.ibKeyIndex);
  options.serviceLevel = classOf(settings.ibServiceLevel) & 0xf;  // has 4 bits
  options.trafficClass = classOf(settings.ibTrafficClass);
  options.queuePairs = static_cast<size_t>(settings.ibQueuePairs);
  options.splitsData = settings.ibSplitsData;
  if (settings.ibAdaptiveRouting >= 0) options.adaptiveRouting = settings.ibAdaptiveRouting != 0;
  options.adaptiveRoutingThreshold = static_cast<uint64_t>(settings.ibAdaptiveRoutingThreshold);
  options.relaxedOrdering = settings.ibRelaxedOrdering != 0;
  return options;
}

// Which GID each RoCE port uses. Those of InfiniBand use their first.
void chooseGids(std::vector<VerbsPort>& ports, const Settings& settings) {
  const GidRules rules = parseGidRules(settings.ibAddressFamily, settings.ibAddressRange,
                                       static_cast<int>(settings.ibRoceVersion));
  for (VerbsPort& port : ports) {
    if (!port.isEthernet()) continue;
    port.gidIndex = settings.ibGidIndex >= 0 ? static_cast<int>(settings.ibGidIndex)
                                             : static_cast<int>(chooseGid(readGids(port), rules));
  }
}

bool kernelHasAdapters() {
  std::error_code error;
  return !std::filesystem::is_empty("/sys/class/infiniband", error) && !error;
}

}  // namespace

std::shared_ptr<const NetworkDriver> openVerbs(const Settings& settings, bool isNamed,
                                               int trafficClass, std::string& problem) {
  if (settings.ibDisable) {
    problem = "NCCL_IB_DISABLE is set";
    return nullptr;
  }
  if (!isNamed && !kernelHasAdapters()) {
    problem = "there is no adapter";
    return nullptr;
  }
  const VerbsLibrary* const library = VerbsLibrary::get(problem);
  if (library == nullptr) return nullptr;
  std::vector<VerbsPort> ports = findVerbsPorts(*library, PortFilter(settings.ibAdapters), problem);
  if (ports.empty()) return nullptr;
  chooseGids(ports, settings);
  for (VerbsPort& port : ports) {
    port.facts.reachesGpus = runtime::Runtime::get().hasPeerMemory();
    logInfo("{} port {}: {} Mb/s, GID {}, PCI device {}", nameOfLinks(port.isEthernet()),
            port.name(), port.facts.megabits, port.gidIndex, port.facts.pciPath);
  }
  return std::make_shared<VerbsDriver>(std::move(ports), optionsOf(settings, trafficClass));
}

}  // namespace unisono::transport
