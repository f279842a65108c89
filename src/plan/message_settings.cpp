// SPDX-License-Identifier: Apache-2.0
#include "plan/message_settings.h"

#include <algorithm>
#include <bit>
#include <map>

#include "base/math.h"
#include "tuning/messages.h"

namespace unisono::plan {
namespace {

using tuning::MessagePath;

struct Defaults {
  SlotDefaults slots;
  uint32_t peerSlotBytes, peerLineSlotBytes;  // of messages, over Simple and LL
  int peerChannels;
  int mostChannelsPerPeer;
  // Of a message on one channel: between GPUs, through memory of the host, and through sockets.
  uint64_t minBytesPerPart, minHostBytesPerPart, minSocketBytesPerPart;
  uint64_t wideOfferBytes;  // shares over LL128 from which on peers' buffers are used
  uint64_t resultBytes;     // as in CommConfig
  uint64_t remoteBytes;     // most of the slots for messages to other hosts, and from them
};

// CUDA: slices long enough that what happens between two of them does not count; lines fill a slot
// in passes of whole blocks. Below 32 MiB of a share LL128 is faster than the exchange of buffers
// (docs/results/2026-11-22-in-place.md); of copies all shares count, as the exchange takes no
// longer with more peers (4 H100: 64 MB 6 % faster, docs/results/2026-11-27-small-blocks.md). A
// channel through host memory is slower than one between GPUs, so that smaller parts pay: 64 KB
// take 16.3 us instead of 19.7. One thread of a rank moves all that goes through sockets, so that
// larger parts pay: 1 MB takes 340 us on one channel and 500 on 16
// (docs/results/2026-11-26-h100x2.md). Host: small, so that hundreds of ranks fit. For remoteBytes
// see docs/decisions/0020-memory-of-messages.md.
constexpr Defaults kCuda{{512 << 10, 112 << 10, 224 << 10, 4},
                         256 << 10,
                         32 << 10,
                         64,
                         16,
                         64 << 10,
                         16 << 10,
                         1 << 20,
                         32 << 20,
                         16 << 20,
                         192 << 20};
constexpr Defaults kHost{{32 << 10, 8 << 10, 16 << 10, 8},
                         32 << 10,
                         8 << 10,
                         4,
                         2,
                         64 << 10,
                         64 << 10,
                         64 << 10,
                         1 << 20,
                         64 << 10,
                         4 << 20};

constexpr int64_t kSlotGrain = 512;
// Slots for messages between hosts are not made smaller, and those over LL are this part of them.
constexpr uint32_t kLeastRemoteSlotBytes = 4 << 10, kDataPerLineBytes = 8;
constexpr int64_t kMostSlotBytes = 64 << 20;  // sizes of chunks are 32-bit numbers
// Of a message on one channel, up to which it goes over LL through networks and host memory.
// Simple is faster from 4 KB (sockets) or 8 KB on (docs/results/2026-11-23-clusters.md).
constexpr uint64_t kMessageLineBytes = 2 << 10, kHostMessageLineBytes = 4 << 10;

const Defaults& defaultsOf(bool cuda) {
  return cuda ? kCuda : kHost;
}

// As many channels as the defaults say, within the bounds of the user and of the blocks that can be
// resident. All of these are powers of two.
void setChannels(const MessageFacts& facts, const Defaults& defaults,
                 const tuning::CommFacts& model, CommConfig& config) {
  // A launch of messages may also have a block for each peer (device::MessagesArguments).
  const int64_t forPeers =
      model.maxRanksPerNode <= device::kDirectMaxRanks ? model.maxRanksPerNode - 1 : 0;
  int64_t most = std::min(facts.mostBlocks, std::max<int64_t>(facts.residentBlocks - forPeers, 1));
  if (facts.mostChannels > 0) most = std::min(most, facts.mostChannels);
  int64_t channels = std::min<int64_t>(defaults.peerChannels, most);
  channels = std::bit_floor(static_cast<uint64_t>(channels));
  if (facts.fewestChannels > channels) {
    channels = std::bit_ceil(static_cast<uint64_t>(facts.fewestChannels));
  }
  channels = std::min<int64_t>(channels, std::bit_floor(static_cast<uint64_t>(most)));
  config.peerChannels = static_cast<int>(channels);
  const int peers =
      static_cast<int>(std::bit_ceil(static_cast<unsigned>(std::max(config.ranks - 1, 1))));
  config.channelsPerPeer = std::clamp(config.peerChannels / peers, 1,
                                      std::min(config.peerChannels, defaults.mostChannelsPerPeer));
  config.remoteChannelsPerPeer = config.channelsPerPeer;
  if (facts.remoteChannelsPerPeer > 0) {
    const uint64_t wanted = std::bit_ceil(static_cast<uint64_t>(facts.remoteChannelsPerPeer));
    config.remoteChannelsPerPeer =
        static_cast<int>(std::min<uint64_t>(wanted, static_cast<uint64_t>(config.peerChannels)));
  }
}

// Between hosts: as many connections as a rank can have to others share a budget.
void setRemoteSlots(const MessageFacts& facts, const Defaults& defaults, CommConfig& config) {
  if (facts.hosts.empty()) return;
  config.hosts = std::make_shared<const std::vector<uint64_t>>(facts.hosts);
  config.remoteSlots = config.peerSlots;
  if (!facts.sharesNetBuffers) return;
  std::map<uint64_t, uint64_t> ranksOf;
  for (const uint64_t host : facts.hosts) ranksOf[host]++;
  const auto fewest =
      std::ranges::min_element(ranksOf, {}, [](const auto& entry) { return entry.second; });
  const uint64_t fifos =
      (facts.hosts.size() - fewest->second) * static_cast<uint64_t>(config.remoteChannelsPerPeer);
  MessageSlots& slots = config.remoteSlots;
  while (fifos * defaults.slots.count * (slots.bytes + slots.lineBytes) > defaults.remoteBytes &&
         slots.bytes / 2 >= kLeastRemoteSlotBytes) {
    slots.bytes =
        static_cast<uint32_t>(ceilDivide<int64_t>(slots.bytes / 2, kSlotGrain) * kSlotGrain);
    slots.lineBytes = std::min<uint32_t>(slots.lineBytes, slots.bytes / kDataPerLineBytes);
  }
}

// Of messages, what the user has measured to be faster by the next path than by kernels over lines.
// Nothing changes where the next path cannot be used.
void setFasterBytes(const MessageFacts& facts, tuning::CommFacts& model) {
  using device::Protocol;
  const auto border = [&](MessagePath path, MessagePath next) {
    return tuning::borderOf(facts.measured, path, next, model.nodes, model.ranks);
  };
  const auto limit = [&](Protocol protocol, const std::optional<tuning::MessageBorder>& to) {
    if (to && !to->open) model.direct.fasterMessageBytes[indexOf(protocol)] = to->bytes;
  };
  const bool hasWide =
      model.wide.blocks > 0 && facts.allowed.allows(device::Operation::allReduce, Protocol::ll128);
  limit(Protocol::ll, border(MessagePath::directLl,
                             hasWide ? MessagePath::directLl128 : MessagePath::fifoSimple));
  // The user's own limit comes first.
  if (facts.llThreshold >= 0) return;
  limit(Protocol::ll128, border(MessagePath::directLl128, MessagePath::fifoSimple));
}

// Whether messages inside a host go through its memory, and no network is in use.
bool usesHostMemoryOnly(const tuning::CommFacts& model) {
  return model.slotsOfHost && !model.network;
}

// Into how many parts messages are cut.
void setParts(const MessageFacts& facts, const Defaults& defaults, const tuning::CommFacts& model,
              CommConfig& config) {
  config.minBytesPerPart = config.minRemoteBytesPerPart = defaults.minBytesPerPart;
  if (usesHostMemoryOnly(model)) config.minBytesPerPart = defaults.minHostBytesPerPart;
  if (!model.network || !model.sockets) return;
  config.minRemoteBytesPerPart = defaults.minSocketBytesPerPart;
  // Inside one host they carry messages only where nothing else does.
  const bool insideHost = facts.hosts.empty() && !model.slotsOfHost;
  if (insideHost) config.minBytesPerPart = defaults.minSocketBytesPerPart;
}

// Parts of up to so many bytes go over LL through host memory and networks.
uint64_t lineBytesOf(const MessageFacts& facts, const tuning::CommFacts& model,
                     uint64_t minBytesPerPart) {
  if (facts.llThreshold >= 0) return static_cast<uint64_t>(facts.llThreshold);
  const auto border = tuning::borderOf(facts.measured, MessagePath::fifoLl, MessagePath::fifoSimple,
                                       model.nodes, model.ranks);
  // Larger messages have several parts, which were not measured one by one.
  if (border) return std::min(border->bytes, minBytesPerPart);
  return usesHostMemoryOnly(model) ? kHostMessageLineBytes : kMessageLineBytes;
}

}  // namespace

const SlotDefaults& slotDefaults(bool cuda) {
  return defaultsOf(cuda).slots;
}

uint32_t slotBytesOf(int64_t bufferBytes, uint32_t count, uint32_t automatic) {
  const int64_t slot = bufferBytes / count / kSlotGrain * kSlotGrain;
  return bufferBytes > 0 ? static_cast<uint32_t>(std::clamp(slot, kSlotGrain, kMostSlotBytes))
                         : automatic;
}

void setMessages(const MessageFacts& facts, CommConfig& config, tuning::CommFacts& model) {
  const Defaults& defaults = defaultsOf(facts.cuda);
  setChannels(facts, defaults, model, config);
  model.wide.offerBytes = defaults.wideOfferBytes;
  config.wide = model.wide;
  if (facts.llThreshold >= 0) {
    // Limits the product with the channels of a peer to what a number holds.
    const auto threshold =
        static_cast<uint64_t>(std::min<int64_t>(facts.llThreshold, int64_t{1} << 40));
    model.direct.messageBytes = threshold * static_cast<uint64_t>(config.channelsPerPeer);
  }
  setFasterBytes(facts, model);
  setParts(facts, defaults, model, config);
  config.peerSlots.bytes =
      std::min(config.slotBytes[indexOf(device::Protocol::simple)], defaults.peerSlotBytes);
  const bool hasSlowLinks = model.network || model.slotsOfHost;
  if (hasSlowLinks && facts.allowed.allows(device::Operation::allReduce, device::Protocol::ll)) {
    config.peerSlots.lineBytes =
        std::min(config.slotBytes[indexOf(device::Protocol::ll)], defaults.peerLineSlotBytes);
    config.peerLineBytes = lineBytesOf(facts, model, config.minBytesPerPart);
  }
  setRemoteSlots(facts, defaults, config);
  config.directBytes = kOfferedBytes;
  config.resultBytes = defaults.resultBytes;
}

}  // namespace unisono::plan
