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

namespace unisono::transport {

// What a rank knows about another one when it connects to it.
struct PeerPlace {
  uint64_t process;  // runtime::processToken of the rank
  int device;        // ordinal in its process
};

// How two ranks exchange data (topology::checkPeer).
struct PeerLink {
  bool read = false;    // the receiver pulls data out of the sender's memory
  int through = -1;     // the rank whose memory both use, as neither reaches the other's; -1: none
  bool atomics = true;  // kernels can make atomic operations on each other's memory
};
// By ranks, the lower one first. Both ends and the rank between have the same entry; a pair without
// an entry has the default link, where senders push.
using PeerLinks = std::map<std::pair<int, int>, PeerLink>;

// The ranks of this rank's node, which share multicast, and the heads.
struct MulticastGraph {
  std::vector<int32_t> node;  // in order
  int heads = 0;              // of each node, the same number everywhere
  int head = -1;              // the number of this rank among them; -1: it is none
  // The heads of the same number on all nodes: their places in two trees, by tree and rank. Empty
  // inside one node.
  std::array<std::vector<topology::TreePlace>, 2> trees;
};

// The rings and trees of all channels.
struct ChannelGraphs {
  std::vector<std::vector<int32_t>> rings;              // [channel][position]: rank
  std::vector<std::vector<topology::TreePlace>> trees;  // [channel][rank]
  MulticastGraph multicast;
};

// Connects a rank to its peers when a plan first needs them: all channels of an algorithm at once,
// all channels of a peer at once, so that a later plan never waits for a peer because it moves more
// data. Each rank sends what it allocated before it waits for what its peers allocated, so no order
// of ranks can deadlock.
//
// All channels from one rank to another share one block of memory at each end. Counters are in the
// memory of the rank that polls them. Slots are in the receiver's memory, or in the sender's where
// receivers read. Where two ranks do not reach each other, everything is in the memory of the rank
// between them.
class Connector {
 public:
  Connector(runtime::Runtime& runtime, bootstrap::Bootstrap& bootstrap, memory::Arena& arena,
            memory::MappingCache& mappings, DeviceTables& tables, const plan::CommConfig& config,
            uint32_t slots, std::vector<PeerPlace> places, PeerLinks links, ChannelGraphs graphs);

  // Makes the connections for messages that pass through a third rank, which takes no part in the
  // calls that need them. Collective.
  void connectThrough();

  // Makes the connections that a plan needs and that do not exist yet. After it has thrown, the
  // connector is only good for destruction.
  void connect(const plan::Needs& needs);
  bool isConnected(const plan::Needs& needs) const;

  // Waits until every peer has mapped the blocks that were sent to it. Memory must not be freed
  // before that, but may be freed afterwards although peers still use it. Throws what the bootstrap
  // throws.
  void waitUntilMapped();

  // The counters of a FIFO of protocol Simple that this rank uses, as it addresses them.
  struct FifoCounters {
    int peer, channel;
    bool sends;
    const uint64_t *tail, *head;
  };
  const std::vector<FifoCounters>& fifoCounters() const { return fifoCounters_; }

  // Valid after connect() of a plan that uses it.
  const device::DirectMemory& direct() const { return direct_; }

 private:
  // All channels of one purpose from one rank to another. This rank is one of the two, or the one
  // between them.
  struct ConnectionGroup {
    int sender, receiver;
    uint64_t purpose;
    std::vector<int> channels;
    // Of the FIFOs of a channel: one for each protocol, or one for messages.
    std::vector<uint32_t> slotBytes;
    memory::Block own{};  // of this rank's end, unless the rank between provides it
  };
  PeerLink linkBetween(int a, int b) const;
  memory::Block makeBlock(const ConnectionGroup& link, bool ofSender);
  void sendBlock(int peer, const ConnectionGroup& link, bool ofSender, const memory::Block& block);
  std::byte* receiveBlock(int peer, const ConnectionGroup& link, bool ofSender);
  void offer(ConnectionGroup& link);
  std::vector<device::Fifo> complete(const ConnectionGroup& link);
  bool isSameProcess(int peer) const;
  bool isDirect(int peer) const;
  ConnectionGroup makeLinkForMessages(int from, int to);
  void completeForMessages(const ConnectionGroup& link);

  // Channels by sender and receiver, in increasing order.
  using Hops = std::map<std::pair<int, int>, std::vector<int>>;
  void addHop(Hops& hops, int channel, int from, int to);
  void connectHops(uint64_t purpose, const Hops& hops);
  void connectRings();
  void connectTrees();
  void addTreeHops(Hops& hops, int channel, const std::vector<topology::TreePlace>& tree);
  void connectPeers(const std::vector<plan::PeerUse>& uses);
  void connectDirect(device::DirectPeers peers);
  void connectMulticast();

  runtime::Runtime& runtime_;
  bootstrap::Bootstrap& bootstrap_;
  memory::Arena& arena_;
  memory::MappingCache& mappings_;
  DeviceTables& tables_;
  plan::CommConfig config_;
  uint32_t slots_;
  std::vector<PeerPlace> places_;
  PeerLinks links_;
  ChannelGraphs graphs_;

  std::set<std::tuple<int, int, int>> connectedHops_;  // channel, sender, receiver
  bool ringsConnected_ = false, treesConnected_ = false;
  std::vector<bool> sendConnected_, receiveConnected_;  // for messages, by peer
  device::DirectPeers directConnected_ = 0;
  std::shared_ptr<runtime::MappedMemory> multicast_;  // the address of all ranks' buffers
  memory::Block directWindow_{};
  device::DirectMemory direct_{};
  std::vector<FifoCounters> fifoCounters_;
  std::vector<int> unconfirmed_;  // peers, once for each block sent to them
};

}  // namespace unisono::transport
