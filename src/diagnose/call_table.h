// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "device/work.h"
#include "plan/plan.h"

// What the ranks of a process are doing, in memory that the other processes of the host map and
// that outlives the process: one head, then one table for each communicator. A process writes its
// own tables; everybody else only reads them, at any time, so that all that changes is atomic. Only
// `inquiries` is for others to write.
namespace unisono::diagnose {

inline constexpr auto kAcquire = std::memory_order_acquire;

inline constexpr uint32_t kTableLayout = 14;
inline constexpr char kMagic[8] = {'U', 'N', 'I', 'S', 'O', 'N', 'O', 'C'};
inline constexpr char kTableFile[] = "unisono-calls";  // of the memfd, for `unisono doctor`

inline constexpr size_t kTableBytes = 24576;
inline constexpr size_t kTables = 4096;  // pages that are never written cost nothing
inline constexpr size_t kCalls = 64;     // the last calls of a rank
inline constexpr size_t kLinks = 112;
inline constexpr uint64_t kStepSlots = 4;    // of a FIFO of the direct family
inline constexpr size_t kQuietPoints = 8;    // the last ones
inline constexpr size_t kCapturedKinds = 8;  // of collectives in graphs that differ
inline constexpr size_t kFlows = 64, kFlowPoints = 4;
inline constexpr size_t kNameBytes = 64, kPortBytes = 32;
inline constexpr size_t kSettingsBytes = 4096;
inline constexpr int kMaxRanks = 1 << 20;  // what readers believe

struct ProcessHead {
  char magic[8];
  uint32_t layout;
  uint32_t pid;
  uint64_t pidNamespace;
  std::atomic<uint32_t> tables;  // that are or were in use
  std::atomic<int64_t> alive;    // when its watchdog looked last
  // The settings of its last communicator that are not the defaults: lines of NAME=value. The
  // version is odd while they are written.
  std::atomic<uint32_t> settingsVersion;
  std::atomic<char> settings[kSettingsBytes];
  std::atomic<uint64_t> inquiries;  // of the ranks of all hosts: see outside_inquiries.h
};
static_assert(sizeof(ProcessHead) <= kTableBytes);

// One call of the API on one rank, or a replay of calls that were captured into a CUDA graph, which
// the first collective or message of their group stands for.
struct Call {
  uint64_t index = 0;  // among all calls of the rank, from 1; of captured groups in a replay
  // Among the collectives, or among the messages to or from `peer`, from 1. In a replay: of
  // collectives in replays that have begun, with those of this one.
  uint64_t sequence = 0;
  plan::Call call = plan::Call::allReduce;
  device::DataType type = device::DataType::int8;
  device::Reduction reduction = device::Reduction::sum;
  int peer = -1;  // the other rank, or the root; -1: none
  uint64_t count = 0;
  int64_t entered = 0;  // nanoseconds of the steady clock
  uint64_t launch = 0;  // the number of its launch; 0: not launched yet
  uint64_t replay = 0;  // which one of this captured group, from 1; 0: the call was not captured

  bool isReplay() const { return replay != 0; }
  bool isMessage() const { return call == plan::Call::send || call == plan::Call::receive; }
  bool reduces() const {
    return call == plan::Call::allReduce || call == plan::Call::reduceScatter ||
           call == plan::Call::reduce;
  }
  bool hasRoot() const {
    return call == plan::Call::broadcast || call == plan::Call::reduce ||
           call == plan::Call::gather || call == plan::Call::scatter;
  }
  uint64_t bytes() const { return count * device::elementBytes(type); }
};

// A call as its table holds it. `index` is 0 while the rest is being written.
struct CallRecord {
  std::atomic<uint64_t> index, sequence, count, launch;
  std::atomic<int64_t> entered;
  std::atomic<uint64_t> kind;  // call, type, reduction: a byte each; then the peer
  std::atomic<uint64_t> replay;
  uint64_t unused;
};
static_assert(sizeof(CallRecord) == 64);

// The counters of a FIFO (device/work.h) at one of its ends: of protocol Simple, and of LL where it
// leads to another host.
struct Link {
  int peer = -1;
  int channel = 0;
  bool sends = false;
  uint64_t tail = 0, head = 0;
  bool network = false;        // it leads to another host
  uint64_t bytesInFlight = 0;  // of the sender's end on the network: not handed to it yet
  bool lines = false;          // protocol LL
  std::string port = {};       // of this host on the network, "eth0"

  // Of the direct family, at the receiver's end, which `channel` is a block of:
  //   lines    `tail` of `all` lines of the launch are there
  //   steps    `tail` of `all` steps (0: unknown) are there, `head` are returned to the sender
  //   buffers  ranks use each other's buffers: `tail` is 1 if this rank has not taken what the peer
  //            offers, `head` if it has not seen that the peer is done with its own buffers
  // Of a head, to a network that reduces for the heads of all nodes, of which `peer` is the first:
  //   heads    `tail` slots went out for whose results there is room, and `head` results are back;
  //            `all` tells networks of one channel apart
  enum class Kind : uint8_t { fifo, lines, steps, buffers, heads };
  Kind kind = Kind::fifo;
  uint64_t all = 0;
  bool waits = false;  // lines and steps: for what is not there

  bool isFull(uint64_t slots) const { return tail - head >= slots; }
};
struct LinkRecord {
  std::atomic<uint64_t> kind, tail, head, bytesInFlight, all;
  std::atomic<char> port[kPortBytes];
};

// A moment when a rank had finished all that it had begun: how many collectives these were, in
// replays and without, and a hash of them that does not depend on their order. Collectives run in
// the same order on all ranks, so that equal numbers mean the same collectives. 0: there is none.
struct QuietPoint {
  uint64_t collectives = 0, hash = 0;
};
struct QuietRecord {
  std::atomic<uint64_t> collectives, hash;
};

// Messages in one direction between two ranks. Both number them in the same order, so that equal
// counts mean the same messages. The hash does not depend on their order.
struct MessageSum {
  uint64_t count = 0, bytes = 0, hash = 0;

  void add(uint64_t messageBytes, uint64_t times = 1);
  MessageSum& operator+=(const MessageSum& other) {
    count += other.count;
    bytes += other.bytes;
    hash += other.hash;
    return *this;
  }
};
// The messages to a peer, or from one.
struct Flow {
  int peer = -1;
  bool sends = false;
  uint64_t entered = 0;                // that are no replays
  uint64_t replayed = 0;               // in replays that have begun
  std::vector<MessageSum> quiet = {};  // of the last quiet points, in no order
};
struct FlowRecord {
  std::atomic<uint64_t> kind;  // the peer; bit 32: it is sent to
  std::atomic<uint64_t> entered, replayed;
  std::atomic<uint64_t> quietPoints;  // how many there were
  struct {
    std::atomic<uint64_t> count, bytes, hash;
  } quiet[kFlowPoints];
};

struct CallTable {
  std::atomic<uint64_t> id;  // the same on all ranks of a communicator; 0: the table is free
  std::atomic<int32_t> rank, ranks, device;
  std::atomic<uint32_t> slots;  // of every FIFO
  std::atomic<uint64_t> host;   // as RankPlace::host
  std::atomic<char> name[kNameBytes], network[kNameBytes];
  std::atomic<char> address[kNameBytes];  // of the host, where its ranks reach each other
  std::atomic<uint64_t> entered;          // the index of the last call
  std::atomic<uint64_t> launched;         // the number of the last launch: numbers begin at 2
  // As the watchdog of the process saw them last: the last launch whose kernel has begun, the last
  // one that is done, and when one of them changed.
  std::atomic<uint64_t> started, finished;
  std::atomic<int64_t> changed;
  std::atomic<uint32_t> links;
  std::atomic<uint32_t> captures;  // groups of calls in graphs, which are missing in `calls`
  std::atomic<uint64_t> replayed;  // collectives in replays that have begun
  std::atomic<uint64_t> counts[plan::kCallKinds];  // of calls of each kind
  std::atomic<int32_t> error;                      // ncclResult_t of the communicator
  std::atomic<uint32_t> aborted, finalized;        // 1: yes
  std::atomic<uint64_t> reported;                  // the call that was explained last
  alignas(64) CallRecord calls[kCalls];
  CallRecord replay;  // that runs; index 0: none
  LinkRecord link[kLinks];
  std::atomic<uint64_t> quietPoints;  // how many there were
  QuietRecord quiet[kQuietPoints];
  // The collectives in graphs that differ, with the number of times that they ran until the last
  // quiet point in `replay`.
  CallRecord captured[kCapturedKinds];
  // Of the first peers; with more of them the rest is in none.
  std::atomic<uint32_t> flows;
  std::atomic<uint64_t> flowPoints;  // quiet points of all flows
  FlowRecord flow[kFlows];
};
static_assert(sizeof(CallTable) <= kTableBytes);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

// How far the replays of captured calls are.
struct Replays {
  uint64_t collectives = 0;      // in replays that have begun
  std::optional<Call> running;   // without the time
  uint64_t hash = 0;             // of these collectives, in any order
  std::vector<Call> kinds = {};  // that differ, with the number of times in `replay`
  std::map<std::pair<int, bool>, MessageSum> messages = {};  // by peer, and whether they are sent
};

inline constexpr size_t kSegmentBytes = kTableBytes * (kTables + 1);

inline ProcessHead& headOf(std::byte* segment) {
  return *reinterpret_cast<ProcessHead*>(segment);
}
inline CallTable& tableOf(std::byte* segment, size_t slot) {
  return *reinterpret_cast<CallTable*>(segment + kTableBytes * (slot + 1));
}

}  // namespace unisono::diagnose
