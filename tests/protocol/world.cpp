// SPDX-License-Identifier: Apache-2.0
#include "world.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <numeric>
#include <optional>
#include <span>
#include <thread>

#include "base/error.h"
#include "bootstrap/unique_id.h"
#include "device/kernels.h"
#include "device/multicast.h"
#include "device/simt/common.h"
#include "plan/direct_plan.h"
#include "runtime/host/schedule.h"
#include "support/model.h"
#include "topology/double_tree.h"

namespace unisono::protocol {
namespace {

using runtime::HostGroupContext;
using runtime::host::HostRuntime;

// Runs `body(rank)` for all ranks at once and throws the first error.
template <typename Body>
void onEveryRank(int ranks, Body body) {
  std::vector<std::exception_ptr> errors(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; rank++) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (...) {
        errors[static_cast<size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

// The network that all worlds are connected through, each with as many of its ranks as it has.
bootstrap::Bootstrap& network(int rank) {
  static const auto kNetwork = [] {
    Settings settings;
    settings.socketInterface = "lo";
    settings.socketFamily = "AF_INET";
    const bootstrap::UniqueId id = bootstrap::createUniqueId(settings);
    std::vector<std::unique_ptr<bootstrap::Bootstrap>> ends(kMostRanks);
    onEveryRank(kMostRanks, [&](int r) {
      ends[static_cast<size_t>(r)] = bootstrap::Bootstrap::connect(id, r, kMostRanks, settings);
    });
    return ends;
  }();
  return *kNetwork[static_cast<size_t>(rank)];
}

// Of the flags of protocol LL.
constexpr uint64_t kFlagPeriod = uint64_t{1} << 31;

struct DelayArguments {
  uint64_t steps;
  uint32_t* flag;  // set at the end, if not null
};

void delay(const void* arguments, const HostGroupContext&) {
  const auto& work = *static_cast<const DelayArguments*>(arguments);
  for (uint64_t i = 0; i < work.steps; i++) {
    if (runsFibers()) {
      runtime::host::schedulePoint();
    } else {
      std::this_thread::yield();
    }
  }
  if (work.flag != nullptr) {
    runtime::host::store(work.flag, uint32_t{1}, std::memory_order_release);
  }
}

void launchDelay(const DelayArguments& arguments, runtime::Stream stream) {
  static const runtime::Kernel kKernel{"delay", nullptr, delay};
  runtime::LaunchShape shape;
  shape.argumentBytes = sizeof(arguments);
  testRuntime().launch(kKernel, shape, &arguments, stream);
}

}  // namespace

bool runsFibers() {
  static const bool kFibers = [] {
    const char* name = std::getenv("UNISONO_TEST_EXECUTOR");
    return name == nullptr || std::string(name) != "threads";
  }();
  return kFibers;
}

HostRuntime& testRuntime() {
  static HostRuntime runtime([] {
    Settings settings;
    settings.backend = "host";
    settings.hostExecutor = runsFibers() ? "fibers" : "threads";
    settings.hostDevices = kMostRanks;
    return settings;
  }());
  static const bool kOnce = (runtime.setDeadlockIsError(true), true);
  static_cast<void>(kOnce);
  return runtime;
}

void startSchedule(runtime::host::Schedule schedule) {
  if (!runsFibers()) return;
  schedule.onThisThread = true;
  testRuntime().setSchedule(schedule);
}

World::World(const Geometry& geometry, int ranks)
    : geometry_(geometry), members_(static_cast<size_t>(ranks)) {
  // Ranks connect on threads of their own, and wait there.
  startSchedule({});
  network(0);
  reducer_ = std::make_unique<SimulatedNetwork>(testRuntime(), geometry.slots);
  reducerStream_ = testRuntime().createStream(0);
  network_ = std::make_unique<PassingNetwork>(testRuntime());
  networkStream_ = testRuntime().createStream(0);
  onEveryRank(ranks, [this, ranks](int rank) { makeMember(rank, ranks); });
  nameMemory();
}

template <typename Visit>
void World::visitFifos(Visit visit) const {
  // The entry of `peer` in a channel of `rank`, or null.
  const auto connectionTo = [this](int rank, int channel, int peer) -> device::Connection* {
    constexpr auto kSimple = static_cast<int>(device::Protocol::simple);
    for (device::Connection& connection : tables(rank).channels[channel].connections) {
      const bool made =
          connection.send[kSimple].head != nullptr || connection.receive[kSimple].head != nullptr;
      if (made && connection.peer == peer) return &connection;
    }
    return nullptr;
  };
  for (const auto& stream : reducer_->streams()) {
    const auto& [peer, channel, heads, slotBytes] = stream->use;
    for (size_t node = 0; node < heads.size(); node++) {
      constexpr auto kSimple = static_cast<int>(device::Protocol::simple);
      device::Connection& head = *connectionTo(heads[node], channel, peer);
      visit({head.send[kSimple], stream->receive[node], size_t{slotBytes}, false, false,
             fmt::format("connection {} -> network, channel {}", heads[node], channel)});
      visit({stream->send[node], head.receive[kSimple], size_t{slotBytes}, false, false,
             fmt::format("connection network -> {}, channel {}", heads[node], channel)});
    }
  }
  for (int rank = 0; rank < ranks(); rank++) {
    for (int channel = 0; channel < geometry_.channels; channel++) {
      for (int peer = 0; peer < ranks(); peer++) {
        device::Connection* connection = connectionTo(rank, channel, peer);
        if (connection == nullptr || connection->send[0].head == nullptr) continue;
        if (geometry_.network && nodeOf(rank) != nodeOf(peer)) continue;
        device::Connection& theirs = *connectionTo(peer, channel, rank);
        for (int protocol = 0; protocol < device::kProtocols; protocol++) {
          visit({connection->send[protocol], theirs.receive[protocol],
                 size_t{tables(rank).slotBytes[protocol]},
                 protocol == static_cast<int>(device::Protocol::ll), false,
                 fmt::format("connection {} -> {}, channel {}, protocol {}", rank, peer, channel,
                             protocol)});
        }
      }
    }
    for (int peer = 0; peer < ranks(); peer++) {
      if (geometry_.network && nodeOf(rank) != nodeOf(peer)) continue;
      for (int channel = 0; channel < geometry_.peerChannels; channel++) {
        const int to = peer * geometry_.peerChannels + channel;
        const int from = rank * geometry_.peerChannels + channel;
        if (tables(rank).send[to].slots == nullptr) continue;
        const std::string name =
            fmt::format("connection for messages {} -> {}, channel {}", rank, peer, channel);
        device::Fifo& simple = tables(rank).send[to];
        visit({simple, tables(peer).receive[from], size_t{simple.slotBytes}, false, false, name});
        if (tables(rank).sendLines == nullptr) continue;
        device::Fifo& lines = tables(rank).sendLines[to];
        visit({lines, tables(peer).receiveLines[from], size_t{lines.slotBytes}, true, false,
               name + " over LL"});
      }
    }
  }
  if (geometry_.network) visitNetworkFifos(visit);
}

// Those that lead to other nodes, each once on either side.
template <typename Visit>
void World::visitNetworkFifos(Visit visit) const {
  std::map<const uint64_t*, device::Fifo*> ends;  // of kernels, by tail
  const auto add = [&](device::Fifo& fifo) {
    if (fifo.tail != nullptr) ends.emplace(fifo.tail, &fifo);
  };
  for (int rank = 0; rank < ranks(); rank++) {
    for (int channel = 0; channel < geometry_.channels; channel++) {
      for (device::Connection& connection : tables(rank).channels[channel].connections) {
        for (device::Fifo& fifo : connection.send) add(fifo);
        for (device::Fifo& fifo : connection.receive) add(fifo);
      }
    }
    for (device::Fifo* table : {tables(rank).send, tables(rank).receive, tables(rank).sendLines,
                                tables(rank).receiveLines}) {
      for (int i = 0; table != nullptr && i < ranks() * geometry_.peerChannels; i++) add(table[i]);
    }
  }
  int number = 0;
  for (PassingNetwork::Stream* stream : network_->streams()) {
    const bool hasLines = stream->protocol == device::Protocol::ll;
    const std::string name =
        fmt::format("network connection {}{}", number++, hasLines ? ", LL" : "");
    visit({*ends.at(stream->receive.tail), stream->receive, size_t{stream->slotBytes}, hasLines,
           true, name + " from its sender"});
    visit({stream->send, *ends.at(stream->send.tail), size_t{stream->slotBytes}, hasLines, false,
           name + " to its receiver"});
  }
}

// For reports.
void World::nameMemory() const {
  HostRuntime& runtime = testRuntime();
  visitFifos([&](const FifoPair& fifo) {
    const auto& [send, receive, slotBytes, hasLines, isContinued, which] = fifo;
    runtime.nameMemory(send.head, sizeof(*send.head), "head of " + which);
    runtime.nameMemory(send.tail, sizeof(*send.tail), "tail of " + which);
    runtime.nameMemory(&send.step, sizeof(send.step), "sender's step of " + which);
    runtime.nameMemory(&receive.step, sizeof(receive.step), "receiver's step of " + which);
    runtime.nameMemory(&send.agreed, sizeof(send.agreed), "agreed offer of " + which);
    if (send.offer != nullptr) {
      runtime.nameMemory(send.offer, 2 * sizeof(*send.offer), "offer of " + which);
      runtime.nameMemory(send.offer + 2, sizeof(*send.offer), "users of the offer of " + which);
      runtime.nameMemory(send.tail + 1, sizeof(*send.tail), "answer of " + which);
    }
    for (uint32_t slot = 0; slotBytes > 0 && slot < geometry_.slots; slot++) {
      runtime.nameMemory(send.slots + slot * slotBytes, slotBytes,
                         fmt::format("slot {} of {}", slot, which));
    }
  });
  for (int rank = 0; rank < ranks(); rank++) {
    const Member& member = members_[index(rank)];
    const device::DeviceCommunicator& sender = tables(rank);
    runtime.nameMemory(abortFlag(rank), sizeof(uint32_t), fmt::format("abort flag of {}", rank));
    runtime.nameMemory(&sender.stopped, sizeof(sender.stopped), fmt::format("stopped of {}", rank));
    nameHeads(rank, sender.multicast, "multicast");
    nameHeads(rank, sender.collNetDirect, "CollNet direct");
    nameWide(rank);
    const device::DirectMemory& memory = member.connector->direct();
    if (memory.positions == nullptr) continue;
    const size_t peers = index(plan::localRanks(member.config)) - 1;
    runtime.nameMemory(memory.positions,
                       device::kDirectMaxBlocks * peers * sizeof(device::DirectPosition),
                       fmt::format("positions of {}", rank));
    for (int peer = 0; peer < ranks(); peer++) {
      if (!plan::areOnOneNode(member.config, rank, peer)) continue;
      const size_t place = localRank(peer);
      runtime.nameMemory(memory.window + place * sizeof(uint32_t), sizeof(uint32_t),
                         fmt::format("acknowledgment {} -> {}", peer, rank));
      const size_t bytes = sizeof(device::Line) << geometry_.directLineBits;
      runtime.nameMemory(memory.window + device::kDirectHeaderBytes + place * bytes, bytes,
                         fmt::format("lines {} -> {}", peer, rank));
    }
  }
}

void World::nameWide(int rank) const {
  HostRuntime& runtime = testRuntime();
  const device::WideMemory& memory = members_[index(rank)].connector->wide();
  if (memory.window == nullptr) return;
  const plan::CommConfig& config = members_[index(rank)].config;
  const size_t peers = index(plan::localRanks(config)) - 1;
  const size_t fifoBytes =
      device::kWideSlots * size_t{geometry_.wide.slotLines} * device::kWideLineBytes;
  for (int block = 0; block < geometry_.wide.blocks; block++) {
    for (int peer = 0; peer < static_cast<int>(peers); peer++) {
      const int other = plan::rankOfLocalPeer(config, peer);
      const size_t fifo = index(block) * peers + index(peer);
      runtime.nameMemory(memory.steps + fifo, sizeof(device::WideSteps),
                         fmt::format("steps of {} and {}, block {}", rank, other, block));
      const size_t counter = index(block) * device::kDirectMaxRanks + localRank(other);
      runtime.nameMemory(memory.window + counter * sizeof(uint64_t), sizeof(uint64_t),
                         fmt::format("steps {} -> {} taken, block {}", rank, other, block));
      const auto* offer =
          reinterpret_cast<device::BufferOffer*>(memory.window + device::wideOffersAt()) + counter;
      runtime.nameMemory(offer, sizeof(offer->buffer),
                         fmt::format("offer {} -> {}, block {}", other, rank, block));
      runtime.nameMemory(&offer->answer, sizeof(offer->answer),
                         fmt::format("answer of {} to {}, block {}", other, rank, block));
      const size_t slots = index(peer * geometry_.wide.blocks + block);
      runtime.nameMemory(memory.window + device::wideHeaderBytes() + slots * fifoBytes, fifoBytes,
                         fmt::format("LL128 slots {} -> {}, block {}", other, rank, block));
    }
  }
}

void World::nameHeads(int rank, const device::Multicast* heads,
                      const std::string& algorithm) const {
  HostRuntime& runtime = testRuntime();
  if (heads == nullptr) return;
  const device::Multicast& multicast = *heads;
  const device::MulticastLayout& layout = multicast.layout;
  for (int c = 0; c < geometry_.channels; c++) {
    const device::MulticastChannel& channel = multicast.channels[c];
    const auto name = [&](uint64_t offset, size_t bytes, const std::string& what) {
      runtime.nameMemory(channel.own + offset, bytes,
                         fmt::format("{} at {}, channel {}, {}", what, rank, c, algorithm));
    };
    name(device::MulticastLayout::contributed(), sizeof(uint64_t), "contributed");
    name(device::MulticastLayout::gathered(), sizeof(uint64_t), "gathered");
    for (int head = 0; head < static_cast<int>(layout.heads); head++) {
      name(device::MulticastLayout::reduced(head), sizeof(uint64_t),
           fmt::format("reduced by {}", head));
      name(layout.broadcast(head), sizeof(uint64_t), fmt::format("broadcast by {}", head));
      for (uint64_t slot = 0; slot < layout.slots; slot++) {
        name(layout.contribution(head, slot), layout.slotBytes,
             fmt::format("contribution slot {} for {}", slot, head));
        name(layout.result(head, slot), layout.slotBytes,
             fmt::format("result slot {} of {}", slot, head));
      }
    }
    runtime.nameMemory(channel.step, sizeof(channel.step),
                       fmt::format("{} steps of {}, channel {}", algorithm, rank, c));
  }
}

void World::makeMember(int rank, int ranks) {
  HostRuntime& runtime = testRuntime();
  Member& member = members_[index(rank)];
  plan::CommConfig& config = member.config;
  config.rank = rank;
  config.ranks = ranks;
  config.channels = geometry_.channels;
  if (nodesOf(ranks) > 1) {
    std::vector<int> nodes;
    for (int r = 0; r < ranks; r++) nodes.push_back(nodeOf(r));
    config.nodes = std::make_shared<const plan::NodeRanks>(std::move(nodes));
  }
  config.directLineBits = geometry_.directLineBits;
  config.wide = geometry_.wide;
  config.wide.offerBytes = geometry_.wideOfferBytes;
  const plan::HeadShape shape{geometry_.channels, geometry_.slotBytes,
                              static_cast<int>(makeHeadGraph(ranks).heads.size())};
  if (geometry_.multicast && ranks > 1) {
    config.multicast = shape;
  }
  if (geometry_.collnet && nodesOf(ranks) > 1) config.collnetDirect = shape;
  config.slotBytes.fill(geometry_.slotBytes);
  config.peerSlots = {geometry_.slotBytes,
                      geometry_.peerLineBytes > 0 ? geometry_.slotBytes / 2 : 0};
  if (geometry_.network) {
    auto hosts = std::make_shared<std::vector<uint64_t>>();
    for (int r = 0; r < ranks; r++) hosts->push_back(static_cast<uint64_t>(nodeOf(r)));
    config.hosts = std::move(hosts);
    config.remoteSlots = std::exchange(
        config.peerSlots, {2 * config.peerSlots.bytes, 2 * config.peerSlots.lineBytes});
  }
  config.peerLineBytes = geometry_.peerLineBytes;
  config.slicesPerChunk = geometry_.slicesPerChunk;
  config.peerChannels = geometry_.peerChannels;
  config.channelsPerPeer = geometry_.channelsPerPeer;
  config.remoteChannelsPerPeer = geometry_.remoteChannelsPerPeer > 0
                                     ? geometry_.remoteChannelsPerPeer
                                     : geometry_.channelsPerPeer;
  config.minBytesPerPart = config.minRemoteBytesPerPart = geometry_.minBytesPerPart;
  config.directBytes = geometry_.directBytes;
  config.resultBytes = geometry_.directBytes / static_cast<uint64_t>(ranks);
  unisono::testing::setModel(config, {.minBytesPerChannel = geometry_.minBytesPerChannel,
                                      .lowLatencyTraffic = geometry_.lowLatencyMaxBytes,
                                      .nodes = nodesOf(ranks),
                                      .ranksPerNode = std::min(ranks, geometry_.ranksPerNode),
                                      .collnet = geometry_.collnet && nodesOf(ranks) > 1,
                                      .network = geometry_.network,
                                      .algorithms = geometry_.algorithms,
                                      .protocols = geometry_.protocols});

  member.abortFlag = runtime.allocatePinned(device::kAbortFlagWords * sizeof(uint32_t));
  device::DeviceCommunicator head{};
  head.rank = rank;
  head.ranks = ranks;
  std::copy(config.slotBytes.begin(), config.slotBytes.end(), head.slotBytes);
  head.peerLineSlotBytes = config.peerSlots.lineBytes;
  head.slots = geometry_.slots;
  head.abortFlag = abortFlag(rank);
  member.arena = std::make_unique<memory::Arena>(runtime, rank, 1 << 20);
  member.mappings = std::make_unique<memory::MappingCache>(runtime, rank);
  if (geometry_.windows) {
    const size_t entries = index(ranks) * device::kWindowSlots;
    head.windows = reinterpret_cast<device::MappedWindow*>(
        member.arena->allocate(entries * sizeof(device::MappedWindow)).address);
  }
  member.tables = std::make_unique<transport::DeviceTables>(
      runtime, rank, *member.arena,
      transport::DeviceTables::Sizes{ranks, geometry_.channels, geometry_.peerChannels}, head);
  member.stream = runtime.createStream(rank);
  member.mapper = runtime.createStream(rank);
  member.users = runtime.allocatePinned(sizeof(uint64_t));

  for (int r = 0; r < ranks; r++) {
    const auto number = static_cast<uint64_t>(r);
    const int node = geometry_.network ? nodeOf(r) : 0;
    member.places.push_back(
        {geometry_.oneProcess ? 1 : number, r, number, static_cast<uint64_t>(node)});
  }
  for (int a = 0; a < ranks; a++) {
    for (int b = a + 1; b < ranks; b++) member.links[{a, b}] = link(a, b);
  }
  member.graphs = makeGraphs(ranks);
  transport::TransportOptions options;
  options.reducer = driverOf(*reducer_);
  options.network = driverOf(*network_);
  options.isIdle = [] { return true; };  // no proxy moves anything
  member.connector = std::make_unique<transport::Connector>(
      runtime, network(rank), *member.arena, *member.mappings, *member.tables, config,
      geometry_.slots, member.places, member.links, member.graphs, std::move(options));
  member.connector->connectThrough();

  plan::Needs everything;
  if (geometry_.directLineBits > 0) everything.direct = plan::everyPeer(config);
  if (geometry_.wide.blocks > 0) everything.wide = plan::everyPeer(config);
  everything.rings = everything.trees = ranks > 1;
  everything.rails = !member.graphs.rails.empty();
  everything.multicast = config.multicast.channels > 0;
  everything.collnetDirect = config.collnetDirect.channels > 0;
  everything.chains = geometry_.collnet && nodesOf(ranks) > 1;
  for (int delta = 1; delta < ranks; delta++) {
    everything.peers.push_back({(rank + delta) % ranks, true});
    everything.peers.push_back({(rank + ranks - delta) % ranks, false});
  }
  member.connector->connect(everything);
}

// Every channel's ring is another one: forwards, backwards, and by strides where they exist. The
// trees have one to three children per rank.
transport::ChannelGraphs World::makeGraphs(int ranks) const {
  transport::ChannelGraphs graphs;
  graphs.multicast = graphs.collnetDirect = makeHeadGraph(ranks);
  graphs.collnet = makeChainGraph(ranks);
  for (int channel = 0; channel < geometry_.channels; channel++) {
    std::vector<int32_t> order(index(ranks));
    for (int i = 0; i < ranks; i++) {
      const int stride = channel == 1 ? ranks - 1 : channel == 2 && ranks % 3 != 0 ? 3 : 1;
      order[index(i)] = i * stride % ranks;
    }
    const int children = channel == 0 ? 2 : channel == 1 ? 3 : 1;
    std::vector<topology::TreePlace> tree(index(ranks));
    for (int i = 1; i < ranks; i++) {
      const int parent = order[index((i - 1) / children)];
      tree[index(order[index(i)])].up = parent;
      tree[index(parent)].down.push_back(order[index(i)]);
    }
    graphs.rings.push_back(order);
    graphs.trees.push_back(tree);
    if (nodesOf(ranks) > 1 && ranks % geometry_.ranksPerNode == 0) {
      graphs.rails.push_back(makeRails(ranks, channel % 2));
    }
  }
  return graphs;
}

std::vector<topology::TreePlace> World::makeRails(int ranks, int tree) const {
  std::vector<topology::TreePlace> places(index(ranks));
  for (int rail = 0; rail < geometry_.ranksPerNode; rail++) {
    std::vector<int> members;
    for (int r = rail; r < ranks; r += geometry_.ranksPerNode) members.push_back(r);
    for (size_t node = 0; node < members.size(); node++) {
      places[index(members[node])] =
          topology::doubleTreePlace(members, static_cast<int>(node), tree);
    }
  }
  return places;
}

// Chains run backwards on odd channels.
transport::ChainGraph World::makeChainGraph(int ranks) const {
  transport::ChainGraph graph;
  for (int channel = 0; channel < geometry_.channels; channel++) {
    auto& chains = graph.chains.emplace_back(index(ranks));
    auto& heads = graph.heads.emplace_back();
    for (int node = 0; node < nodesOf(ranks); node++) {
      std::vector<int> chain;
      for (int r = 0; r < ranks; r++) {
        if (nodeOf(r) == node) chain.push_back(r);
      }
      if (channel % 2 == 1) std::reverse(chain.begin(), chain.end());
      heads.push_back(chain.front());
      for (size_t i = 1; i < chain.size(); i++) {
        chains[index(chain[i])].up = chain[i - 1];
        chains[index(chain[i - 1])].down.push_back(chain[i]);
      }
    }
  }
  return graph;
}

// Nodes have as many heads as the smallest of them has ranks, each node others.
transport::HeadGraph World::makeHeadGraph(int ranks) const {
  const int nodes = nodesOf(ranks);
  const auto sizeOf = [&](int node) {
    return std::min(geometry_.ranksPerNode, ranks - node * geometry_.ranksPerNode);
  };
  const auto headOf = [&](int node, int head) {
    return node < 0 ? -1 : node * geometry_.ranksPerNode + (head + node) % sizeOf(node);
  };
  transport::HeadGraph graph;
  graph.hasNetwork = geometry_.collnet && nodes > 1;
  graph.nodes.resize(index(nodes));
  for (int r = 0; r < ranks; r++) {
    graph.nodeOf.push_back(nodeOf(r));
    graph.nodes[index(nodeOf(r))].push_back(r);
  }
  for (size_t tree = 0; tree < graph.trees.size(); tree++) {
    if (nodes > 1) graph.trees[tree].resize(index(ranks));
  }
  for (int head = 0; head < sizeOf(nodes - 1); head++) {
    std::vector<int>& ofNodes = graph.heads.emplace_back();
    for (int node = 0; node < nodes; node++) ofNodes.push_back(headOf(node, head));
    for (int node = 0; node < nodes && nodes > 1; node++) {
      for (size_t tree = 0; tree < graph.trees.size(); tree++) {
        const topology::TreeLinks links = topology::doubleTree(nodes, node, static_cast<int>(tree));
        topology::TreePlace& place = graph.trees[tree][index(headOf(node, head))];
        place.up = headOf(links.up, head);
        for (const int below : links.down) {
          if (below >= 0) place.down.push_back(headOf(below, head));
        }
      }
    }
  }
  return graph;
}

transport::PeerLink World::link(int a, int b) const {
  if (!geometry_.links || (a + b) % 3 == 0) return {};
  if ((a + b) % 3 == 1 || ranks() < 3) return {.read = true, .through = -1};
  int through = (a + b) % ranks();
  while (through == a || through == b) through = (through + 1) % ranks();
  return {.read = false, .through = through};
}

uint32_t* World::abortFlag(int rank) const {
  return static_cast<uint32_t*>(members_[index(rank)].abortFlag->hostAddress());
}

uint64_t World::randomStep(Past past, Random& random) const {
  if (past == Past::any && below(random, 4) != 0) {
    return below(random, 3) == 0 ? random() >> 8 : below(random, 16);
  }
  return kFlagPeriod * (1 + below(random, 8)) - below(random, 8);
}

void World::resetFifo(const FifoPair& fifo, uint64_t step, Random& random) {
  auto& [send, receive, slotBytes, hasLines, isContinued, name] = fifo;
  const uint64_t slots = geometry_.slots;
  send.step = receive.step = step;
  *send.head = step;
  *receive.tail = step;
  // What either end has seen of the other's counter: up to a step that it had passed by then.
  send.acquired = step - std::min(step, below(random, slots + 2));
  receive.acquired = step - std::min(step, below(random, slots + 2));
  if (send.offer != nullptr) {
    *send.offer = 0;
    send.offer[2] = 0;
    send.agreed = random();
    receive.agreed = random();
    receive.tail[1] = random();
  }
  for (uint64_t slot = 0; send.hasProxy != 0 && slot < slots; slot++) {
    const auto bytes = static_cast<uint32_t>(below(random, slotBytes));
    const uint64_t ago = (step - 1 - slot) % slots + 1;  // its last step
    send.tail[device::kReportsWord + slot] =
        !hasLines ? device::packReport({bytes, device::Operation::allReduce, device::DataType::int8,
                                        device::Reduction::min})
        : ago <= step ? device::packLineReport(step - ago, bytes)
                      : 0;
  }
  std::memset(receive.slots, static_cast<int>(below(random, 256)), slots * slotBytes);
  if (!hasLines) return;
  // Each line was last stored in some step of its slot since that was cleared.
  for (uint64_t slot = 0; slot < slots; slot++) {
    // The slot was cleared in the first step of it in this period, or in the one before.
    uint64_t first = step / kFlagPeriod * kFlagPeriod + slot;
    if (first >= step) first -= std::min(first - slot, kFlagPeriod);
    first += slots;
    const uint64_t times = step > first ? (step - first + slots - 1) / slots : 0;
    auto* line = reinterpret_cast<device::Line*>(receive.slots + slot * slotBytes);
    for (size_t i = 0; i < slotBytes / sizeof(device::Line); i++) {
      const uint64_t ago = below(random, 3);
      const bool old = below(random, 2) == 0;
      uint32_t flag = 0;
      if (ago < times) {
        const uint64_t stored = first + (old ? ago : times - 1 - ago) * slots;
        flag = static_cast<uint32_t>(stored) | uint32_t{1} << 31;
      }
      const auto junk = static_cast<uint32_t>(random());
      line[i] = {junk, flag, ~junk, flag};
    }
  }
}

void World::resetDirect(Random& random) {
  if (members_.front().connector->direct().positions == nullptr) return;
  const uint32_t capacity = uint32_t{1} << geometry_.directLineBits;
  const size_t count = members_.size();
  const auto positionOf = [&](size_t rank, size_t other, size_t row) -> device::DirectPosition& {
    const plan::CommConfig& config = members_[rank].config;
    const int peer = plan::localPeerOf(config, static_cast<int>(other));
    const size_t peers = index(plan::localRanks(config)) - 1;
    return members_[rank].connector->direct().positions[row * peers + index(peer)];
  };
  for (size_t to = 0; to < count; to++) {
    const device::DirectMemory& memory = members_[to].connector->direct();
    for (size_t from = 0; from < count; from++) {
      if (from == to ||
          !plan::areOnOneNode(members_[to].config, static_cast<int>(from), static_cast<int>(to)))
        continue;
      // Anywhere, or shortly before the counters wrap.
      auto passed = static_cast<uint32_t>(random());
      if (below(random, 2) == 0) passed = 0u - static_cast<uint32_t>(below(random, capacity));
      const auto unacknowledged = static_cast<uint32_t>(below(random, capacity / 2 + 1));
      for (size_t row = 0; row < device::kDirectMaxBlocks; row++) {
        positionOf(from, to, row).sent = passed;
        positionOf(to, from, row).received = passed;
        positionOf(to, from, row).acknowledged = passed - unacknowledged;
      }
      reinterpret_cast<uint32_t*>(members_[from].connector->direct().window)[localRank(to)] =
          passed - unacknowledged;
      // Each place holds the line that passed it last.
      auto* line = reinterpret_cast<device::Line*>(memory.window + device::kDirectHeaderBytes) +
                   localRank(from) * capacity;
      const uint64_t junk = random();
      for (uint32_t back = 1; back <= capacity; back++) {
        const uint32_t place = passed - back;
        const uint32_t flag = (place >> geometry_.directLineBits) + 1;
        line[place % capacity] = {static_cast<uint32_t>(junk), flag,
                                  static_cast<uint32_t>(junk >> 32), flag};
      }
    }
  }
}

void World::resetWide(Random& random) {
  const size_t count = members_.size();
  if (members_.front().connector->wide().window == nullptr) return;
  const size_t fifoWords = device::kWideSlots * size_t{geometry_.wide.slotLines} *
                           device::kWideLineBytes / sizeof(uint64_t);
  for (size_t to = 0; to < count; to++) {
    const device::WideMemory& receiver = members_[to].connector->wide();
    const plan::CommConfig& config = members_[to].config;
    const size_t peers = index(plan::localRanks(config)) - 1;
    for (size_t from = 0; from < count; from++) {
      if (from == to || !plan::areOnOneNode(config, static_cast<int>(from), static_cast<int>(to)))
        continue;
      const device::WideMemory& sender = members_[from].connector->wide();
      const int source = plan::localPeerOf(config, static_cast<int>(from));
      const int target = plan::localPeerOf(members_[from].config, static_cast<int>(to));
      for (int block = 0; block < geometry_.wide.blocks; block++) {
        const uint64_t passed = random() >> below(random, 64) >> 1;
        const size_t row = index(block) * peers;
        sender.steps[row + index(target)].sent = passed;
        receiver.steps[row + index(source)].received = passed;
        reinterpret_cast<uint64_t*>(
            sender.window)[index(block) * device::kDirectMaxRanks + localRank(to)] = passed;
        // Flags of steps that have passed, some of them long ago.
        auto* words = reinterpret_cast<uint64_t*>(receiver.window + device::wideHeaderBytes()) +
                      index(source * geometry_.wide.blocks + block) * fifoWords;
        const uint64_t slotWords = fifoWords / device::kWideSlots;
        for (size_t w = 0; w < fifoWords; w++) {
          const uint64_t slot = w / slotWords;
          const uint64_t ago = (passed - 1 - slot) % device::kWideSlots;
          const bool isFlag = w % device::kLineWords == device::kLineWords - 1;
          const bool isUsed = passed > ago && below(random, 4) != 0;
          words[w] = isFlag ? (isUsed ? passed - ago : 0) : random();
        }
      }
    }
  }
}

void World::resetHeads(device::Multicast* device::DeviceCommunicator::*member, Random& random) {
  if (tables(0).*member == nullptr) return;
  for (int c = 0; c < geometry_.channels; c++) {
    uint64_t up = 0, down = 0;
    for (int rank = 0; rank < ranks(); rank++) {
      if (rank == 0 || nodeOf(rank) != nodeOf(rank - 1)) {
        up = random() >> below(random, 64) >> 1;
        down = random() >> below(random, 64) >> 1;
      }
      device::MulticastChannel& channel = (tables(rank).*member)->channels[c];
      const device::MulticastLayout& layout = (tables(rank).*member)->layout;
      std::memset(channel.own, static_cast<int>(below(random, 256)), layout.bytes());
      const auto set = [&](uint64_t offset, uint64_t value) {
        *reinterpret_cast<uint64_t*>(channel.own + offset) = value;
      };
      set(device::MulticastLayout::contributed(), up);
      set(device::MulticastLayout::gathered(), down);
      for (int head = 0; head < static_cast<int>(layout.heads); head++) {
        set(device::MulticastLayout::reduced(head), up);
        set(layout.broadcast(head), down);
      }
      channel.step[device::kScatterStep] = channel.step[device::kReduceStep] = up;
      channel.step[device::kBroadcastStep] = channel.step[device::kGatherStep] = down;
    }
  }
}

void World::reset(Random& random, Past past) {
  std::optional<uint64_t> step;
  visitFifos([&](const FifoPair& fifo) {
    if (!step) step = randomStep(past, random);
    resetFifo(fifo, *step, random);
    if (!fifo.isContinued) step.reset();
  });
  reducer_->reset();
  for (Member& member : members_) {
    std::ranges::fill(member.marks, 0);
    member.times.clear();
  }
  resetDirect(random);
  resetWide(random);
  resetHeads(&device::DeviceCommunicator::multicast, random);
  resetHeads(&device::DeviceCommunicator::collNetDirect, random);
  for (int rank = 0; geometry_.windows && rank < ranks(); rank++) {
    std::memset(tables(rank).windows, 0,
                index(ranks()) * device::kWindowSlots * sizeof(device::MappedWindow));
  }
}

device::MappedWindow* World::windowEntry(int rank, int peer, uint64_t window) const {
  return tables(rank).windows + device::windowIndex(peer, window);
}

void World::enqueueWindow(int rank, int peer, device::WindowChange change, uint64_t window,
                          std::byte* base, uint64_t steps) {
  const Member& member = members_[index(rank)];
  launchDelay({steps, nullptr}, member.mapper.get());
  const device::ChangeWindowArguments arguments{
      windowEntry(rank, peer, window), change, window, base,
      static_cast<uint64_t*>(member.users->hostAddress())};
  runtime::LaunchShape shape;
  shape.argumentBytes = sizeof(arguments);
  testRuntime().launch(device::changeWindowKernel(), shape, &arguments, member.mapper.get());
}

void World::enqueue(int rank, const std::vector<plan::Task>& tasks) {
  Member& member = members_[index(rank)];
  plan::Plan plan = plan::makePlan(member.config, tasks);
  if (!member.connector->isConnected(plan.needs)) {
    throw internalError("The plan uses connections that the test did not make").rank(rank);
  }
  const runtime::DeviceScope scope(testRuntime(), rank);
  transport::LaunchContext context{
      member.tables->address(),    member.tables->channels(), abortFlag(rank),     abortFlag(rank),
      &member.connector->direct(), &member.connector->wide(), tables(rank).windows};
  context.mark.words = member.marks.data();
  for (plan::Launch& launch : plan.launches) {
    member.times.emplace_back(static_cast<size_t>(plan::blocksOf(launch)));
    context.mark.number = member.times.size();
    context.mark.times = member.times.back().data();
    transport::launch(testRuntime(), context, launch, stream(rank));
    const auto* collective = std::get_if<plan::CollectiveLaunch>(&launch);
    if (rank != 0 || collective == nullptr) continue;
    reducer_->enqueue(*collective, nodesOf(ranks()), abortFlag(0), reducerStream_.get());
  }
  if (geometry_.network) network_->enqueue(stream(rank), networkStream_.get());
}

void World::enqueueDelay(int rank, uint64_t steps) {
  launchDelay({steps, nullptr}, stream(rank));
}

void World::enqueueAbort(int rank, uint64_t steps, runtime::Stream other) {
  launchDelay({steps, abortFlag(rank)}, other);
}

void World::raiseAbort(int rank) {
  std::atomic_ref<uint32_t>(*abortFlag(rank)).store(1, std::memory_order_release);
}

void World::enqueueTouch(void* address, size_t bytes, runtime::Stream on) {
  struct Range {
    void* address;
    size_t bytes;
  };
  static const runtime::Kernel kKernel{"touch", nullptr,
                                       [](const void* arguments, const HostGroupContext& context) {
                                         const auto& range = *static_cast<const Range*>(arguments);
                                         if (context.role == 0) {
                                           runtime::host::noteWrite(range.address, range.bytes);
                                         }
                                       }};
  const Range range{address, bytes};
  runtime::LaunchShape shape;
  shape.argumentBytes = sizeof(range);
  testRuntime().launch(kKernel, shape, &range, on);
}

std::string World::usersLeft() const {
  std::string left;
  visitFifos([&](const FifoPair& fifo) {
    if (fifo.send.offer != nullptr && (fifo.send.offer[2] & ~device::kWithdrawn) != 0) {
      left += fmt::format(" the output offered for {} has users left;", fifo.name);
    }
  });
  for (int rank = 0; geometry_.windows && rank < ranks(); rank++) {
    const device::MappedWindow* windows = tables(rank).windows;
    for (size_t i = 0; i < index(ranks()) * device::kWindowSlots; i++) {
      if ((windows[i].state & ~device::kWindowMapped) == 0) continue;
      left += fmt::format(" rank {}: window {} has users left;", rank, i);
    }
  }
  return left;
}

std::string World::unmarkedBlocks() const {
  std::string unmarked;
  for (int rank = 0; rank < ranks(); rank++) {
    const Member& member = members_[index(rank)];
    for (size_t launch = 0; launch < member.times.size(); launch++) {
      for (size_t block = 0; block < member.times[launch].size(); block++) {
        const device::BlockTime& time = member.times[launch][block];
        // Threads may be preempted between the clock and the store, so that an early end of one
        // group overwrites a later one.
        const bool inOrder = !runsFibers() || time.began <= time.ended;
        if (time.began != 0 && time.ended != 0 && inOrder) continue;
        unmarked += fmt::format(" rank {}: block {} of launch {} did not note its times;", rank,
                                block, launch + 1);
      }
    }
    const auto running = [](uint64_t mark) { return mark != 0 && mark % 2 == 0; };
    const uint64_t last = std::ranges::max(member.marks) / 2;
    if (std::ranges::any_of(member.marks, running) || last != member.times.size()) {
      unmarked +=
          fmt::format(" rank {}: launch {} is not marked as done;", rank, member.times.size());
    }
  }
  return unmarked;
}

std::vector<std::string> World::synchronize() {
  std::vector<std::string> errors;
  for (int rank = 0; rank < ranks(); rank++) {
    try {
      testRuntime().synchronize(stream(rank));
      testRuntime().synchronize(members_[index(rank)].mapper.get());
      if (rank == 0) testRuntime().synchronize(reducerStream_.get());
      errors.emplace_back();
    } catch (const Error& error) {
      errors.emplace_back(error.what());
    }
  }
  try {
    testRuntime().synchronize(networkStream_.get());
  } catch (const Error& error) {
    errors.front() += error.what();
  }
  return errors;
}

}  // namespace unisono::protocol
