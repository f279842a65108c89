// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "device/work.h"
#include "plan/plan.h"
#include "transport/block_exchange.h"

// How data move between two ranks. A transport provides the memory of the FIFOs between them and,
// where kernels cannot move the data, the thread that does. transport/transports.h has the list.
namespace unisono::transport {

class NetworkDriver;
class ReducingDriver;
class StreamObserver;

// In order of preference.
enum class TransportKind : uint8_t {
  peer,        // kernels load and store memory of the other GPU
  hostMemory,  // kernels of both GPUs use memory of their host
  network,     // kernels use memory of their host, and proxies move the data between hosts
};
inline constexpr int kTransportKinds = 3;

// What decides how two ranks exchange data.
struct PairFacts {
  bool peerAccess;        // the GPUs reach each other's memory, and the user allows it
  bool sharedHostMemory;  // they are on one host, and the user allows it
  bool network;           // their hosts reach each other by a network
};

// What a rank knows of another one when it connects to it.
struct PeerPlace {
  uint64_t process;         // runtime::processToken of the rank
  int device;               // ordinal in its process
  uint64_t deviceHash = 0;  // of its UUID
  uint64_t host = 0;        // between ranks of different hosts is a network
  // By channel (from the first one again): the rank of its host that sends for it to other hosts,
  // as the port is nearer to that rank's GPU (PXN); -1: itself. Empty: always itself.
  std::vector<int> forwarders = {};
  // Of messages between hosts (topology::RankPlace): the numbers of its own ports, which channels
  // take in turn; empty: any. By the number of the receiver's port: who sends through the port of
  // the same number for this rank, may be itself; -1: it sends through its own ports.
  std::vector<int> messagePorts = {}, messageForwarders = {};
};

// How two ranks exchange data (topology::checkPeer).
struct PeerLink {
  // Of `peer`:
  bool read = false;    // the receiver pulls data out of the sender's memory, or its host's
  int through = -1;     // the rank whose memory both use, as neither reaches the other's; -1: none
  bool atomics = true;  // kernels can make atomic operations on each other's memory
  TransportKind transport = TransportKind::peer;
  // Of `hostMemory`: the sender's or the receiver's copy engines move slots of protocol Simple.
  bool copiesIn = false, copiesOut = false;
};
// By ranks, the lower one first. Both ends and the rank between have the same entry.
using PeerLinks = std::map<std::pair<int, int>, PeerLink>;

// A pair of one host without an entry has the default link, where senders push.
PeerLink linkBetween(const PeerLinks& links, const std::vector<PeerPlace>& places, int a, int b);

// What a port of the network does with memory of this rank's device.
struct DirectAccess {
  bool reads = false, writes = false;  // when the rank sends, and when it receives
  bool flushes = false;                // what it has written must be flushed before kernels read it

  bool operator==(const DirectAccess&) const = default;
};

// A rank's end of a FIFO to another host or from there.
struct NetworkEnd {
  int peer = -1;
  bool messages = false;  // of messages, whose channels are numbered from their first one
  int channel = 0;
  bool sends = false;
  device::Protocol protocol = device::Protocol::simple;

  auto operator<=>(const NetworkEnd&) const = default;  // NOLINT(modernize-use-nullptr)
};

// What a rank has sent or received there without a pause.
struct Transfer {
  NetworkEnd of;
  uint64_t slots = 0;
  uint64_t bytes = 0;          // of a sender
  int64_t start = 0, end = 0;  // nanoseconds of the steady clock
};
using NoteTransfer = std::function<void(const Transfer&)>;
enum class ProxyActivity : uint8_t { idle, active, sleeps, wakes };
// May return null.
using ObserveStream = std::function<std::unique_ptr<StreamObserver>(const NetworkEnd&)>;

// What transports ask of the communicator. Functions may be empty; they are called from any thread.
struct TransportOptions {
  // Throws when the communicator has failed or is being aborted.
  std::function<void()> check;
  // Makes the communicator unusable.
  std::function<void(const Error&)> fail;
  // Whether a peer has left in an orderly manner.
  std::function<bool(int peer)> hasLeft;
  // Whether the process of a rank of this host is known to have ended, or ends, also after the
  // communicator.
  std::function<bool(int rank)> hasEnded;
  // Whether all that was launched is done and no graph may hold launches.
  std::function<bool()> isIdle;
  std::optional<std::chrono::milliseconds> timeout;  // of each wait for another rank
  std::string socketInterface, socketFamily;         // of the settings
  std::chrono::seconds networkTimeout{120};          // of the settings
  int64_t socketThreads = 0, socketsPerThread = 0;   // of the settings
  std::string proxyCores;  // near the port, as ScopedCpuAffinity has them; empty: any
  bool ignoresOwnCores =
      false;  // of the settings: takes them also if this process may not use them
  std::shared_ptr<const NetworkDriver> network;
  std::vector<int> ports;  // of the network, by channel (from the first one again); empty: any
  std::vector<DirectAccess> direct;  // by port of the network; others reach memory of the host
  bool dmaBuf = true;                // of the settings
  std::shared_ptr<const ReducingDriver> reducer;  // null: no network reduces
  bool verifiesLinks = false;                     // whether LinkCheck looks at links
  // Of the communicator: bytes of the device's memory that connections have besides its arena.
  // Null: nobody counts them.
  std::shared_ptr<std::atomic<uint64_t>> deviceBytes;
  // By the thread that moves the data. Empty: nobody wants to know.
  NoteTransfer noteTransfer;
  ObserveStream observeStream;
  // What the thread does when it moves no data.
  std::function<void(ProxyActivity)> noteProxy;
};

// All channels of one purpose from one rank to another with the same forwarder. This rank is one of
// the two, the one between them, or the forwarder.
struct ConnectionGroup {
  int sender, receiver;
  uint64_t purpose;
  std::vector<int> channels;
  // Of the FIFOs of a channel: one for each protocol, or those for messages.
  struct FifoShape {
    device::Protocol protocol;
    uint32_t slotBytes;  // 0: no call may use it, and networks make no connection

    bool isUsed() const { return slotBytes > 0; }
  };
  std::vector<FifoShape> fifos;
  int forwarder = -1;  // as PeerPlace::forwarders
  // Of messages, which the two ends connect in calls of theirs without the forwarder.
  bool messages = false;
  // Of this rank's host, for each channel; -1, or none: that of TransportOptions::ports.
  std::vector<int> ports = {};
};

// What carries messages from one rank to another: a group for each forwarder. The same on all
// ranks, but for the ports.
std::vector<ConnectionGroup> groupsForMessages(const plan::CommConfig& config,
                                               const std::vector<PeerPlace>& places, int sender,
                                               int receiver);

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
  const TransportOptions& options;

  PeerLink linkBetween(int a, int b) const { return transport::linkBetween(links, places, a, b); }
  // As ConnectionGroup::forwarder.
  int forwarderOf(int sender, int receiver, int channel) const {
    const PeerPlace& place = places[static_cast<size_t>(sender)];
    if (place.forwarders.empty() || place.host == places[static_cast<size_t>(receiver)].host) {
      return -1;
    }
    return place.forwarders[static_cast<size_t>(channel) % place.forwarders.size()];
  }
  const PeerPlace& own() const { return places[static_cast<size_t>(config.rank)]; }
  void checkState() const {
    if (options.check) options.check();
  }
};

// A group that is being connected.
class PendingConnection {
 public:
  virtual ~PendingConnection() = default;
  // Waits for the other end. Returns the FIFOs of each channel, as this rank addresses them; none
  // on the forwarder. Not on the rank between the two.
  virtual std::vector<device::Fifo> connect() = 0;
  // After connect(): the port of this host through which a FIFO passes, "eth0"; empty: none.
  virtual std::string portOf(size_t /*fifo*/) const { return ""; }
};

// What a rank does for others, and goes on with when its communicator has ended.
class Service {
 public:
  virtual ~Service() = default;
  // Whether the others need it no more. Waits for nobody and uses no device, which only the
  // destructor does. By one thread at a time.
  virtual bool isOver() = 0;
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
  // Other ranks of the host will ask this one to forward messages (PXN).
  virtual void forwardMessages() {}
  // Kernels of this communicator were enqueued.
  virtual void noteLaunch() {}
  // Waits until what kernels that have ended wanted to send needs this rank no more. Throws what
  // TransportOptions::check does.
  virtual void drain() {}
  // Ends the connections of an aborted communicator, whose kernels may still run. Nothing but the
  // destructor may follow.
  virtual void close() {}
  // Before close() of a communicator that was not aborted: what must outlive it, or null.
  virtual std::shared_ptr<Service> handOver() { return nullptr; }
};

// A network that reduces what one rank of each node sends, the heads, and returns the result to
// all of them, as one connector uses it. Its destruction is as that of a Transport.
class ReducingNetwork {
 public:
  virtual ~ReducingNetwork() = default;
  struct Stream {
    int peer;  // the network peer, such as device::kNetworkPeer
    int channel;
    std::vector<int> heads;  // by node; this rank is one of them
    uint32_t slotBytes;
  };
  // The FIFOs of this rank to the network and from it. Each slot that goes out reports what is to
  // be done with it (device::SlotReport), and returns as one slot.
  struct Ends {
    device::Fifo send, receive;
    std::string port = {};  // "mlx5_0 of SHARP (v11)"
  };
  virtual Ends connect(const Stream& stream) = 0;
  // As those of Transport.
  virtual void noteLaunch() {}
  virtual void drain() {}
  virtual void close() {}
};

// The connections of a communicator to such a network.
class ReducingDriver {
 public:
  virtual ~ReducingDriver() = default;
  virtual std::unique_ptr<ReducingNetwork> makeNetwork(const TransportContext& context) const = 0;
};

}  // namespace unisono::transport
