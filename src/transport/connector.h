#pragma once

#include <array>
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

// Where the scratch of a one-shot all-reduce lies, of every rank, and this rank's epochs.
struct OneShotMemory {
  std::array<std::byte*, device::kOneShotMaxRanks> scratch{};
  uint32_t* epochs = nullptr;
};

// Connects a rank to the peers that plans need, when they first need them. Every connection has two
// ends that connect in the same call of the same plan position, so each side sends what it made
// before it waits for what the other made: no order of ranks can block.
class Connector {
 public:
  Connector(runtime::Runtime& runtime, bootstrap::Bootstrap& bootstrap, memory::Arena& arena,
            memory::MappingCache& mappings, DeviceTables& tables, const plan::Shape& shape,
            uint32_t slots, std::vector<PeerPlace> places,
            std::vector<std::vector<int32_t>> ringOrders);

  // Makes all that `plan` uses and is not there yet.
  void connect(const plan::Plan& plan);
  bool isConnected(const plan::Plan& plan) const;

  // Waits until every peer has mapped what it was given: before, the memory must not be freed;
  // afterwards it may be, although peers still use it. Throws what the bootstrap throws.
  void waitUntilMapped();

  // Valid after connect() of a plan that uses it.
  const OneShotMemory& oneShot() const { return oneShot_; }

 private:
  memory::Block makeSenderBlock(int channels);
  memory::Block makeReceiverBlock(int channels, uint32_t slotBytes);
  device::Connection connectionOf(std::byte* senderBlock, std::byte* receiverBlock, int channel,
                                  int channels, uint32_t slotBytes, bool direct) const;
  void sendBlock(int peer, uint64_t tag, const memory::Block& block);
  std::byte* receiveBlock(int peer, uint64_t tag);
  void confirm(int peer);
  bool isDirect(int peer) const;

  void connectRings(int channels);
  void connectPeers(const std::vector<plan::PeerUse>& uses);
  void connectOneShot();
  int& connectedChannels(const plan::PeerUse& use);

  runtime::Runtime& runtime_;
  bootstrap::Bootstrap& bootstrap_;
  memory::Arena& arena_;
  memory::MappingCache& mappings_;
  DeviceTables& tables_;
  plan::Shape shape_;
  uint32_t slots_;
  std::vector<PeerPlace> places_;
  std::vector<std::vector<int32_t>> ringOrders_;  // [channel][position]: rank

  int ringChannels_ = 0;
  std::vector<int> sendChannels_, receiveChannels_;  // connected so far, by peer
  std::vector<int> unconfirmed_;                     // peers, once for each block given to them
  OneShotMemory oneShot_;
  bool oneShotReady_ = false;
};

}  // namespace unisono::transport
