// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "transport/net/stream.h"

namespace unisono::transport {

inline constexpr size_t kMaxQueuePairs = 128;

// What one end of a connection over verbs tells the other one.
struct VerbsEndpoint {
  uint64_t checksum = 0;         // of all that follows; by seal()
  uint64_t group = 0, fifo = 0;  // which connection it is
  // Where the other end writes: the slots of the receiver, the credits of the sender.
  uint64_t address = 0;
  uint32_t key = 0;
  uint32_t slots = 0, slotBytes = 0;
  uint32_t firstPacket = 0;  // sequence number
  uint32_t queuePairs = 0;
  uint16_t lid = 0;
  uint8_t linkLayer = 0, mtu = 0;
  uint8_t serviceLevel = 0, trafficClass = 0;  // of the sender, for both ends
  uint8_t splitsData = 0;                      // of the sender
  uint8_t unused = 0;
  std::array<uint8_t, 16> gid{};
  std::array<char, 84> port{};  // its name
  std::array<uint32_t, kMaxQueuePairs> numbers{};

  void seal();
  // Whether it is what the other end of this FIFO has sealed.
  bool isFor(uint64_t ownGroup, uint64_t ownFifo, const StreamMemory& memory) const;
};
static_assert(sizeof(VerbsEndpoint) == 60 + 16 + 84 + 4 * kMaxQueuePairs);  // without holes

// Messages of endpoints. The second returns none unless the message has `count`.
std::vector<std::byte> pack(std::span<const VerbsEndpoint> endpoints);
std::vector<VerbsEndpoint> unpack(std::span<const std::byte> message, size_t count);

}  // namespace unisono::transport
