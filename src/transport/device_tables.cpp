// SPDX-License-Identifier: Apache-2.0
#include "transport/device_tables.h"

#include <algorithm>

#include "base/error.h"
#include "base/math.h"

namespace unisono::transport {
namespace {

// Hands out aligned pieces of one range.
class Pieces {
 public:
  template <typename T>
  size_t add(size_t count) {
    size_t offset = roundUp(bytes_, alignof(T));
    bytes_ = offset + count * sizeof(T);
    return offset;
  }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_ = 0;
};

}  // namespace

DeviceTables::DeviceTables(runtime::Runtime& runtime, int device, memory::Arena& arena,
                           const Sizes& sizes, device::DeviceCommunicator head)
    : runtime_(runtime), arena_(arena), sizes_(sizes), peers_(static_cast<size_t>(sizes.channels)) {
  const size_t ranks = static_cast<size_t>(sizes.ranks),
               channels = static_cast<size_t>(sizes.channels),
               peers = ranks * static_cast<size_t>(sizes.peerChannels);
  Pieces pieces;
  const size_t communicator = pieces.add<device::DeviceCommunicator>(1);
  const size_t channelTable = pieces.add<device::Channel>(channels);
  const size_t sendTable = pieces.add<device::Fifo>(peers);
  const size_t receiveTable = pieces.add<device::Fifo>(peers);
  const bool lines = head.peerLineSlotBytes > 0;
  const size_t sendLineTable = pieces.add<device::Fifo>(lines ? peers : 0);
  const size_t receiveLineTable = pieces.add<device::Fifo>(lines ? peers : 0);
  const size_t marks = pieces.add<uint64_t>(2 * device::kMarkWords);
  const size_t orders = pieces.add<int32_t>(channels * ranks);
  stream_ = runtime.createStream(device);

  std::byte* base = arena.allocate(pieces.bytes()).address;
  communicator_ = reinterpret_cast<device::DeviceCommunicator*>(base + communicator);
  marks_ = reinterpret_cast<uint64_t*>(base + marks);
  channels_ = reinterpret_cast<device::Channel*>(base + channelTable);
  send_ = reinterpret_cast<device::Fifo*>(base + sendTable);
  receive_ = reinterpret_cast<device::Fifo*>(base + receiveTable);
  if (lines) {
    sendLines_ = reinterpret_cast<device::Fifo*>(base + sendLineTable);
    receiveLines_ = reinterpret_cast<device::Fifo*>(base + receiveLineTable);
  }
  orders_ = reinterpret_cast<int32_t*>(base + orders);
  head.channels = channels_;
  head.send = send_;
  head.receive = receive_;
  head.sendLines = sendLines_;
  head.receiveLines = receiveLines_;
  head.peerChannels = sizes.peerChannels;
  write(communicator_, &head, sizeof(head));
}

int32_t DeviceTables::connectionTo(int channel, int peer) {
  std::vector<int>& peers = peers_[static_cast<size_t>(channel)];
  const auto found = std::find(peers.begin(), peers.end(), peer);
  if (found != peers.end()) return static_cast<int32_t>(found - peers.begin());
  if (peers.size() == device::kMaxConnections) {
    throw internalError("Channel {} has more than {} peers", channel, device::kMaxConnections);
  }
  peers.push_back(peer);
  const auto index = static_cast<int32_t>(peers.size() - 1);
  const int32_t rank = peer;
  write(&channels_[channel].connections[index].peer, &rank, sizeof(rank));
  return index;
}

void DeviceTables::setFifos(bool sends, int channel, int peer,
                            std::span<const device::Fifo> fifos) {
  device::Connection& connection = channels_[channel].connections[connectionTo(channel, peer)];
  write(sends ? connection.send : connection.receive, fifos.data(), fifos.size_bytes());
}

void DeviceTables::setRing(int channel, int previous, int next, const std::vector<int32_t>& order,
                           int position) {
  int32_t* orderOnDevice = orders_ + static_cast<size_t>(channel) * order.size();
  write(orderOnDevice, order.data(), order.size() * sizeof(int32_t));
  const device::Ring ring{connectionTo(channel, previous), connectionTo(channel, next),
                          orderOnDevice, position};
  write(&channels_[channel].ring, &ring, sizeof(ring));
}

device::Tree DeviceTables::treeAt(int channel, const topology::TreePlace& place) {
  device::Tree tree{place.up < 0 ? -1 : connectionTo(channel, place.up), {}};
  for (size_t i = 0; i < device::kMaxTreeChildren; i++) {
    tree.down[i] = i < place.down.size() ? connectionTo(channel, place.down[i]) : -1;
  }
  return tree;
}

void DeviceTables::setTree(device::Tree device::Channel::*member, int channel,
                           const topology::TreePlace& place) {
  const device::Tree tree = treeAt(channel, place);
  write(&(channels_[channel].*member), &tree, sizeof(tree));
}

void DeviceTables::setChain(int channel, const topology::TreePlace& place, bool hasNetwork) {
  device::Tree chain = treeAt(channel, place);
  if (hasNetwork) chain.up = connectionTo(channel, device::kNetworkPeer);
  write(&channels_[channel].chain, &chain, sizeof(chain));
}

void DeviceTables::setHeads(device::Multicast* device::DeviceCommunicator::*member,
                            const HeadBuffers& buffers) {
  const auto channels = static_cast<size_t>(buffers.channels);
  const size_t count = buffers.members.size(), nodes = buffers.heads.front().size();
  Pieces pieces;
  const size_t headOffset = pieces.add<device::Multicast>(1);
  const size_t channelOffset = pieces.add<device::MulticastChannel>(channels);
  const size_t memberOffset = pieces.add<std::byte*>(channels * count);
  const size_t rankOffset = pieces.add<int32_t>(buffers.heads.size() * nodes);
  std::byte* base = arena_.allocate(pieces.bytes()).address;
  auto* members = reinterpret_cast<std::byte**>(base + memberOffset);
  std::vector<device::MulticastChannel> table(channels);
  std::vector<std::byte*> addresses;
  for (size_t c = 0; c < channels; c++) {
    const auto channel = static_cast<int>(c);
    const size_t offset = c * buffers.layout.bytes();
    for (std::byte* address : buffers.members) addresses.push_back(address + offset);
    table[c] = {buffers.own + offset,
                buffers.all == nullptr ? nullptr : buffers.all + offset,
                members + c * count,
                {},
                treeAt(channel, buffers.trees[c % buffers.trees.size()]),
                treeAt(channel, {})};
    if (buffers.networkPeer != 0 && buffers.head >= 0) {
      table[c].network.up = connectionTo(channel, buffers.networkPeer);
    }
  }
  std::vector<int32_t> ranks;
  for (const std::vector<int>& ofHead : buffers.heads) {
    ranks.insert(ranks.end(), ofHead.begin(), ofHead.end());
  }
  auto* rankOf = reinterpret_cast<int32_t*>(base + rankOffset);
  auto* onDevice = reinterpret_cast<device::Multicast*>(base + headOffset);
  const device::Multicast heads{buffers.layout,
                                buffers.head,
                                static_cast<int32_t>(count),
                                static_cast<int32_t>(nodes),
                                rankOf,
                                reinterpret_cast<device::MulticastChannel*>(base + channelOffset)};
  write(heads.channels, table.data(), std::span(table).size_bytes());
  write(members, addresses.data(), std::span(addresses).size_bytes());
  write(rankOf, ranks.data(), std::span(ranks).size_bytes());
  write(onDevice, &heads, sizeof(heads));
  write(&(communicator_->*member), &onDevice, std::span(&onDevice, 1).size_bytes());
}

void DeviceTables::setPeer(bool sends, device::Protocol protocol, int peer, int firstChannel,
                           std::span<const device::Fifo> fifos) {
  const bool lines = protocol == device::Protocol::ll;
  device::Fifo* table = sends ? (lines ? sendLines_ : send_) : (lines ? receiveLines_ : receive_);
  write(table + peer * sizes_.peerChannels + firstChannel, fifos.data(), fifos.size_bytes());
}

void DeviceTables::write(void* destination, const void* source, size_t bytes) {
  runtime_.copyAsync(destination, source, bytes, stream_.get());
  runtime_.synchronize(stream_.get());
}

}  // namespace unisono::transport
