// SPDX-License-Identifier: Apache-2.0
#include "transport/connector.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "device/multicast.h"

namespace unisono::transport {
namespace {

// Counters of different channels are in different 128-byte lines, so that polling one does not slow
// down stores to another.
constexpr size_t kLineBytes = 128;

constexpr uint64_t kRing = 1, kPeer = 2, kDirect = 3, kMapped = 4, kTree = 5, kMulticast = 6,
                   kHeadTree = 7;

// Per channel, the sender's memory has a line with the head counter of each FIFO and one with the
// receiver's offer (of protocol Simple), the receiver's memory one with the tail counter of each
// FIFO.
size_t linesOf(size_t fifos, bool ofSender) {
  return ofSender ? fifos + 1 : fifos;
}

// Identifies a message about the link from `sender` to `receiver` among all between two ranks.
uint64_t tagOf(uint64_t purpose, bool ofSender, int sender, int receiver) {
  constexpr int kRankBits = 26;
  uint64_t tag = purpose << 1 | static_cast<uint64_t>(ofSender);
  tag = tag << kRankBits | static_cast<uint64_t>(sender);
  return tag << kRankBits | static_cast<uint64_t>(receiver);
}

size_t linesBytes(size_t channels, size_t fifos, bool ofSender) {
  constexpr size_t kSlotAlignment = 4096;
  const size_t bytes = channels * linesOf(fifos, ofSender) * kLineBytes;
  return (bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
}

// Describes the memory of one end to the other.
struct BlockMessage {
  memory::SharedBlock block;
  uint32_t read;  // both ends must agree which of them holds the slots
};

}  // namespace

Connector::Connector(runtime::Runtime& runtime, bootstrap::Bootstrap& bootstrap,
                     memory::Arena& arena, memory::MappingCache& mappings, DeviceTables& tables,
                     const plan::CommConfig& config, uint32_t slots, std::vector<PeerPlace> places,
                     PeerLinks links, ChannelGraphs graphs)
    : runtime_(runtime),
      bootstrap_(bootstrap),
      arena_(arena),
      mappings_(mappings),
      tables_(tables),
      config_(config),
      slots_(slots),
      places_(std::move(places)),
      links_(std::move(links)),
      graphs_(std::move(graphs)),
      sendConnected_(static_cast<size_t>(config.ranks)),
      receiveConnected_(static_cast<size_t>(config.ranks)) {}

PeerLink Connector::linkBetween(int a, int b) const {
  const auto entry = links_.find(std::minmax(a, b));
  return entry == links_.end() ? PeerLink{} : entry->second;
}

memory::Block Connector::makeBlock(const ConnectionGroup& link, bool ofSender) {
  const bool holdsSlots = linkBetween(link.sender, link.receiver).read == ofSender;
  const size_t channels = link.channels.size();
  size_t bytes = linesBytes(channels, link.slotBytes.size(), ofSender);
  if (holdsSlots) {
    for (const uint32_t slotBytes : link.slotBytes) bytes += channels * slots_ * slotBytes;
  }
  return arena_.allocate(bytes);
}

void Connector::sendBlock(int peer, const ConnectionGroup& link, bool ofSender,
                          const memory::Block& block) {
  const BlockMessage message{block.shared, linkBetween(link.sender, link.receiver).read ? 1u : 0u};
  bootstrap_.send(peer, tagOf(link.purpose, ofSender, link.sender, link.receiver),
                  std::as_bytes(std::span(&message, 1)));
  unconfirmed_.push_back(peer);
}

std::byte* Connector::receiveBlock(int peer, const ConnectionGroup& link, bool ofSender) {
  const std::vector<std::byte> bytes =
      bootstrap_.receive(peer, tagOf(link.purpose, ofSender, link.sender, link.receiver));
  BlockMessage message;
  if (bytes.size() != sizeof(message)) {
    throw internalError("A connection message has {} bytes instead of {}", bytes.size(),
                        sizeof(message))
        .rank(config_.rank)
        .peer(peer)
        .remedy("Use the same version of the library on all ranks");
  }
  std::memcpy(&message, bytes.data(), sizeof(message));
  if ((message.read != 0) != linkBetween(link.sender, link.receiver).read) {
    throw invalidUsage("Ranks {} and {} differ on whether receivers read from senders",
                       config_.rank, peer)
        .rank(config_.rank)
        .peer(peer)
        .remedy("Set NCCL_P2P_READ_ENABLE and NCCL_TOPO_FILE to the same values on all ranks");
  }
  std::byte* address = mappings_.map(message.block);
  bootstrap_.send(peer, tagOf(kMapped, false, 0, 0), {});
  return address;
}

// Sends, and never waits. A rank that makes several links offers all of them before it completes
// the first one, so that no order of ranks can deadlock.
void Connector::offer(ConnectionGroup& link) {
  const int through = linkBetween(link.sender, link.receiver).through;
  for (const bool ofSender : {true, false}) {
    const int end = ofSender ? link.sender : link.receiver;
    if (through == config_.rank) {
      const memory::Block block = makeBlock(link, ofSender);
      sendBlock(link.sender, link, ofSender, block);
      sendBlock(link.receiver, link, ofSender, block);
    } else if (through < 0 && end == config_.rank) {
      link.own = makeBlock(link, ofSender);
      sendBlock(ofSender ? link.receiver : link.sender, link, ofSender, link.own);
    }
  }
}

// Waits for the other end, and returns the FIFOs of each channel.
std::vector<device::Fifo> Connector::complete(const ConnectionGroup& link) {
  const PeerLink between = linkBetween(link.sender, link.receiver);
  const bool sends = link.sender == config_.rank;
  const int peer = sends ? link.receiver : link.sender;
  const size_t count = link.slotBytes.size();
  auto block = [&](bool ofSender) {
    if (between.through < 0 && ofSender == sends) return link.own.address;
    return receiveBlock(between.through < 0 ? peer : between.through, link, ofSender);
  };
  std::byte* sender = block(true);
  std::byte* receiver = block(false);
  std::byte* slots =
      (between.read ? sender : receiver) + linesBytes(link.channels.size(), count, between.read);
  const bool byAddress = between.through < 0 && isDirect(peer);
  // Ranks of different processes offer windows.
  const bool offers = byAddress || (between.through < 0 && between.atomics && !isSameProcess(peer));
  std::vector<device::Fifo> fifos;
  for (size_t channel = 0; channel < link.channels.size(); channel++) {
    std::byte* senderLines = sender + channel * linesOf(count, true) * kLineBytes;
    std::byte* receiverLines = receiver + channel * linesOf(count, false) * kLineBytes;
    for (size_t i = 0; i < count; i++) {
      device::Fifo fifo{};
      fifo.slots = slots;
      fifo.head = reinterpret_cast<uint64_t*>(senderLines + i * kLineBytes);
      fifo.tail = reinterpret_cast<uint64_t*>(receiverLines + i * kLineBytes);
      const bool isSimple = count == 1 || i == plan::indexOf(device::Protocol::simple);
      if (isSimple && offers) {
        fifo.offer = reinterpret_cast<uint64_t*>(senderLines + count * kLineBytes);
        fifo.byAddress = byAddress ? 1 : 0;
      }
      if (isSimple) {
        const int number =
            link.purpose == kPeer ? static_cast<int>(channel) : link.channels[channel];
        fifoCounters_.push_back({peer, number, sends, fifo.tail, fifo.head});
      }
      fifos.push_back(fifo);
      slots += size_t{slots_} * link.slotBytes[i];
    }
  }
  return fifos;
}

void Connector::waitUntilMapped() {
  for (int peer : std::exchange(unconfirmed_, {})) {
    bootstrap_.receive(peer, tagOf(kMapped, false, 0, 0));
  }
}

bool Connector::isSameProcess(int peer) const {
  return places_[static_cast<size_t>(config_.rank)].process ==
         places_[static_cast<size_t>(peer)].process;
}

// Says whether the kernels of both ranks can store to each other's memory without mapping it. Both
// ends decide alike, and each opens its own direction.
bool Connector::isDirect(int peer) const {
  const PeerPlace& mine = places_[static_cast<size_t>(config_.rank)];
  const PeerPlace& theirs = places_[static_cast<size_t>(peer)];
  if (!isSameProcess(peer) || !runtime_.canAccessPeer(mine.device, theirs.device) ||
      !runtime_.canAccessPeer(theirs.device, mine.device) ||
      // Both ends exchange the word of an offer.
      !runtime_.supportsPeerAtomics(mine.device, theirs.device) ||
      !runtime_.supportsPeerAtomics(theirs.device, mine.device)) {
    return false;
  }
  runtime_.openPeer(mine.device, theirs.device);
  return true;
}

bool Connector::isConnected(const plan::Needs& needs) const {
  if ((needs.rings && !ringsConnected_) || (needs.trees && !treesConnected_) ||
      (needs.multicast && multicast_ == nullptr) || (needs.direct & ~directConnected_) != 0) {
    return false;
  }
  return std::all_of(needs.peers.begin(), needs.peers.end(), [this](const plan::PeerUse& use) {
    return (use.sends ? sendConnected_ : receiveConnected_)[static_cast<size_t>(use.peer)];
  });
}

void Connector::connect(const plan::Needs& needs) {
  if (needs.rings && !ringsConnected_) connectRings();
  if (needs.trees && !treesConnected_) connectTrees();
  if (needs.multicast && multicast_ == nullptr) connectMulticast();
  if ((needs.direct & ~directConnected_) != 0) connectDirect(needs.direct);
  connectPeers(needs.peers);
}

// Notes a hop of a channel if this rank has a part in it and it is not connected yet.
void Connector::addHop(Hops& hops, int channel, int from, int to) {
  if (from != config_.rank && to != config_.rank && linkBetween(from, to).through != config_.rank) {
    return;
  }
  if (connectedHops_.emplace(channel, from, to).second) hops[{from, to}].push_back(channel);
}

// Channels with the same hop share a block of memory.
void Connector::connectHops(uint64_t purpose, const Hops& hops) {
  std::vector<ConnectionGroup> links;
  for (const auto& [ends, channels] : hops) {
    links.push_back({ends.first,
                     ends.second,
                     purpose,
                     channels,
                     {config_.slotBytes.begin(), config_.slotBytes.end()}});
    offer(links.back());
  }
  for (const ConnectionGroup& link : links) {
    const bool sends = link.sender == config_.rank;
    if (!sends && link.receiver != config_.rank) continue;
    const std::vector<device::Fifo> fifos = complete(link);
    for (size_t i = 0; i < link.channels.size(); i++) {
      tables_.setFifos(sends, link.channels[i], sends ? link.receiver : link.sender,
                       std::span(fifos).subspan(i * device::kProtocols, device::kProtocols));
    }
  }
}

void Connector::connectRings() {
  Hops hops;
  for (size_t channel = 0; channel < graphs_.rings.size(); channel++) {
    const auto& ring = graphs_.rings[channel];
    for (size_t i = 0; i < ring.size(); i++) {
      addHop(hops, static_cast<int>(channel), ring[i], ring[(i + 1) % ring.size()]);
    }
  }
  connectHops(kRing, hops);
  for (size_t channel = 0; channel < graphs_.rings.size(); channel++) {
    const auto& ring = graphs_.rings[channel];
    const auto mine = std::find(ring.begin(), ring.end(), config_.rank);
    std::vector<int32_t> order(mine, ring.end());
    order.insert(order.end(), ring.begin(), mine);
    tables_.setRing(static_cast<int>(channel), order.back(), order[1], order,
                    static_cast<int>(mine - ring.begin()));
  }
  ringsConnected_ = true;
}

void Connector::addTreeHops(Hops& hops, int channel, const std::vector<topology::TreePlace>& tree) {
  for (size_t rank = 0; rank < tree.size(); rank++) {
    const int child = static_cast<int>(rank), parent = tree[rank].up;
    if (parent < 0) continue;
    addHop(hops, channel, child, parent);
    addHop(hops, channel, parent, child);
  }
}

void Connector::connectTrees() {
  Hops hops;
  for (size_t channel = 0; channel < graphs_.trees.size(); channel++) {
    addTreeHops(hops, static_cast<int>(channel), graphs_.trees[channel]);
  }
  connectHops(kTree, hops);
  for (size_t channel = 0; channel < graphs_.trees.size(); channel++) {
    tables_.setTree(static_cast<int>(channel),
                    graphs_.trees[channel][static_cast<size_t>(config_.rank)]);
  }
  treesConnected_ = true;
}

// The link for messages that both ends will have connected.
Connector::ConnectionGroup Connector::makeLinkForMessages(int from, int to) {
  if (from == config_.rank) sendConnected_[static_cast<size_t>(to)] = true;
  if (to == config_.rank) receiveConnected_[static_cast<size_t>(from)] = true;
  return {from,
          to,
          kPeer,
          std::vector<int>(static_cast<size_t>(config_.channelsPerPeer)),
          {config_.peerSlotBytes}};
}

void Connector::connectThrough() {
  std::vector<ConnectionGroup> links;
  for (const auto& [pair, link] : links_) {
    if (link.through < 0) continue;
    for (const auto& [from, to] : {pair, std::pair(pair.second, pair.first)}) {
      if (config_.rank != from && config_.rank != to && config_.rank != link.through) continue;
      links.push_back(makeLinkForMessages(from, to));
      offer(links.back());
    }
  }
  for (const ConnectionGroup& link : links) completeForMessages(link);
}

void Connector::connectPeers(const std::vector<plan::PeerUse>& uses) {
  std::vector<ConnectionGroup> links;
  for (const plan::PeerUse& use : uses) {
    if ((use.sends ? sendConnected_ : receiveConnected_)[static_cast<size_t>(use.peer)]) continue;
    links.push_back(use.sends ? makeLinkForMessages(config_.rank, use.peer)
                              : makeLinkForMessages(use.peer, config_.rank));
    offer(links.back());
  }
  for (const ConnectionGroup& link : links) completeForMessages(link);
}

void Connector::completeForMessages(const ConnectionGroup& link) {
  const bool sends = link.sender == config_.rank;
  if (!sends && link.receiver != config_.rank) return;
  tables_.setPeer(sends, sends ? link.receiver : link.sender,
                  plan::firstMessageChannel(config_, link.sender, link.receiver), complete(link));
}

// One buffer per rank for all channels, and the FIFOs between the heads of different nodes.
void Connector::connectMulticast() {
  const MulticastGraph& graph = graphs_.multicast;
  Hops hops;
  std::array<topology::TreePlace, 2> places;
  for (size_t tree = 0; tree < places.size() && !graph.trees[tree].empty(); tree++) {
    places[tree] = graph.trees[tree][static_cast<size_t>(config_.rank)];
  }
  for (int channel = 0; channel < config_.multicastChannels; channel++) {
    addTreeHops(hops, channel, graph.trees[static_cast<size_t>(channel) % graph.trees.size()]);
  }
  connectHops(kHeadTree, hops);
  const device::MulticastLayout layout{static_cast<uint32_t>(graph.heads), slots_,
                                       config_.multicastSlotBytes};
  const size_t bytes = layout.bytes() * static_cast<size_t>(config_.multicastChannels);
  const memory::Block own = arena_.allocate(bytes);
  const auto link = [](int from, int to) { return ConnectionGroup{from, to, kMulticast, {}, {}}; };
  for (const int rank : graph.node) {
    if (rank != config_.rank) sendBlock(rank, link(config_.rank, rank), true, own);
  }
  std::vector<std::byte*> members;
  for (const int rank : graph.node) {
    members.push_back(rank == config_.rank ? own.address
                                           : receiveBlock(rank, link(rank, config_.rank), true));
  }
  const int device = places_[static_cast<size_t>(config_.rank)].device;
  auto address = runtime_.mapMulticast(device, members, bytes);
  tables_.setMulticast(layout, graph.head, config_.multicastChannels, own.address,
                       static_cast<std::byte*>(address->address()), places);
  multicast_ = std::move(address);
}

// Of the peers those that are not connected yet.
void Connector::connectDirect(device::DirectPeers peers) {
  const int count = config_.ranks - 1;
  if (direct_.positions == nullptr) {
    directWindow_ =
        arena_.allocate(device::directWindowBytes(config_.ranks, config_.directLineBits));
    direct_.window = directWindow_.address;
    const size_t positions = device::kDirectMaxBlocks * static_cast<size_t>(count);
    direct_.positions = reinterpret_cast<device::DirectPosition*>(
        arena_.allocate(positions * sizeof(device::DirectPosition)).address);
  }
  const auto link = [](int from, int to) { return ConnectionGroup{from, to, kDirect, {}, {}}; };
  const auto forEachNew = [&](auto visit) {
    for (int peer = 0; peer < count; peer++) {
      if (((peers & ~directConnected_) >> peer & 1) != 0) {
        visit(peer, device::rankOfPeer(peer, config_.rank));
      }
    }
  };
  forEachNew(
      [&](int, int rank) { sendBlock(rank, link(config_.rank, rank), true, directWindow_); });
  forEachNew([&](int peer, int rank) {
    direct_.theirs[peer] = receiveBlock(rank, link(rank, config_.rank), true);
  });
  directConnected_ |= peers;
}

}  // namespace unisono::transport
