// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "transport/net/fifo_memory.h"
#include "transport/net/forwarding.h"
#include "transport/net/network.h"
#include "transport/net/proxy.h"
#include "transport/transport.h"

// What the ranks that have a part in a group of connections over the network find out of it alike.
namespace unisono::transport {

// Whose connection leads to the receiver.
inline int connectedRank(const ConnectionGroup& group) {
  return group.forwarder >= 0 ? group.forwarder : group.sender;
}

// Of messages of the bootstrap. One rank may send to another one directly and through forwarders,
// on different channels.
uint64_t groupTag(const ConnectionGroup& group, bool ofSender);

// The memory of all FIFOs of this rank's end of a group that the network carries, by channel.
std::unique_ptr<FifoMemory> memoryOf(const TransportContext& context, const ConnectionGroup& group);
NetworkGroup endsOf(const TransportContext& context, const ConnectionGroup& group,
                    FifoMemory& memory);

// What the receiver tells the rank that connects to it, with what the network adds. Throws
// Error(invalidUsage) if the two use the network differently.
std::vector<std::byte> packOffer(const TransportContext& context, const NetworkGroup& ends,
                                 std::span<const std::byte> added);
std::span<const std::byte> unpackOffer(const TransportContext& context, const NetworkGroup& ends,
                                       std::span<const std::byte> message);

// Of the forwarder: `proxy`, which is that of `forwarder`, moves the data of these connections.
void addForwarded(const TransportContext& context, Proxy& proxy, Forwarder& forwarder,
                  std::unique_ptr<FifoMemory> memory, std::vector<NetworkConnection> connections,
                  const ConnectionGroup& group);

}  // namespace unisono::transport
