// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include "plan/plan.h"
#include "support/model.h"

namespace unisono::plan {

// The config of `ranks` ranks with `peerChannels` channels for messages; nothing is direct.
inline CommConfig configOf(int rank, int ranks, int channels = 4, int peerChannels = 4,
                           int channelsPerPeer = 2) {
  CommConfig config;
  config.rank = rank;
  config.ranks = ranks;
  config.channels = channels;
  config.slotBytes.fill(8192);
  config.peerSlots.bytes = 8192;
  config.slicesPerChunk = 2;
  config.peerChannels = peerChannels;
  config.channelsPerPeer = config.remoteChannelsPerPeer = channelsPerPeer;
  config.minBytesPerPart = config.minRemoteBytesPerPart = 4096;
  config.directBytes = 100'000;
  config.resultBytes = config.directBytes / static_cast<uint64_t>(ranks);
  testing::setModel(config);
  return config;
}

inline Task taskOf(Call call, uint64_t count, device::DataType type = device::DataType::uint8,
                   int peer = 0) {
  // Addresses are only handed on.
  auto* memory = reinterpret_cast<std::byte*>(uint64_t{1} << 40);
  return {
      call, memory, memory + (uint64_t{1} << 36), count, {type, device::Reduction::sum, false, 0},
      peer, true};
}

inline bool operator==(const device::CollectiveWork& a, const device::CollectiveWork& b) {
  return a.operation == b.operation && a.firstChannel == b.firstChannel &&
         a.channels == b.channels && a.root == b.root && a.count == b.count && a.low == b.low &&
         a.middle == b.middle && a.high == b.high && a.chunkElements == b.chunkElements;
}

}  // namespace unisono::plan
