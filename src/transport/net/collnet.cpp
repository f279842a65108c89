// SPDX-License-Identifier: Apache-2.0
#include "transport/net/collnet.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "base/error.h"
#include "base/log.h"
#include "transport/net/collnet_stream.h"
#include "transport/net/fifo_memory.h"
#include "transport/net/network_driver.h"
#include "transport/net/proxy.h"
#include "transport/net/slot_registration.h"

namespace unisono::transport {
namespace {

constexpr uint64_t kHandles = 15;  // no purpose of the connector has this number

class CollNetNetwork final : public ReducingNetwork {
 public:
  CollNetNetwork(const TransportContext& context, const CollNetConnections& connections)
      : context_(context),
        connections_(connections),
        proxy_(Proxy::ofDevice(context.own().device, context.options.proxyCores,
                               context.options.ignoresOwnCores)),
        client_(
            proxy_.add({context.options.isIdle, context.options.fail, context.options.hasLeft})) {}
  ~CollNetNetwork() override { close(); }

  Ends connect(const Stream& stream) override {
    const auto connection = connections_.find({stream.channel, stream.heads});
    const DirectAccess access = accessOf(connections_.portOf(*connection));
    const auto shapeOf = [&](bool onDevice) {
      return FifoMemory::Shape{stream.slotBytes, device::Protocol::simple, onDevice};
    };
    memory_.push_back(std::make_unique<FifoMemory>(
        context_.runtime, std::vector{shapeOf(access.reads), shapeOf(access.writes)},
        context_.slots, context_.own().device, context_.options.deviceBytes));
    FifoMemory& memory = *memory_.back();
    std::string how;
    const CollNetStream::Slots send = registerSlots(connection, memory, 0, how);
    const CollNetStream::Slots results = registerSlots(connection, memory, 1, how);
    const int rank = context_.config.rank;
    std::vector<int> peers = stream.heads;
    std::erase(peers, rank);
    const std::string port = connections_.nameOf(*connection);
    logInfo("rank {}: the network reduces for channel {} through device {}{}", rank, stream.channel,
            port, how);
    proxy_.addStream(client_,
                     std::make_unique<CollNetStream>(connection, send, results,
                                                     results.memory.onDevice && access.flushes),
                     {rank, std::move(peers),
                      fmt::format("through device {}{}, which reduces for ranks {},", port, how,
                                  fmt::join(stream.heads, ", "))});
    return {memory.fifoOf(0), memory.fifoOf(1), port};
  }
  void noteLaunch() override { proxy_.wake(); }
  void drain() override { waitUntilDrained(proxy_, client_, context_); }
  void close() override { proxy_.remove(client_); }

 private:
  // What a device of the plug-in does with memory of the GPU, for which it is as near as the port
  // of the network that has its name.
  DirectAccess accessOf(const plugin::NetPort& device) const {
    const TransportOptions& options = context_.options;
    const auto ports = options.network->ports();
    if (!ports || !(device.reachesGpus || (device.takesDmaBufs && options.dmaBuf))) return {};
    const auto found = std::ranges::find(*ports, device.name, &plugin::NetPort::name);
    const auto number = static_cast<size_t>(found - ports->begin());
    if (number >= options.direct.size()) return {};
    DirectAccess access = options.direct[number];
    access.flushes = access.flushes || device.forcesFlush;
    return access;
  }
  // `how` is what registerOnDevice() returns of FIFOs whose slots are in memory of the device.
  CollNetStream::Slots registerSlots(const std::shared_ptr<const CollNetConnection>& connection,
                                     FifoMemory& memory, size_t fifo, std::string& how) const {
    const plugin::CollNetFunctions& functions = connection->collNet->functions();
    const std::string& name = connection->collNet->name();
    std::optional<void*> region;
    const std::string passes = registerOnDevice(
        context_, memory, fifo, connections_.portOf(*connection),
        registrationWith(functions, connection->handle, "CollNet plug-in " + name, region));
    if (!passes.empty()) how = passes;
    const StreamMemory slots = memory.streamOf(fifo);
    if (!region) {
      void* made = nullptr;
      const int result = functions.registerMemory(connection->handle, slots.slots, slots.bytes(),
                                                  plugin::kHostMemory, &made);
      if (result != plugin::kSuccess) {
        throw Error(ErrorCode::systemError,
                    fmt::format("The CollNet plug-in {} cannot use {} bytes of memory: its regMr "
                                "returned {}",
                                name, slots.bytes(), plugin::describeResult(result)))
            .remedy("Raise the limit of locked memory (ulimit -l), or set NCCL_COLLNET_ENABLE=0");
      }
      region = made;
    }
    return {slots, makeRegion(connection, *region)};
  }

  const TransportContext context_;
  const CollNetConnections& connections_;
  Proxy& proxy_;
  const uint64_t client_;
  std::vector<std::unique_ptr<FifoMemory>> memory_;
};

}  // namespace

std::set<CollNetConnections::Group> CollNetConnections::groupsOf(const ChannelGraphs& graphs,
                                                                 const plan::CommConfig& config) {
  std::set<Group> groups;
  const auto addHeads = [&](const HeadGraph& graph, int channels) {
    for (int channel = 0; channel < channels && graph.hasNetwork; channel++) {
      for (const auto& heads : graph.heads) groups.emplace(channel, heads);
    }
  };
  addHeads(graphs.multicast, config.multicast.channels);
  addHeads(graphs.collnetDirect, config.collnetDirect.channels);
  for (size_t channel = 0; channel < graphs.collnet.heads.size(); channel++) {
    groups.emplace(static_cast<int>(channel), graphs.collnet.heads[channel]);
  }
  return groups;
}

CollNetConnections::~CollNetConnections() = default;

std::string CollNetConnections::failed(const char* function, int result) const {
  return fmt::format("{} of the CollNet plug-in {} returned {}", function, collNet_->name(),
                     plugin::describeResult(result));
}

// Returns why it failed, or nothing.
std::string CollNetConnections::listen(int rank, uint32_t slotBytes,
                                       std::vector<Listening>& own) const {
  const std::vector<plugin::NetPort>& ports = collNet_->ports();
  for (size_t i = 0; i < own.size(); i++) {
    Listening& end = own[i];
    const size_t place = ports_.empty() ? i : static_cast<size_t>(ports_[i % ports_.size()]);
    end.device = static_cast<int>(place % ports.size());
    const plugin::NetPort& port = ports[static_cast<size_t>(end.device)];
    if (port.collectiveBytes < slotBytes) {
      return fmt::format(
          "slots have {} bytes, and collectives through device {} of the CollNet plug-in {} at "
          "most {}",
          slotBytes, port.name, collNet_->name(), port.collectiveBytes);
    }
    const auto& heads = end.group.second;
    const auto node = std::find(heads.begin(), heads.end(), rank) - heads.begin();
    const int result = collNet_->functions().listen(
        collNet_->context(), end.device, end.handles[static_cast<size_t>(node)], &end.listener);
    if (result != plugin::kSuccess) return failed("listen", result);
  }
  return "";
}

// Sends each other head the handles of the groups that it shares with this rank, in their order.
void CollNetConnections::exchange(bootstrap::Bootstrap& bootstrap, std::vector<Listening>& own) {
  constexpr size_t kBytes = sizeof(plugin::NetHandle);
  const int rank = bootstrap.rank();
  std::map<int, std::vector<std::byte>> messages;
  std::map<int, std::vector<plugin::NetHandle*>> places;
  for (Listening& end : own) {
    const auto& heads = end.group.second;
    const auto node =
        static_cast<size_t>(std::find(heads.begin(), heads.end(), rank) - heads.begin());
    for (size_t other = 0; other < heads.size(); other++) {
      if (other == node) continue;
      auto& message = messages[heads[other]];
      const auto& bytes = end.handles[node].bytes;
      message.insert(message.end(), bytes.begin(), bytes.end());
      places[heads[other]].push_back(&end.handles[other]);
    }
  }
  for (const auto& [peer, message] : messages) {
    bootstrap.send(peer, tagOf(kHandles, true, rank, peer), message);
  }
  for (const auto& [peer, handles] : places) {
    const std::vector<std::byte> message =
        bootstrap.receive(peer, tagOf(kHandles, true, peer, rank));
    if (message.size() != handles.size() * kBytes) {
      throw internalError("Ranks {} and {} share {} and {} connections to the CollNet plug-in",
                          rank, peer, handles.size(), message.size() / kBytes);
    }
    for (size_t i = 0; i < handles.size(); i++) {
      std::memcpy(handles[i]->bytes.data(), message.data() + i * kBytes, kBytes);
    }
  }
}

std::string CollNetConnections::connect(bootstrap::Bootstrap& bootstrap,
                                        const std::set<Group>& groups, uint32_t slotBytes) {
  const int rank = bootstrap.rank();
  const plugin::CollNetFunctions& functions = collNet_->functions();
  std::vector<Listening> own;
  for (const Group& group : groups) {
    const auto& heads = group.second;
    if (std::find(heads.begin(), heads.end(), rank) == heads.end()) continue;
    own.push_back({group, 0, nullptr, std::vector<plugin::NetHandle>(heads.size())});
  }
  std::string problem = listen(rank, slotBytes, own);
  const auto failures = *bootstrap.allGatherShared(int32_t{problem.empty() ? 0 : 1});
  if (const auto first = std::ranges::find(failures, 1); first != failures.end()) {
    for (const Listening& end : own) {
      if (end.listener != nullptr) static_cast<void>(functions.closeListener(end.listener));
    }
    return !problem.empty() ? problem : fmt::format("rank {} cannot", first - failures.begin());
  }
  exchange(bootstrap, own);
  // connect() may wait for the other heads, all of which call it for every group, in one order,
  // even where it has failed before. What it does to the listener then is up to the plug-in.
  for (Listening& end : own) {
    const auto& heads = end.group.second;
    const auto node = std::find(heads.begin(), heads.end(), rank) - heads.begin();
    void* connection = nullptr;
    const int result =
        functions.connect(end.handles, static_cast<int>(node), end.listener, &connection);
    if (result != plugin::kSuccess || connection == nullptr) {
      if (problem.empty()) {
        problem = result != plugin::kSuccess
                      ? failed("connect", result)
                      : fmt::format("connect of the CollNet plug-in {} made no connection",
                                    collNet_->name());
      }
      continue;
    }
    connections_.emplace(end.group, std::make_shared<const CollNetConnection>(
                                        collNet_, connection, end.device, heads.size()));
    const int closed = functions.closeListener(end.listener);
    if (closed != plugin::kSuccess && problem.empty()) problem = failed("closeListen", closed);
  }
  return problem;
}

std::unique_ptr<ReducingNetwork> CollNetConnections::makeNetwork(
    const TransportContext& context) const {
  if (context.slots > device::kMaxReportedSlots) {
    throw internalError("FIFOs of {} slots cannot pass a network", context.slots);
  }
  return std::make_unique<CollNetNetwork>(context, *this);
}

std::shared_ptr<const CollNetConnection> CollNetConnections::find(const Group& group) const {
  const auto found = connections_.find(group);
  if (found == connections_.end()) {
    throw internalError("Channel {} has no connection to the CollNet plug-in", group.first);
  }
  return found->second;
}

const plugin::NetPort& CollNetConnections::portOf(const CollNetConnection& connection) const {
  return collNet_->ports()[static_cast<size_t>(connection.device)];
}

std::string CollNetConnections::nameOf(const CollNetConnection& connection) const {
  return fmt::format("{} of {}", portOf(connection).name, collNet_->name());
}

}  // namespace unisono::transport
