// SPDX-License-Identifier: Apache-2.0
#include "transport/connector.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "device/multicast.h"
#include "plan/direct_plan.h"
#include "transport/mapped/mapped_transport.h"
#include "transport/transports.h"

namespace unisono::transport {
namespace {

constexpr uint64_t kRing = 1, kPeer = 2, kDirect = 3, kTree = 5, kMulticast = 6, kHeadTree = 7,
                   kRail = 9, kChain = 10, kCollnetDirect = 12, kWide = 14;

// The ports by which two ranks exchange data of a channel if these are to be near to them, and who
// sends: -1 for the sender itself.
struct NearPorts {
  int out, in, forwarder;
};
NearPorts nearPorts(const PeerPlace& from, const PeerPlace& to, int sender, int channel) {
  const auto take = [channel](const std::vector<int>& ports) {
    return ports.empty() ? -1 : ports[static_cast<size_t>(channel) % ports.size()];
  };
  NearPorts result{take(from.messagePorts), take(to.messagePorts), -1};
  const auto aligned = static_cast<size_t>(result.in);
  if (from.host != to.host && result.in >= 0 && aligned < from.messageForwarders.size() &&
      from.messageForwarders[aligned] >= 0) {
    result.out = result.in;
    result.forwarder = from.messageForwarders[aligned];
    if (result.forwarder == sender) result.forwarder = -1;
  }
  return result;
}

}  // namespace

PeerLink linkBetween(const PeerLinks& links, const std::vector<PeerPlace>& places, int a, int b) {
  if (places[static_cast<size_t>(a)].host != places[static_cast<size_t>(b)].host) {
    return {.atomics = false, .transport = TransportKind::network};
  }
  const auto entry = links.find(std::minmax(a, b));
  return entry == links.end() ? PeerLink{} : entry->second;
}

Connector::Connector(runtime::Runtime& runtime, bootstrap::Bootstrap& bootstrap,
                     memory::Arena& arena, memory::MappingCache& mappings, DeviceTables& tables,
                     const plan::CommConfig& config, uint32_t slots,
                     const std::vector<PeerPlace>& places, const PeerLinks& links,
                     const ChannelGraphs& graphs, TransportOptions options)
    : runtime_(runtime),
      arena_(arena),
      tables_(tables),
      config_(config),
      slots_(slots),
      places_(places),
      links_(links),
      graphs_(graphs),
      options_(std::move(options)),
      context_{runtime_, bootstrap, arena_, blocks_, config_, slots_, places_, links_, options_},
      blocks_(bootstrap, mappings, context_),
      sendConnected_(static_cast<size_t>(config.ranks)),
      receiveConnected_(static_cast<size_t>(config.ranks)) {
  if (forwardsMessages()) transportOf(TransportKind::network).forwardMessages();
}

std::vector<ConnectionGroup> groupsForMessages(const plan::CommConfig& config,
                                               const std::vector<PeerPlace>& places, int sender,
                                               int receiver) {
  const PeerPlace &from = places[static_cast<size_t>(sender)],
                  &to = places[static_cast<size_t>(receiver)];
  const plan::MessageSlots slots = plan::messageSlots(config, sender, receiver);
  std::vector<ConnectionGroup::FifoShape> fifos{{device::Protocol::simple, slots.bytes}};
  if (slots.lineBytes > 0) fifos.push_back({device::Protocol::ll, slots.lineBytes});
  std::map<int, ConnectionGroup> groups;  // by forwarder
  for (int channel = 0; channel < plan::channelsBetween(config, sender, receiver); channel++) {
    const auto [out, in, forwarder] = nearPorts(from, to, sender, channel);
    const auto [entry, isNew] = groups.try_emplace(
        forwarder, ConnectionGroup{sender, receiver, kPeer, {}, fifos, forwarder, true});
    entry->second.channels.push_back(channel);
    entry->second.ports.push_back(config.rank == receiver ? in : out);
  }
  std::vector<ConnectionGroup> result;
  for (auto& [forwarder, group] : groups) result.push_back(std::move(group));
  return result;
}

// Whether other ranks of its host ask a rank to forward messages.
bool Connector::forwardsMessages() const {
  const uint64_t host = context_.own().host;
  bool isAsked = false, hasOthers = false;
  for (size_t rank = 0; rank < places_.size(); rank++) {
    const PeerPlace& place = places_[rank];
    hasOthers |= place.host != host;
    isAsked |=
        place.host == host && static_cast<int>(rank) != config_.rank &&
        std::ranges::find(place.messageForwarders, config_.rank) != place.messageForwarders.end();
  }
  return isAsked && hasOthers;
}

Transport& Connector::transportOf(const ConnectionGroup& group) {
  return transportOf(context_.linkBetween(group.sender, group.receiver).transport);
}

Transport& Connector::transportOf(TransportKind kind) {
  auto& transport = transports_[static_cast<size_t>(kind)];
  if (transport == nullptr) transport = makeTransport(kind, context_);
  return *transport;
}

void Connector::noteLaunch() {
  for (const auto& transport : transports_) {
    if (transport != nullptr) transport->noteLaunch();
  }
  if (reducer_ != nullptr) reducer_->noteLaunch();
}

void Connector::drain() {
  for (const auto& transport : transports_) {
    if (transport != nullptr) transport->drain();
  }
  if (reducer_ != nullptr) reducer_->drain();
}

std::vector<std::shared_ptr<Service>> Connector::handOver() {
  std::vector<std::shared_ptr<Service>> services;
  for (const auto& transport : transports_) {
    auto service = transport == nullptr ? nullptr : transport->handOver();
    if (service != nullptr) services.push_back(std::move(service));
  }
  return services;
}

void Connector::close() {
  for (const auto& transport : transports_) {
    if (transport != nullptr) transport->close();
  }
  if (reducer_ != nullptr) reducer_->close();
}

// Sends, and never waits.
Connector::Making Connector::begin(ConnectionGroup group) {
  auto pending = transportOf(group).setup(group);
  return {std::move(group), std::move(pending)};
}

// So that no rank waits for a sender before it has called its own receivers, or for its forwarder
// before it has accepted all who send to it: a forwarder may wait for that.
void Connector::putInOrder(std::vector<Making>& makings) const {
  std::ranges::stable_sort(makings, {}, [this](const Making& making) {
    const ConnectionGroup& group = making.group;
    if (group.sender == config_.rank) return group.forwarder < 0 ? 0 : 2;
    return group.forwarder == config_.rank ? 0 : 1;
  });
}

// Waits for the other end, and returns the FIFOs of each channel.
std::vector<device::Fifo> Connector::complete(const Making& making) {
  const ConnectionGroup& group = making.group;
  const bool sends = group.sender == config_.rank;
  const bool network =
      context_.linkBetween(group.sender, group.receiver).transport == TransportKind::network;
  std::vector<device::Fifo> fifos = making.pending->connect();
  const size_t count = group.fifos.size();
  for (size_t f = 0; f < fifos.size(); f++) {
    const device::Protocol protocol = group.fifos[f % count].protocol;
    const bool lines =
        protocol == device::Protocol::ll || (protocol == device::Protocol::ll128 && !network);
    if (!group.fifos[f % count].isUsed() || (lines && !network && sends)) continue;
    fifoCounters_.push_back({sends ? group.receiver : group.sender, group.channels[f / count],
                             sends, fifos[f].tail, fifos[f].head, network, lines,
                             making.pending->portOf(f), protocol, fifos[f].slots,
                             group.fifos[f % count].slotBytes});
  }
  return fifos;
}

bool Connector::isConnected(const plan::Needs& needs) const {
  if ((needs.rings && !ringsConnected_) || (needs.trees && !treesConnected_) ||
      (needs.rails && !railsConnected_) || (needs.chains && !chainsConnected_) ||
      (needs.multicast && multicast_ == nullptr) ||
      (needs.collnetDirect && !collnetDirectConnected_) ||
      (needs.direct & ~directConnected_) != 0 || (needs.wide & ~wideConnected_) != 0) {
    return false;
  }
  return std::all_of(needs.peers.begin(), needs.peers.end(), [this](const plan::PeerUse& use) {
    return (use.sends ? sendConnected_ : receiveConnected_)[static_cast<size_t>(use.peer)];
  });
}

void Connector::connect(const plan::Needs& needs) {
  if (needs.rings && !ringsConnected_) connectRings();
  if (needs.trees && !treesConnected_) {
    connectTrees(kTree, graphs_.trees, &device::Channel::tree, Ports::ofChannels);
    treesConnected_ = true;
  }
  if (needs.rails && !railsConnected_) {
    connectTrees(kRail, graphs_.rails, &device::Channel::rail, Ports::nearRanks);
    railsConnected_ = true;
  }
  if (needs.chains && !chainsConnected_) connectChains();
  if (needs.multicast && multicast_ == nullptr) connectMulticast();
  if (needs.collnetDirect && !collnetDirectConnected_) connectCollnetDirect();
  if ((needs.direct & ~directConnected_) != 0) connectDirect(needs.direct);
  if ((needs.wide & ~wideConnected_) != 0) connectWide(needs.wide);
  connectPeers(needs.peers);
  blocks_.verifyLinks();
}

// Notes a hop of a channel if this rank has a part in it and it is not connected yet. Both ends and
// whoever might forward know all hops that are connected, however they are.
void Connector::addHop(Hops& hops, int channel, int from, int to, Ports ports) {
  const auto forwarderBy = [&](Ports by) {
    if (by == Ports::ofChannels) return context_.forwarderOf(from, to, channel);
    return nearPorts(places_[static_cast<size_t>(from)], places_[static_cast<size_t>(to)], from,
                     channel)
        .forwarder;
  };
  const int forwarder = forwarderBy(ports), rank = config_.rank;
  const bool takesPart = from == rank || to == rank || forwarder == rank ||
                         context_.linkBetween(from, to).through == rank;
  const bool mightForward =
      forwarderBy(Ports::ofChannels) == rank || forwarderBy(Ports::nearRanks) == rank;
  if (!takesPart && !mightForward) return;
  if (connectedHops_.emplace(channel, from, to).second && takesPart) {
    hops[{from, to, forwarder}].push_back(channel);
  }
}

// Channels with the same hop are one group.
void Connector::connectHops(uint64_t purpose, const Hops& hops, Ports ports) {
  std::vector<ConnectionGroup::FifoShape> shapes;
  for (int p = 0; p < device::kProtocols; p++) {
    shapes.push_back({static_cast<device::Protocol>(p), config_.slotBytes[static_cast<size_t>(p)]});
  }
  std::vector<Making> makings;
  for (const auto& [ends, channels] : hops) {
    const auto& [from, to, forwarder] = ends;
    ConnectionGroup group{from, to, purpose, channels, shapes, forwarder};
    for (size_t i = 0; ports == Ports::nearRanks && i < channels.size(); i++) {
      const auto near = nearPorts(places_[static_cast<size_t>(from)],
                                  places_[static_cast<size_t>(to)], from, channels[i]);
      group.ports.push_back(config_.rank == to ? near.in : near.out);
    }
    makings.push_back(begin(std::move(group)));
  }
  putInOrder(makings);
  for (const Making& making : makings) {
    const ConnectionGroup& group = making.group;
    const bool sends = group.sender == config_.rank;
    if (group.forwarder == config_.rank) making.pending->connect();
    if (!sends && group.receiver != config_.rank) continue;
    const std::vector<device::Fifo> fifos = complete(making);
    for (size_t i = 0; i < group.channels.size(); i++) {
      tables_.setFifos(sends, group.channels[i], sends ? group.receiver : group.sender,
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

void Connector::addTreeHops(Hops& hops, int channel, const std::vector<topology::TreePlace>& tree,
                            Ports ports) {
  for (size_t rank = 0; rank < tree.size(); rank++) {
    const int child = static_cast<int>(rank), parent = tree[rank].up;
    if (parent < 0) continue;
    addHop(hops, channel, child, parent, ports);
    addHop(hops, channel, parent, child, ports);
  }
}

void Connector::connectTrees(uint64_t purpose, const Trees& trees,
                             device::Tree device::Channel::*member, Ports ports) {
  Hops hops;
  for (size_t channel = 0; channel < trees.size(); channel++) {
    addTreeHops(hops, static_cast<int>(channel), trees[channel], ports);
  }
  connectHops(purpose, hops, ports);
  for (size_t channel = 0; channel < trees.size(); channel++) {
    tables_.setTree(member, static_cast<int>(channel),
                    trees[channel][static_cast<size_t>(config_.rank)]);
  }
}

// The groups for messages that both ends will have connected.
void Connector::beginForMessages(int from, int to, std::vector<Making>& makings) {
  if (from == config_.rank) sendConnected_[static_cast<size_t>(to)] = true;
  if (to == config_.rank) receiveConnected_[static_cast<size_t>(from)] = true;
  for (ConnectionGroup& group : groupsForMessages(config_, places_, from, to)) {
    makings.push_back(begin(std::move(group)));
  }
}

void Connector::connectThrough() {
  std::vector<Making> makings;
  for (const auto& [pair, link] : links_) {
    if (link.through < 0) continue;
    for (const auto& [from, to] : {pair, std::pair(pair.second, pair.first)}) {
      if (config_.rank != from && config_.rank != to && config_.rank != link.through) continue;
      beginForMessages(from, to, makings);
    }
  }
  putInOrder(makings);
  for (const Making& making : makings) completeForMessages(making);
  blocks_.verifyLinks();
}

void Connector::connectPeers(const std::vector<plan::PeerUse>& uses) {
  std::vector<Making> makings;
  for (const plan::PeerUse& use : uses) {
    if ((use.sends ? sendConnected_ : receiveConnected_)[static_cast<size_t>(use.peer)]) continue;
    if (use.sends) {
      beginForMessages(config_.rank, use.peer, makings);
    } else {
      beginForMessages(use.peer, config_.rank, makings);
    }
  }
  putInOrder(makings);
  for (const Making& making : makings) completeForMessages(making);
}

void Connector::completeForMessages(const Making& making) {
  const ConnectionGroup& group = making.group;
  const bool sends = group.sender == config_.rank;
  if (!sends && group.receiver != config_.rank) return;
  const std::vector<device::Fifo> made = complete(making);
  const int first = plan::firstMessageChannel(config_, group.sender, group.receiver);
  const size_t count = group.fifos.size(), channels = group.channels.size();
  for (size_t i = 0; i < count; i++) {
    for (size_t begin = 0, end = 0; begin < channels; begin = end) {
      std::vector<device::Fifo> run;  // of consecutive channels
      do {
        run.push_back(made[end * count + i]);
        run.back().slotBytes = group.fifos[i].slotBytes;
        end++;
      } while (end < channels && group.channels[end] == group.channels[end - 1] + 1);
      tables_.setPeer(sends, group.fifos[i].protocol, sends ? group.receiver : group.sender,
                      first + group.channels[begin], run);
    }
  }
}

// One buffer per rank for all channels.
HeadBuffers Connector::connectHeads(uint64_t purpose, const HeadGraph& graph,
                                    const plan::HeadShape& shape, int networkPeer) {
  HeadBuffers buffers;
  buffers.layout = {static_cast<uint32_t>(graph.heads.size()), slots_, shape.slotBytes};
  buffers.channels = shape.channels;
  buffers.heads = graph.heads;
  const auto node = static_cast<size_t>(graph.nodeOf[static_cast<size_t>(config_.rank)]);
  for (size_t head = 0; head < graph.heads.size(); head++) {
    if (graph.heads[head][node] == config_.rank) buffers.head = static_cast<int>(head);
  }
  if (graph.hasNetwork) {
    buffers.networkPeer = networkPeer;
    for (int channel = 0; channel < shape.channels; channel++) {
      for (const auto& heads : graph.heads) connectNetwork(networkPeer, channel, heads);
    }
  }
  const memory::Block own = arena_.allocate(buffers.bytes());
  buffers.own = own.address;
  for (const int rank : graph.nodes[node]) {
    if (rank == config_.rank) continue;
    blocks_.send(rank, tagOf(purpose, true, config_.rank, rank), 0, own);
  }
  for (const int rank : graph.nodes[node]) {
    buffers.members.push_back(
        rank == config_.rank ? own.address
                             : blocks_.receive(rank, tagOf(purpose, true, rank, config_.rank), 0));
  }
  return buffers;
}

// Also connects the heads of different nodes.
void Connector::connectMulticast() {
  const HeadGraph& graph = graphs_.multicast;
  const plan::HeadShape& shape = config_.multicast;
  Hops hops;
  for (int channel = 0; channel < shape.channels; channel++) {
    addTreeHops(hops, channel, graph.trees[static_cast<size_t>(channel) % graph.trees.size()]);
  }
  connectHops(kHeadTree, hops);
  HeadBuffers buffers = connectHeads(kMulticast, graph, shape, device::kHeadNetworkPeer);
  for (size_t tree = 0; tree < graph.trees.size() && !graph.trees[tree].empty(); tree++) {
    buffers.trees[tree] = graph.trees[tree][static_cast<size_t>(config_.rank)];
  }
  const int device = places_[static_cast<size_t>(config_.rank)].device;
  auto address = runtime_.mapMulticast(device, buffers.members, buffers.bytes());
  buffers.all = static_cast<std::byte*>(address->address());
  tables_.setHeads(&device::DeviceCommunicator::multicast, buffers);
  multicast_ = std::move(address);
}

void Connector::connectCollnetDirect() {
  tables_.setHeads(&device::DeviceCommunicator::collNetDirect,
                   connectHeads(kCollnetDirect, graphs_.collnetDirect, config_.collnetDirect,
                                device::kDirectNetworkPeer));
  collnetDirectConnected_ = true;
}

void Connector::connectChains() {
  const ChainGraph& graph = graphs_.collnet;
  Hops hops;
  for (size_t channel = 0; channel < graph.chains.size(); channel++) {
    addTreeHops(hops, static_cast<int>(channel), graph.chains[channel]);
  }
  connectHops(kChain, hops);
  for (size_t channel = 0; channel < graph.chains.size(); channel++) {
    const auto& ofChannel = graph.heads[channel];
    connectNetwork(device::kNetworkPeer, static_cast<int>(channel), ofChannel);
    tables_.setChain(
        static_cast<int>(channel), graph.chains[channel][static_cast<size_t>(config_.rank)],
        std::find(ofChannel.begin(), ofChannel.end(), config_.rank) != ofChannel.end());
  }
  chainsConnected_ = true;
}

// Connects this rank to the network if it is one of `heads`, by node.
void Connector::connectNetwork(int peer, int channel, const std::vector<int>& heads) {
  if (std::find(heads.begin(), heads.end(), config_.rank) == heads.end()) return;
  if (reducer_ == nullptr) {
    if (options_.reducer == nullptr) throw internalError("A plan needs a network that reduces");
    reducer_ = options_.reducer->makeNetwork(context_);
  }
  constexpr size_t kSimple = plan::indexOf(device::Protocol::simple);
  const ReducingNetwork::Ends ends =
      reducer_->connect({peer, channel, heads, config_.slotBytes[kSimple]});
  for (const bool sends : {true, false}) {
    std::array<device::Fifo, device::kProtocols> fifos{};
    fifos[kSimple] = sends ? ends.send : ends.receive;
    tables_.setFifos(sends, channel, peer, fifos);
  }
  fifoCounters_.push_back({heads.front(), channel, true, ends.send.tail, ends.send.head, true,
                           false, ends.port, device::Protocol::simple, ends.send.slots,
                           config_.slotBytes[kSimple], peer, ends.receive.head});
}

void Connector::exchangeWindows(uint64_t purpose, const memory::Block& window,
                                device::DirectPeers peers, std::byte** theirs) {
  const auto forEachPeer = [&](auto visit) {
    for (int peer = 0; peer < plan::localRanks(config_) - 1; peer++) {
      if ((peers >> peer & 1) != 0) visit(peer, plan::rankOfLocalPeer(config_, peer));
    }
  };
  forEachPeer([&](int, int rank) {
    blocks_.send(rank, tagOf(purpose, true, config_.rank, rank), 0, window);
  });
  forEachPeer([&](int peer, int rank) {
    theirs[peer] = blocks_.receive(rank, tagOf(purpose, true, rank, config_.rank), 0);
  });
}

// Of the peers those that are not connected yet.
void Connector::connectDirect(device::DirectPeers peers) {
  if (direct_.positions == nullptr) {
    const int ranks = plan::localRanks(config_);
    directWindow_ = arena_.allocate(device::directWindowBytes(ranks, config_.directLineBits));
    direct_.window = directWindow_.address;
    const size_t positions = device::kDirectMaxBlocks * static_cast<size_t>(ranks - 1);
    direct_.positions = reinterpret_cast<device::DirectPosition*>(
        arena_.allocate(positions * sizeof(device::DirectPosition)).address);
  }
  exchangeWindows(kDirect, directWindow_, peers & ~directConnected_, direct_.theirs);
  directConnected_ |= peers;
}

// The same for LL128.
void Connector::connectWide(device::DirectPeers peers) {
  if (wide_.window == nullptr) {
    const int ranks = plan::localRanks(config_);
    wideWindow_ = arena_.allocate(
        device::wideWindowBytes(ranks, config_.wide.blocks, config_.wide.slotLines));
    const size_t rows = static_cast<size_t>(config_.wide.blocks) * static_cast<size_t>(ranks - 1);
    wide_.window = wideWindow_.address;
    wide_.steps = reinterpret_cast<device::WideSteps*>(
        arena_.allocate(rows * sizeof(device::WideSteps)).address);
    wide_.buffers = reinterpret_cast<device::PeerBuffers*>(
        arena_.allocate(rows * sizeof(device::PeerBuffers)).address);
    for (int peer = 0; peer < ranks - 1; peer++) {
      const Offers offers = offersBetween(context_, plan::rankOfLocalPeer(config_, peer));
      const auto bit = static_cast<device::DirectPeers>(1u << peer);
      if (offers.any) (offers.byAddress ? wide_.byAddress : wide_.byWindow) |= bit;
    }
  }
  exchangeWindows(kWide, wideWindow_, peers & ~wideConnected_, wide_.theirs);
  wideConnected_ |= peers;
}

}  // namespace unisono::transport
