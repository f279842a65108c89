// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "device/work.h"
#include "plan/plan.h"
#include "transport/block_exchange.h"

// How data move between two ranks. A transport provides the memory of the FIFOs between them, and
// someone who moves the data if kernels cannot. transport/transports.h has the list.
namespace unisono::transport {

// In order of preference.
enum class TransportKind : uint8_t {
  peer,        // kernels load and store memory of the other GPU
  hostMemory,  // kernels of both GPUs use memory of their host
};
inline constexpr int kTransportKinds = 2;

// What decides how two ranks exchange data.
struct PairFacts {
  bool peerAccess;        // the GPUs reach each other's memory, and the user allows it
  bool sharedHostMemory;  // they are on one host, and the user allows it
};

// What a rank knows of another one when it connects to it.
struct PeerPlace {
  uint64_t process;     // runtime::processToken of the rank
  int device;           // ordinal in its process
  uint64_t deviceHash;  // of its UUID
};

// How two ranks exchange data (topology::checkPeer).
struct PeerLink {
  // Of `peer`:
  bool read = false;    // the receiver pulls data out of the sender's memory
  int through = -1;     // the rank whose memory both use, as neither reaches the other's; -1: none
  bool atomics = true;  // kernels can make atomic operations on each other's memory
  TransportKind transport = TransportKind::peer;
};
// By ranks, the lower one first. Both ends and the rank between have the same entry; a pair without
// an entry has the default link, where senders push.
using PeerLinks = std::map<std::pair<int, int>, PeerLink>;

// All channels of one purpose from one rank to another. This rank is one of the two, or the one
// between them.
struct ConnectionGroup {
  int sender, receiver;
  uint64_t purpose;
  std::vector<int> channels;
  // Of the FIFOs of a channel: one for each protocol, or one for messages.
  std::vector<uint32_t> slotBytes;
};
// Whether a FIFO of a channel, by its place in slotBytes, is one of protocol Simple.
inline bool isSimple(const ConnectionGroup& group, size_t fifo) {
  return group.slotBytes.size() == 1 || fifo == plan::indexOf(device::Protocol::simple);
}

// What transports know of their communicator. All of it lives longer than they do.
struct TransportContext {
  runtime::Runtime& runtime;
  bootstrap::Bootstrap& bootstrap;
  memory::Arena& arena;
  BlockExchange& blocks;
  const plan::CommConfig& config;
  const uint32_t slots;  // of every FIFO
  const std::vector<PeerPlace>& places;
  const PeerLinks& links;
  const bool verifiesLinks;

  PeerLink linkBetween(int a, int b) const;
  const PeerPlace& own() const { return places[static_cast<size_t>(config.rank)]; }
};

// A group that is being connected.
class PendingConnection {
 public:
  virtual ~PendingConnection() = default;
  // Waits for the other end. Returns the FIFOs of each channel, as this rank addresses them. Not on
  // the rank between the two.
  virtual std::vector<device::Fifo> connect() = 0;
};

// One transport of one communicator. Its destruction closes its connections: kernels have ended, or
// are about to end because of an abort.
class Transport {
 public:
  virtual ~Transport() = default;
  // Allocates what this rank provides for a group and tells the other end. Never waits: a rank that
  // connects several groups sets up all of them before it connects the first one, so that no order
  // of ranks can deadlock.
  virtual std::unique_ptr<PendingConnection> setup(const ConnectionGroup& group) = 0;
};

}  // namespace unisono::transport
