#include "transport/connector.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace unisono::transport {
namespace {

// Counters of different channels lie in different 128-byte lines, so that polls of one do not slow
// stores of another.
constexpr size_t kLineBytes = 128;
// Sender's memory, a channel: a line with the head counter, a line with the receiver's offer.
constexpr size_t kSenderLines = 2, kReceiverLines = 1;

constexpr uint64_t kRing = 1, kPeer = 2, kOneShot = 3, kMapped = 4;

// A message about channels from `sender` to `receiver`: unique among all between two ranks.
uint64_t tagOf(uint64_t purpose, bool ofSender, int sender, int receiver, int channel) {
  constexpr int kRankBits = 26, kChannelBits = 7;
  uint64_t tag = purpose << 1 | static_cast<uint64_t>(ofSender);
  tag = tag << kRankBits | static_cast<uint64_t>(sender);
  tag = tag << kRankBits | static_cast<uint64_t>(receiver);
  return tag << kChannelBits | static_cast<uint64_t>(channel);
}

size_t linesBytes(int channels, bool ofSender) {
  constexpr size_t kSlotAlignment = 4096;
  const size_t bytes =
      static_cast<size_t>(channels) * (ofSender ? kSenderLines : kReceiverLines) * kLineBytes;
  return (bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
}

// What one end tells the other of its memory.
struct BlockMessage {
  memory::SharedBlock block;
  uint32_t read;  // both ends must mean the same memory by "the slots"
};

}  // namespace

Connector::Connector(runtime::Runtime& runtime, bootstrap::Bootstrap& bootstrap,
                     memory::Arena& arena, memory::MappingCache& mappings, DeviceTables& tables,
                     const plan::Shape& shape, uint32_t slots, std::vector<PeerPlace> places,
                     PeerLinks links, std::vector<std::vector<int32_t>> ringOrders)
    : runtime_(runtime),
      bootstrap_(bootstrap),
      arena_(arena),
      mappings_(mappings),
      tables_(tables),
      shape_(shape),
      slots_(slots),
      places_(std::move(places)),
      links_(std::move(links)),
      ringOrders_(std::move(ringOrders)),
      sendChannels_(static_cast<size_t>(shape.ranks)),
      receiveChannels_(static_cast<size_t>(shape.ranks)) {}

PeerLink Connector::way(int a, int b) const {
  const auto entry = links_.find(std::minmax(a, b));
  return entry == links_.end() ? PeerLink{} : entry->second;
}

memory::Block Connector::makeBlock(const Link& link, bool ofSender) {
  const bool holdsSlots = way(link.sender, link.receiver).read == ofSender;
  const size_t slotBytes =
      holdsSlots ? static_cast<size_t>(link.channels) * slots_ * link.slotBytes : 0;
  return arena_.allocate(linesBytes(link.channels, ofSender) + slotBytes);
}

void Connector::sendBlock(int peer, const Link& link, bool ofSender, const memory::Block& block) {
  const BlockMessage message{block.shared, way(link.sender, link.receiver).read ? 1u : 0u};
  bootstrap_.send(peer,
                  tagOf(link.purpose, ofSender, link.sender, link.receiver, link.firstChannel),
                  std::as_bytes(std::span(&message, 1)));
  unconfirmed_.push_back(peer);
}

std::byte* Connector::receiveBlock(int peer, const Link& link, bool ofSender) {
  const std::vector<std::byte> bytes = bootstrap_.receive(
      peer, tagOf(link.purpose, ofSender, link.sender, link.receiver, link.firstChannel));
  BlockMessage message;
  if (bytes.size() != sizeof(message)) {
    throw internalError("A connection message has {} bytes instead of {}", bytes.size(),
                        sizeof(message))
        .rank(shape_.rank)
        .peer(peer)
        .remedy("Use the same version of the library on all ranks");
  }
  std::memcpy(&message, bytes.data(), sizeof(message));
  if ((message.read != 0) != way(link.sender, link.receiver).read) {
    throw invalidUsage("Ranks {} and {} differ on whether receivers read from senders", shape_.rank,
                       peer)
        .rank(shape_.rank)
        .peer(peer)
        .remedy("Set NCCL_P2P_READ_ENABLE and NCCL_TOPO_FILE alike on all ranks");
  }
  std::byte* address = mappings_.map(message.block);
  bootstrap_.send(peer, tagOf(kMapped, false, 0, 0, 0), {});
  return address;
}

// The first half of a connection sends and the second waits: whoever makes several makes all their
// first halves before, and no order of ranks can block.
void Connector::offer(Link& link) {
  const int through = way(link.sender, link.receiver).through;
  for (const bool ofSender : {true, false}) {
    const int end = ofSender ? link.sender : link.receiver;
    if (through == shape_.rank) {
      const memory::Block block = makeBlock(link, ofSender);
      sendBlock(link.sender, link, ofSender, block);
      sendBlock(link.receiver, link, ofSender, block);
    } else if (through < 0 && end == shape_.rank) {
      link.own = makeBlock(link, ofSender);
      sendBlock(ofSender ? link.receiver : link.sender, link, ofSender, link.own);
    }
  }
}

std::vector<device::Connection> Connector::complete(const Link& link) {
  const PeerLink way = this->way(link.sender, link.receiver);
  const bool sends = link.sender == shape_.rank;
  const int peer = sends ? link.receiver : link.sender;
  auto block = [&](bool ofSender) {
    if (way.through < 0 && ofSender == sends) return link.own.address;
    return receiveBlock(way.through < 0 ? peer : way.through, link, ofSender);
  };
  std::byte* sender = block(true);
  std::byte* receiver = block(false);
  std::byte* slots = way.read ? sender + linesBytes(link.channels, true)
                              : receiver + linesBytes(link.channels, false);
  const bool direct = link.purpose == kPeer && way.through < 0 && isDirect(peer);
  std::vector<device::Connection> connections;
  for (size_t channel = 0; channel < static_cast<size_t>(link.channels); channel++) {
    std::byte* head = sender + channel * kSenderLines * kLineBytes;
    device::Connection connection{};
    connection.head = reinterpret_cast<uint64_t*>(head);
    connection.offer = direct ? reinterpret_cast<uint64_t*>(head + kLineBytes) : nullptr;
    connection.tail = reinterpret_cast<uint64_t*>(receiver + channel * kReceiverLines * kLineBytes);
    connection.slots = slots + channel * slots_ * link.slotBytes;
    connections.push_back(connection);
  }
  return connections;
}

void Connector::waitUntilMapped() {
  for (int peer : std::exchange(unconfirmed_, {})) {
    bootstrap_.receive(peer, tagOf(kMapped, false, 0, 0, 0));
  }
}

// Both ends decide alike, and each opens its own way to the other.
bool Connector::isDirect(int peer) const {
  const PeerPlace& mine = places_[static_cast<size_t>(shape_.rank)];
  const PeerPlace& theirs = places_[static_cast<size_t>(peer)];
  if (mine.process != theirs.process || !runtime_.canAccessPeer(mine.device, theirs.device) ||
      !runtime_.canAccessPeer(theirs.device, mine.device)) {
    return false;
  }
  runtime_.openPeer(mine.device, theirs.device);
  return true;
}

bool Connector::isConnected(const plan::Plan& plan) const {
  if (plan.ringChannels > ringChannels_ || (plan.usesOneShot && !oneShotReady_)) return false;
  return std::all_of(plan.peers.begin(), plan.peers.end(), [this](const plan::PeerUse& use) {
    const auto& connected = use.sends ? sendChannels_ : receiveChannels_;
    return connected[static_cast<size_t>(use.peer)] >= use.channels;
  });
}

void Connector::connect(const plan::Plan& plan) {
  if (plan.ringChannels > ringChannels_) connectRings(plan.ringChannels);
  if (plan.usesOneShot && !oneShotReady_) connectOneShot();
  connectPeers(plan.peers);
}

void Connector::connectRings(int channels) {
  struct Place {
    int position;
    std::vector<int32_t> order;  // from this rank on
    Link send, receive;
  };
  std::vector<Place> places;
  for (int channel = ringChannels_; channel < channels; channel++) {
    const auto& ring = ringOrders_[static_cast<size_t>(channel)];
    auto hop = [&](int from, int to) {
      Link link{from, to, kRing, channel, 1, shape_.slotBytes};
      offer(link);
      return link;
    };
    const auto mine = std::find(ring.begin(), ring.end(), shape_.rank);
    Place place;
    place.position = static_cast<int>(mine - ring.begin());
    place.order.assign(mine, ring.end());
    place.order.insert(place.order.end(), ring.begin(), mine);
    place.send = hop(shape_.rank, place.order[1]);
    place.receive = hop(place.order.back(), shape_.rank);
    places.push_back(std::move(place));
    for (const auto& [pair, link] : links_) {
      if (link.through != shape_.rank) continue;
      for (size_t i = 0; i < ring.size(); i++) {
        const int from = ring[i], to = ring[(i + 1) % ring.size()];
        if (pair == std::pair<int, int>(std::minmax(from, to))) hop(from, to);
      }
    }
  }
  for (const Place& place : places) {
    tables_.setRing(place.send.firstChannel, complete(place.receive).front(),
                    complete(place.send).front(), place.order, place.position);
  }
  ringChannels_ = channels;
}

int& Connector::connectedChannels(int peer, bool sends) {
  return (sends ? sendChannels_ : receiveChannels_)[static_cast<size_t>(peer)];
}

Connector::Link Connector::peerLink(int from, int to, int firstChannel, int channels) const {
  return {from, to, kPeer, firstChannel, channels, shape_.peerSlotBytes};
}

void Connector::connectThrough() {
  std::vector<Link> links;
  for (const auto& [pair, way] : links_) {
    if (way.through < 0) continue;
    for (const auto& [from, to] : {pair, std::pair(pair.second, pair.first)}) {
      if (shape_.rank != from && shape_.rank != to && shape_.rank != way.through) continue;
      links.push_back(
          peerLink(from, to, plan::firstMessageChannel(shape_, from, to), shape_.channelsPerPeer));
      offer(links.back());
      if (shape_.rank == from) connectedChannels(to, true) = shape_.channelsPerPeer;
      if (shape_.rank == to) connectedChannels(from, false) = shape_.channelsPerPeer;
    }
  }
  for (const Link& link : links) completePeer(link);
}

void Connector::connectPeers(const std::vector<plan::PeerUse>& uses) {
  // Messages to one peer grow the connection in the order of the group, on both ends alike.
  std::vector<Link> links;
  for (const plan::PeerUse& use : uses) {
    const int connected = connectedChannels(use.peer, use.sends);
    if (use.channels <= connected) continue;
    links.push_back(peerLink(use.sends ? shape_.rank : use.peer, use.sends ? use.peer : shape_.rank,
                             use.firstChannel + connected, use.channels - connected));
    connectedChannels(use.peer, use.sends) = use.channels;
    offer(links.back());
  }
  for (const Link& link : links) completePeer(link);
}

// The other half of a connection for messages, at either end.
void Connector::completePeer(const Link& link) {
  const bool sends = link.sender == shape_.rank;
  if (!sends && link.receiver != shape_.rank) return;
  const int peer = sends ? link.receiver : link.sender;
  tables_.setPeer(sends, peer, link.firstChannel, complete(link));
}

void Connector::connectOneShot() {
  const memory::Block scratch =
      arena_.allocate(device::oneShotScratchBytes(shape_.ranks, shape_.situation.oneShotMaxBytes));
  const memory::Block epochs = arena_.allocate(device::kOneShotMaxBlocks * sizeof(uint32_t));
  const auto link = [](int from, int to) { return Link{from, to, kOneShot, 0, 1, 0}; };
  for (int peer = 0; peer < shape_.ranks; peer++) {
    if (peer != shape_.rank) sendBlock(peer, link(shape_.rank, peer), true, scratch);
  }
  for (int peer = 0; peer < shape_.ranks; peer++) {
    oneShot_.scratch[static_cast<size_t>(peer)] =
        peer == shape_.rank ? scratch.address : receiveBlock(peer, link(peer, shape_.rank), true);
  }
  oneShot_.epochs = reinterpret_cast<uint32_t*>(epochs.address);
  oneShotReady_ = true;
}

}  // namespace unisono::transport
