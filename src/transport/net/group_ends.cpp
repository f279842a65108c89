// SPDX-License-Identifier: Apache-2.0
#include "transport/net/group_ends.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "transport/net/network_driver.h"

namespace unisono::transport {
namespace {

// What comes before what the network adds.
struct NetworkOffer {
  uint32_t slots, fifos;
  std::array<char, 64> network;  // its name
};

// The number of the port of a channel, as NetworkGroup has it.
int portOf(const TransportContext& context, const ConnectionGroup& group, size_t index) {
  if (!group.ports.empty() && group.ports[index] >= 0) return group.ports[index];
  const std::vector<int>& chosen = context.options.ports;
  const auto channel = static_cast<size_t>(group.channels[index]);
  return chosen.empty() ? group.channels[index] : chosen[channel % chosen.size()];
}

// Whether the adapter accesses slots in memory of the device. Those of LL stay on the host, where
// the proxy looks at them.
bool isOnDevice(const TransportContext& context, bool receives, int number,
                const ConnectionGroup::FifoShape& fifo) {
  const auto ports = context.options.network->ports();
  if (!ports || fifo.protocol == device::Protocol::ll) return false;
  const auto port = static_cast<size_t>(choosePort(context, *ports, number, fifo.slotBytes));
  const auto& known = context.options.direct;
  const DirectAccess access = port < known.size() ? known[port] : DirectAccess{};
  return receives ? access.writes : access.reads;
}

}  // namespace

uint64_t groupTag(const ConnectionGroup& group, bool ofSender) {
  constexpr int kPurposeBits = 4;
  const int channel = group.forwarder >= 0 ? group.channels.front() + 1 : 0;
  return tagOf(group.purpose | static_cast<uint64_t>(channel) << kPurposeBits, ofSender,
               group.sender, group.receiver);
}

std::unique_ptr<FifoMemory> memoryOf(const TransportContext& context,
                                     const ConnectionGroup& group) {
  std::vector<FifoMemory::Shape> shapes;
  for (size_t i = 0; i < group.channels.size(); i++) {
    for (const auto& fifo : group.fifos) {
      if (!fifo.isUsed()) continue;
      shapes.push_back({fifo.slotBytes, fifo.protocol,
                        isOnDevice(context, group.receiver == context.config.rank,
                                   portOf(context, group, i), fifo)});
    }
  }
  const bool forwards = group.forwarder == context.config.rank;
  return std::make_unique<FifoMemory>(
      context.runtime, shapes, context.slots, context.own().device, context.options.deviceBytes,
      forwards ? FifoMemory::User::otherRank : FifoMemory::User::ownRank);
}

NetworkGroup endsOf(const TransportContext& context, const ConnectionGroup& group,
                    FifoMemory& memory) {
  std::vector<int> ports;
  for (size_t i = 0; i < group.channels.size(); i++) {
    for (const auto& fifo : group.fifos) {
      if (fifo.isUsed()) ports.push_back(portOf(context, group, i));
    }
  }
  const bool receives = group.receiver == context.config.rank;
  return {groupTag(group, false), receives ? connectedRank(group) : group.receiver,
          std::move(ports), &memory};
}

std::vector<std::byte> packOffer(const TransportContext& context, const NetworkGroup& ends,
                                 std::span<const std::byte> added) {
  NetworkOffer offer{context.slots, static_cast<uint32_t>(ends.memory->fifos()), {}};
  const std::string name = context.options.network->name();
  std::copy_n(name.begin(), std::min(name.size(), offer.network.size() - 1), offer.network.begin());
  std::vector<std::byte> message(sizeof(offer) + added.size());
  std::memcpy(message.data(), &offer, sizeof(offer));
  std::ranges::copy(added, message.begin() + sizeof(offer));
  return message;
}

std::span<const std::byte> unpackOffer(const TransportContext& context, const NetworkGroup& ends,
                                       std::span<const std::byte> message) {
  NetworkOffer offer{};
  if (message.size() >= sizeof(offer)) std::memcpy(&offer, message.data(), sizeof(offer));
  offer.network.back() = '\0';
  const std::string own = context.options.network->name().substr(0, offer.network.size() - 1);
  if (own != offer.network.data() || offer.slots != context.slots ||
      offer.fifos != ends.memory->fifos()) {
    throw invalidUsage(
        "Ranks {} and {} differ on how they exchange data: over {} with {} slots, and over {} with "
        "{}",
        context.config.rank, ends.peer, own, context.slots, offer.network.data(), offer.slots)
        .rank(context.config.rank)
        .peer(ends.peer)
        .remedy("Set the NCCL_* variables to the same values on all ranks");
  }
  return message.subspan(sizeof(offer));
}

void addForwarded(const TransportContext& context, Proxy& proxy, Forwarder& forwarder,
                  std::unique_ptr<FifoMemory> memory, std::vector<NetworkConnection> connections,
                  const ConnectionGroup& group) {
  const int rank = context.config.rank;
  const TransportOptions& options = context.options;
  std::function<bool()> hasSenderEnded;
  if (options.hasEnded) {
    hasSenderEnded = [hasEnded = options.hasEnded, sender = group.sender] {
      return hasEnded(sender);
    };
  }
  const uint64_t client = forwarder.add(std::move(memory), {{}, options.fail, options.hasLeft},
                                        std::move(hasSenderEnded));
  for (auto& connection : connections) {
    connection.name += fmt::format(" for rank {} (PXN)", group.sender);
    logInfo("rank {}: sends to rank {} {}", rank, group.receiver, connection.name);
    proxy.addStream(client, std::move(connection.stream),
                    {rank, {group.receiver}, std::move(connection.name)});
  }
}

}  // namespace unisono::transport
