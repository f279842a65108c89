#pragma once

#include <array>
#include <map>
#include <utility>
#include <vector>

#include "bootstrap/bootstrap.h"
#include "memory/mapping_cache.h"
#include "plan/plan.h"
#include "transport/device_tables.h"

namespace unisono::transport {

// What a rank knows of another one when it connects to it.
struct PeerPlace {
  uint64_t process;  // runtime::processToken of the rank
  int device;        // ordinal in its process
};

// How two ranks that reach each other do so (topology::checkPeer).
struct PeerLink {
  bool read = false;  // the receiver pulls data out of the sender's memory
  int through = -1;   // the rank whose memory both use, as neither reaches the other's; -1: none
};
// By ranks, the lower first. Both ends and the rank between have the same entry; a pair without one
// has the plain link, where senders push.
using PeerLinks = std::map<std::pair<int, int>, PeerLink>;

// Where the scratch of a one-shot all-reduce lies, of every rank, and this rank's epochs.
struct OneShotMemory {
  std::array<std::byte*, device::kOneShotMaxRanks> scratch{};
  uint32_t* epochs = nullptr;
};

// Connects a rank to the peers that plans need, when they first need them. Every connection has two
// ends that connect in the same call of the same plan position, so each side sends what it made
// before it waits for what the other made: no order of ranks can block.
//
// The counters that an end polls lie in its own memory. The slots lie with the receiver, or with
// the sender where receivers read. Where two ranks do not reach each other, all lies in the memory
// of the rank between them.
class Connector {
 public:
  Connector(runtime::Runtime& runtime, bootstrap::Bootstrap& bootstrap, memory::Arena& arena,
            memory::MappingCache& mappings, DeviceTables& tables, const plan::Shape& shape,
            uint32_t slots, std::vector<PeerPlace> places, PeerLinks links,
            std::vector<std::vector<int32_t>> ringOrders);

  // Makes the connections for messages that lead through a third rank: that one takes no part in
  // the calls that need them. Collective.
  void connectThrough();

  // Makes all that `plan` uses and is not there yet.
  void connect(const plan::Plan& plan);
  bool isConnected(const plan::Plan& plan) const;

  // Waits until every peer has mapped what it was given: before, the memory must not be freed;
  // afterwards it may be, although peers still use it. Throws what the bootstrap throws.
  void waitUntilMapped();

  // Valid after connect() of a plan that uses it.
  const OneShotMemory& oneShot() const { return oneShot_; }

 private:
  // Channels firstChannel .. firstChannel + channels - 1 from one rank to another. This rank is one
  // of the two, or the one between them.
  struct Link {
    int sender, receiver;
    uint64_t purpose;
    int firstChannel, channels;
    uint32_t slotBytes;
    memory::Block own{};  // of this rank's end, unless the rank between provides it
  };
  PeerLink way(int a, int b) const;
  memory::Block makeBlock(const Link& link, bool ofSender);
  void sendBlock(int peer, const Link& link, bool ofSender, const memory::Block& block);
  std::byte* receiveBlock(int peer, const Link& link, bool ofSender);
  void offer(Link& link);
  std::vector<device::Connection> complete(const Link& link);
  bool isDirect(int peer) const;
  Link peerLink(int from, int to, int firstChannel, int channels) const;
  void completePeer(const Link& link);

  void connectRings(int channels);
  void connectPeers(const std::vector<plan::PeerUse>& uses);
  void connectOneShot();
  int& connectedChannels(int peer, bool sends);

  runtime::Runtime& runtime_;
  bootstrap::Bootstrap& bootstrap_;
  memory::Arena& arena_;
  memory::MappingCache& mappings_;
  DeviceTables& tables_;
  plan::Shape shape_;
  uint32_t slots_;
  std::vector<PeerPlace> places_;
  PeerLinks links_;
  std::vector<std::vector<int32_t>> ringOrders_;  // [channel][position]: rank

  int ringChannels_ = 0;
  std::vector<int> sendChannels_, receiveChannels_;  // connected so far, by peer
  std::vector<int> unconfirmed_;                     // peers, once for each block given to them
  OneShotMemory oneShot_;
  bool oneShotReady_ = false;
};

}  // namespace unisono::transport
