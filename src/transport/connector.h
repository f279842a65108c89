// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "bootstrap/bootstrap.h"
#include "device/direct_work.h"
#include "memory/mapping_cache.h"
#include "plan/plan.h"
#include "topology/join.h"
#include "transport/device_tables.h"
#include "transport/transport.h"

namespace unisono::transport {

// The ranks of a node share buffers, and some are heads.
struct HeadGraph {
  std::vector<std::vector<int32_t>> nodes;  // the ranks of each, in order
  std::vector<int32_t> nodeOf;              // by rank
  std::vector<std::vector<int>> heads;      // [head][node]
  // The heads of the same number on all nodes: their places in two trees, by tree and rank. Empty
  // without such trees.
  std::array<std::vector<topology::TreePlace>, 2> trees;
  bool hasNetwork = false;  // that reduces for the heads of the same number
};

// CollNet, where the network reduces.
struct ChainGraph {
  // Neighbours in the chain of each node, by channel and rank.
  std::vector<std::vector<topology::TreePlace>> chains;
  std::vector<std::vector<int32_t>> heads;  // [channel][node]: the first rank of the chain
};

// The rings and trees of all channels.
struct ChannelGraphs {
  std::vector<std::vector<int32_t>> rings;              // [channel][position]: rank
  std::vector<std::vector<topology::TreePlace>> trees;  // [channel][rank]
  // The same for rails: trees over the ranks with the same place on all nodes. Empty unless all
  // nodes have as many ranks.
  std::vector<std::vector<topology::TreePlace>> rails;
  HeadGraph multicast, collnetDirect;
  ChainGraph collnet;
};

// Connects a rank to its peers when a plan first needs them: all channels of an algorithm at once,
// all channels of a peer at once, so that a later plan never waits for a peer because it moves more
// data. Each rank sends what it allocated before it waits for what its peers allocated, so no order
// of ranks can deadlock. The FIFOs between two ranks are made by the transport of their link.
// Places, links and graphs live longer than it does.
class Connector {
 public:
  Connector(runtime::Runtime& runtime, bootstrap::Bootstrap& bootstrap, memory::Arena& arena,
            memory::MappingCache& mappings, DeviceTables& tables, const plan::CommConfig& config,
            uint32_t slots, const std::vector<PeerPlace>& places, const PeerLinks& links,
            const ChannelGraphs& graphs, TransportOptions options = {});

  // Makes the connections for messages that pass through a third rank, which takes no part in the
  // calls that need them. Collective.
  void connectThrough();

  // Makes the connections that a plan needs and that do not exist yet. After it has thrown, the
  // connector is only good for destruction.
  void connect(const plan::Needs& needs);
  bool isConnected(const plan::Needs& needs) const;

  // As BlockExchange::waitUntilMapped.
  void waitUntilMapped() { blocks_.waitUntilMapped(); }

  // As those of Transport.
  void noteLaunch();
  void drain();
  void close();
  std::vector<std::shared_ptr<Service>> handOver();

  // The counters of a FIFO that this rank uses, as it addresses them. Where lines are all that
  // tells which steps are there, there is nothing for the sender, and the receiver has the flags in
  // its slots; but on its side of a network LL has a tail.
  struct FifoCounters {
    int peer, channel;
    bool sends;
    const uint64_t *tail, *head;
    bool network;      // the sender's reports of its slots follow the tail
    bool lines;        // the sender has no tail: LL, and LL128 without a network
    std::string port;  // of the network
    device::Protocol protocol;
    const std::byte* slots;
    uint32_t slotBytes;
    // Of a head, to a network that reduces: as ReducingNetwork::Stream::peer, while `peer` is the
    // first of the heads; and how many of the results kernels have used. Else 0 and null.
    int reducer = 0;
    const uint64_t* used = nullptr;
  };
  const std::vector<FifoCounters>& fifoCounters() const { return fifoCounters_; }

  // Valid after connect() of a plan that uses it.
  const device::DirectMemory& direct() const { return direct_; }
  const device::WideMemory& wide() const { return wide_; }

 private:
  struct Making {
    ConnectionGroup group;
    std::unique_ptr<PendingConnection> pending;
  };
  bool forwardsMessages() const;
  Transport& transportOf(const ConnectionGroup& group);
  Transport& transportOf(TransportKind kind);
  Making begin(ConnectionGroup group);
  void putInOrder(std::vector<Making>& makings) const;
  std::vector<device::Fifo> complete(const Making& making);
  void beginForMessages(int from, int to, std::vector<Making>& makings);
  void completeForMessages(const Making& making);

  // Channels by sender, receiver and forwarder, in increasing order.
  using Hops = std::map<std::tuple<int, int, int>, std::vector<int>>;
  // Which ports hops between hosts use: those that the search chose for the channel, or those near
  // the ranks, as messages do.
  enum class Ports { ofChannels, nearRanks };
  void addHop(Hops& hops, int channel, int from, int to, Ports ports = Ports::ofChannels);
  void connectHops(uint64_t purpose, const Hops& hops, Ports ports = Ports::ofChannels);
  void connectRings();
  using Trees = std::vector<std::vector<topology::TreePlace>>;
  void connectTrees(uint64_t purpose, const Trees& trees, device::Tree device::Channel::*member,
                    Ports ports);
  void addTreeHops(Hops& hops, int channel, const std::vector<topology::TreePlace>& tree,
                   Ports ports = Ports::ofChannels);
  void connectPeers(const std::vector<plan::PeerUse>& uses);
  // Sends the own window to `peers`, and maps theirs.
  void exchangeWindows(uint64_t purpose, const memory::Block& window, device::DirectPeers peers,
                       std::byte** theirs);
  void connectDirect(device::DirectPeers peers);
  void connectWide(device::DirectPeers peers);
  void connectMulticast();
  void connectCollnetDirect();
  void connectChains();
  // What the ranks of a node share for an algorithm with heads, but for a multicast address.
  HeadBuffers connectHeads(uint64_t purpose, const HeadGraph& graph, const plan::HeadShape& shape,
                           int networkPeer);
  void connectNetwork(int peer, int channel, const std::vector<int>& heads);

  runtime::Runtime& runtime_;
  memory::Arena& arena_;
  DeviceTables& tables_;
  const plan::CommConfig config_;
  const uint32_t slots_;
  const std::vector<PeerPlace>& places_;
  const PeerLinks& links_;
  const ChannelGraphs& graphs_;
  const TransportOptions options_;
  const TransportContext context_;
  BlockExchange blocks_;
  std::array<std::unique_ptr<Transport>, kTransportKinds> transports_;  // those in use
  std::unique_ptr<ReducingNetwork> reducer_;                            // null until it is needed

  std::set<std::tuple<int, int, int>> connectedHops_;  // channel, sender, receiver
  bool ringsConnected_ = false, treesConnected_ = false, railsConnected_ = false;
  bool chainsConnected_ = false;
  bool collnetDirectConnected_ = false;
  std::vector<bool> sendConnected_, receiveConnected_;  // for messages, by peer
  device::DirectPeers directConnected_ = 0, wideConnected_ = 0;
  std::shared_ptr<runtime::MappedMemory> multicast_;  // the address of all ranks' buffers
  memory::Block directWindow_{}, wideWindow_{};
  device::DirectMemory direct_{};
  device::WideMemory wide_{};
  std::vector<FifoCounters> fifoCounters_;
};

}  // namespace unisono::transport
