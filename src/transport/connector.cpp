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
constexpr size_t kSenderBytes = 2 * kLineBytes;

enum class Purpose : uint64_t { ring = 1, peer = 2, oneShot = 3 };
enum class Role : uint64_t { sender = 1, receiver = 2 };

constexpr uint64_t kMappedTag = uint64_t{0x6d6170} << 40;

uint64_t tagOf(Purpose purpose, Role role, int channel) {
  return uint64_t{0x756e69} << 40 | static_cast<uint64_t>(purpose) << 36 |
         static_cast<uint64_t>(role) << 32 | static_cast<uint32_t>(channel);
}

size_t tailBytes(int channels) {
  constexpr size_t kSlotAlignment = 4096;
  return (static_cast<size_t>(channels) * kLineBytes + kSlotAlignment - 1) / kSlotAlignment *
         kSlotAlignment;
}

}  // namespace

Connector::Connector(runtime::Runtime& runtime, bootstrap::Bootstrap& bootstrap,
                     memory::Arena& arena, memory::MappingCache& mappings, DeviceTables& tables,
                     const plan::Shape& shape, uint32_t slots, std::vector<PeerPlace> places,
                     std::vector<std::vector<int32_t>> ringOrders)
    : runtime_(runtime),
      bootstrap_(bootstrap),
      arena_(arena),
      mappings_(mappings),
      tables_(tables),
      shape_(shape),
      slots_(slots),
      places_(std::move(places)),
      ringOrders_(std::move(ringOrders)),
      sendChannels_(static_cast<size_t>(shape.ranks)),
      receiveChannels_(static_cast<size_t>(shape.ranks)) {}

memory::Block Connector::makeSenderBlock(int channels) {
  return arena_.allocate(static_cast<size_t>(channels) * kSenderBytes);
}

memory::Block Connector::makeReceiverBlock(int channels, uint32_t slotBytes) {
  return arena_.allocate(tailBytes(channels) + static_cast<size_t>(channels) * slots_ * slotBytes);
}

device::Connection Connector::connectionOf(std::byte* senderBlock, std::byte* receiverBlock,
                                           int channel, int channels, uint32_t slotBytes,
                                           bool direct) const {
  const size_t index = static_cast<size_t>(channel);
  device::Connection connection{};
  std::byte* sender = senderBlock + index * kSenderBytes;
  connection.head = reinterpret_cast<uint64_t*>(sender);
  connection.offer = direct ? reinterpret_cast<uint64_t*>(sender + kLineBytes) : nullptr;
  connection.tail = reinterpret_cast<uint64_t*>(receiverBlock + index * kLineBytes);
  connection.slots = receiverBlock + tailBytes(channels) + index * slots_ * slotBytes;
  return connection;
}

void Connector::sendBlock(int peer, uint64_t tag, const memory::Block& block) {
  bootstrap_.send(peer, tag, std::as_bytes(std::span(&block.shared, 1)));
}

std::byte* Connector::receiveBlock(int peer, uint64_t tag) {
  const std::vector<std::byte> message = bootstrap_.receive(peer, tag);
  memory::SharedBlock block;
  if (message.size() != sizeof(block)) {
    throw internalError("A connection message has {} bytes instead of {}", message.size(),
                        sizeof(block))
        .rank(shape_.rank)
        .peer(peer)
        .remedy("Use the same version of the library on all ranks");
  }
  std::memcpy(&block, message.data(), sizeof(block));
  return mappings_.map(block);
}

// Both ends of a connection call it when they have mapped what the other one gave.
void Connector::confirm(int peer) {
  bootstrap_.send(peer, kMappedTag, {});
  unconfirmed_.push_back(peer);
}

void Connector::waitUntilMapped() {
  for (int peer : std::exchange(unconfirmed_, {})) bootstrap_.receive(peer, kMappedTag);
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
  struct Pending {
    int channel, position, previous, next;
    std::vector<int32_t> order;
    memory::Block sender, receiver;
  };
  std::vector<Pending> pending;
  for (int channel = ringChannels_; channel < channels; channel++) {
    const auto& ring = ringOrders_[static_cast<size_t>(channel)];
    const auto mine = std::find(ring.begin(), ring.end(), shape_.rank);
    Pending entry{};
    entry.channel = channel;
    entry.position = static_cast<int>(mine - ring.begin());
    entry.order.assign(mine, ring.end());
    entry.order.insert(entry.order.end(), ring.begin(), mine);
    entry.next = entry.order[1];
    entry.previous = entry.order.back();
    entry.sender = makeSenderBlock(1);
    entry.receiver = makeReceiverBlock(1, shape_.slotBytes);
    sendBlock(entry.next, tagOf(Purpose::ring, Role::sender, channel), entry.sender);
    sendBlock(entry.previous, tagOf(Purpose::ring, Role::receiver, channel), entry.receiver);
    pending.push_back(std::move(entry));
  }
  for (const Pending& entry : pending) {
    std::byte* nextReceiver =
        receiveBlock(entry.next, tagOf(Purpose::ring, Role::receiver, entry.channel));
    std::byte* previousSender =
        receiveBlock(entry.previous, tagOf(Purpose::ring, Role::sender, entry.channel));
    tables_.setRing(
        entry.channel,
        connectionOf(previousSender, entry.receiver.address, 0, 1, shape_.slotBytes, false),
        connectionOf(entry.sender.address, nextReceiver, 0, 1, shape_.slotBytes, false),
        entry.order, entry.position);
    confirm(entry.next);
    confirm(entry.previous);
  }
  ringChannels_ = channels;
}

int& Connector::connectedChannels(const plan::PeerUse& use) {
  return (use.sends ? sendChannels_ : receiveChannels_)[static_cast<size_t>(use.peer)];
}

void Connector::connectPeers(const std::vector<plan::PeerUse>& uses) {
  struct Pending {
    plan::PeerUse use;  // with the channels that are new
    memory::Block mine;
  };
  // Messages to one peer grow the connection in the order of the group, on both ends alike.
  std::vector<Pending> pending;
  for (const plan::PeerUse& use : uses) {
    int& connected = connectedChannels(use);
    if (use.channels <= connected) continue;
    const int added = use.channels - connected;
    Pending entry{
        {use.peer, use.sends, use.firstChannel + connected, added},
        use.sends ? makeSenderBlock(added) : makeReceiverBlock(added, shape_.peerSlotBytes)};
    connected = use.channels;
    sendBlock(
        use.peer,
        tagOf(Purpose::peer, use.sends ? Role::sender : Role::receiver, entry.use.firstChannel),
        entry.mine);
    pending.push_back(entry);
  }
  for (const Pending& entry : pending) {
    const plan::PeerUse& use = entry.use;
    std::byte* theirs = receiveBlock(
        use.peer,
        tagOf(Purpose::peer, use.sends ? Role::receiver : Role::sender, use.firstChannel));
    std::vector<device::Connection> connections;
    for (int channel = 0; channel < use.channels; channel++) {
      connections.push_back(connectionOf(use.sends ? entry.mine.address : theirs,
                                         use.sends ? theirs : entry.mine.address, channel,
                                         use.channels, shape_.peerSlotBytes, isDirect(use.peer)));
    }
    tables_.setPeer(use.sends, use.peer, use.firstChannel, connections);
    confirm(use.peer);
  }
}

void Connector::connectOneShot() {
  const memory::Block scratch =
      arena_.allocate(device::oneShotScratchBytes(shape_.ranks, shape_.situation.oneShotMaxBytes));
  const memory::Block epochs = arena_.allocate(device::kOneShotMaxBlocks * sizeof(uint32_t));
  const uint64_t tag = tagOf(Purpose::oneShot, Role::receiver, 0);
  for (int peer = 0; peer < shape_.ranks; peer++) {
    if (peer != shape_.rank) sendBlock(peer, tag, scratch);
  }
  for (int peer = 0; peer < shape_.ranks; peer++) {
    oneShot_.scratch[static_cast<size_t>(peer)] =
        peer == shape_.rank ? scratch.address : receiveBlock(peer, tag);
    if (peer != shape_.rank) confirm(peer);
  }
  oneShot_.epochs = reinterpret_cast<uint32_t*>(epochs.address);
  oneShotReady_ = true;
}

}  // namespace unisono::transport
