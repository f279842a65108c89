// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "device/algorithm.h"
#include "device/window.h"

// Plain data that the host prepares and device code reads, on both targets. Nothing here owns
// memory.
namespace unisono::device {

// Numbered as ncclDataType_t.
enum class DataType : uint8_t {
  int8 = 0,
  uint8 = 1,
  int32 = 2,
  uint32 = 3,
  int64 = 4,
  uint64 = 5,
  float16 = 6,
  float32 = 7,
  float64 = 8,
  bfloat16 = 9,
  float8e4m3 = 10,
  float8e5m2 = 11,
};
inline constexpr int kDataTypes = 12;

// One hexadecimal digit a type, the first type lowest: arithmetic instead of a table in memory.
constexpr uint64_t elementBytes(DataType type) {
  return 0x112842884411u >> (4 * static_cast<int>(type)) & 15;
}

constexpr bool isFloatingPoint(DataType type) {
  return type >= DataType::float16;
}

enum class Operation : uint8_t {
  allReduce,
  allGather,
  reduceScatter,
  broadcast,
  reduce,
  local,  // one rank: output = reduction(input), a copy for most
};
// Whether it reduces nothing.
constexpr bool isCopy(Operation operation) {
  return operation == Operation::allGather || operation == Operation::broadcast;
}
constexpr bool usesCopyKernel(Algorithm algorithm, Protocol protocol, Operation operation) {
  return hasCopyKernel(algorithm, protocol) && isCopy(operation);
}

// What a kernel computes. An average is `preMulSum` with 1/n for floating-point types and
// `sumPostDivide` by n for integers, so that float16 does not overflow on the way.
enum class Reduction : uint8_t { sum = 0, prod, max, min, preMulSum, sumPostDivide };
inline constexpr int kReductions = 6;

// Whether the pair exists. Averages of floating-point types are pre-multiplied sums.
constexpr bool isReduction(DataType type, Reduction reduction) {
  switch (reduction) {
    case Reduction::sum:
    case Reduction::prod:
    case Reduction::max:
    case Reduction::min:
    case Reduction::preMulSum:
      return true;
    case Reduction::sumPostDivide:
      return !isFloatingPoint(type);
  }
  return false;
}
static_assert(!isReduction(DataType::int32, static_cast<Reduction>(kReductions)),
              "kReductions is the number of operators");

// The type whose reducer a pair uses: sums and products of signed integers are, bit for bit, those
// of unsigned ones.
constexpr DataType reducedAs(DataType type, Reduction reduction) {
  const bool ignoresSign = reduction == Reduction::sum || reduction == Reduction::prod ||
                           reduction == Reduction::preMulSum;
  if (ignoresSign && type == DataType::int8) return DataType::uint8;
  if (ignoresSign && type == DataType::int32) return DataType::uint32;
  if (ignoresSign && type == DataType::int64) return DataType::uint64;
  return type;
}

// Whether the device code has loops for this pair alone (reduce/any_reducer.h).
constexpr bool hasOwnLoops(DataType type, Reduction reduction) {
  if (reduction == Reduction::sum) return true;
  if (!isFloatingPoint(type)) return false;
  return reduction == Reduction::preMulSum ||
         (reduction == Reduction::prod && elementBytes(type) < 4);
}

// A reduction with its operands. `scalar` holds the bits of the factor (preMulSum, in the type that
// `type` accumulates in: float for the 16-bit and 8-bit ones) or of the divisor (sumPostDivide, an
// unsigned 64-bit number), or, with `scalarIsPointer`, the address of a factor of `type` in device
// memory, read when the kernel runs.
struct ReductionSpec {
  DataType type;
  Reduction reduction;
  bool scalarIsPointer;
  uint64_t scalar;
};

// One end of a FIFO of `slots` slots from one rank to another. `head` is in the sender's memory, so
// that every poll is local; slots and `tail` are in the receiver's, except where receivers read
// from their senders. Counters count slots since the connection was made and never wrap (64 bits).
//
// Who writes what, and in which order, with protocol Simple (protocol/simple.h):
//   sender:   waits head + slots > step; writes slot step % slots; tail = step + 1 (release)
//   receiver: waits tail > step (acquire); reads the slot; head = step + 1 (release)
// A slot is written again only after the receiver has released it. The other protocols have no
// tail: readiness is part of the data. With LL128 a proxy passes lines on as they are, for which it
// needs a tail at both ends.
//
// The receiver of a large message can let the sender write straight into its output buffer. Both
// ends exchange one word in the sender's memory, `offer`, which is zero unless an offer stands:
//   receiver: offer = address of the buffer, for a sender of the same process; or kWindowOffer and
//             the offset of the buffer in a window, whose id is in the next word; or kStagedOffer
//             (release); then waits tail > step as usual
//   sender:   waits head + slots > step, then offer != 0; takes the offer by exchanging the word
//             with 0. It knows whether the window is mapped: stores in the word after the tail
//             whether it writes to the buffer or to slots; writes; tail = step + 1 (release)
// A receiver that sees its abort flag while it waits withdraws the offer by exchanging the word
// with 0. Exactly one of the two exchanges returns the offer, and that end owns the buffer:
//   - The receiver got it: the sender never learned the place. The kernel ends, the user may free
//     the buffer, and the sender waits for an offer until it is aborted too.
//   - The sender got it: it is writing. The receiver keeps waiting for the tail, without looking at
//     the abort flag. This is a short wait, because a sender that has taken an offer waits for
//     nothing more before it publishes the tail: it has its slot already.
//
// The receiver of the result of a large collective offers its output in the same manner, once for
// all steps of a work that carry results. There the sender waits between its stores, so a third
// word, `users`, says whether it is storing:
//   sender:   adds 1 (acquire) after its waits for a step; does not store if kWithdrawn was set;
//             tail = step + 1 (release); subtracts 1 (release)
//   receiver: after an abort, if the sender has taken the offer: adds kWithdrawn and waits, which
//             is short again, until nobody is storing
struct alignas(16) Fifo {
  std::byte* slots;  // null until connected
  uint64_t* tail;
  uint64_t* head;
  uint64_t step;         // slots passed by this end so far; kept between launches
  uint64_t* offer;       // {offer, window, users}; null if nothing is ever offered
  uint32_t byAddress;    // 1: the receiver may offer addresses
  uint32_t hasProxy;     // 1: a proxy moves the data; the sender reports what each slot holds
  uint64_t agreed;       // of the last offer: where the sender writes, or kStagedOffer
  MappedWindow* pinned;  // sender: the window that it writes to, or null
  uint64_t acquired;     // of the peer's counter, which this end has seen; kept between launches
  uint32_t slotBytes;    // of messages; those of collectives are DeviceCommunicator::slotBytes
};

// Counters of different FIFOs are in different lines, so that polling one does not slow down stores
// to another.
inline constexpr size_t kCounterLineBytes = 128;
// After the tail, in its line, by slot: the reports of a FIFO that has them.
inline constexpr int kReportsWord = 2;
inline constexpr uint32_t kMaxReportedSlots = kCounterLineBytes / sizeof(uint64_t) - kReportsWord;
// What a proxy must know of a slot: how many bytes the sender has filled, and for a network that
// reduces also what it shall do with them. The bytes are then those of one piece: in a
// reduce-scatter a slot has a piece for each node.
struct SlotReport {
  uint32_t bytes;
  Operation operation;
  DataType type;
  Reduction reduction;
};
constexpr uint64_t packReport(const SlotReport& report) {
  return report.bytes | static_cast<uint64_t>(report.operation) << 32 |
         static_cast<uint64_t>(report.type) << 40 | static_cast<uint64_t>(report.reduction) << 48;
}
constexpr SlotReport unpackReport(uint64_t report) {
  return {static_cast<uint32_t>(report), static_cast<Operation>(report >> 32 & 255),
          static_cast<DataType>(report >> 40 & 255), static_cast<Reduction>(report >> 48 & 255)};
}
// With protocol LL, where the lines tell when they are there, the report comes without a tail and
// in any order with them. So it also tells its step; never 0 for the first steps, nor that of an
// older step of the slot.
constexpr uint64_t packLineReport(uint64_t step, uint32_t bytes) {
  return (step + 1) << 32 | bytes;
}
constexpr bool isLineReportOf(uint64_t report, uint64_t step) {
  return report >> 32 == ((step + 1) & 0xffffffffu);
}
// The flag of the lines of a step of protocol LL. It repeats after 2^31 steps, so that each slot is
// cleared once in as many (protocol/line_formats.h).
constexpr uint32_t lineFlagOf(uint64_t step) {
  return static_cast<uint32_t>(step) | uint32_t{1} << 31;
}
constexpr bool mustClearLines(uint64_t step, uint32_t slots) {
  return (step & 0x7fffffffu) < slots;
}
// In slots with a piece for each node, pieces begin at multiples of this.
constexpr uint64_t pieceStride(uint64_t bytes) {
  return (bytes + 15) / 16 * 16;
}

// The offer for a message that goes through the FIFO.
inline constexpr uint64_t kStagedOffer = 1;
// The bit of an offer that holds an offset; no address has it.
inline constexpr uint64_t kWindowOffer = uint64_t{1} << 63;
// The sender's answer, besides kStagedOffer: the message or result is in the buffer.
inline constexpr uint64_t kDirectAnswer = 2;
// The bit of `users` that the receiver sets when no store may begin any more.
inline constexpr uint64_t kWithdrawn = uint64_t{1} << 63;

// What a rank shares with `peer` on one channel: a FIFO in each direction for each protocol. FIFOs
// are independent of each other; a direction that no algorithm uses has none.
struct Connection {
  Fifo receive[kProtocols];
  Fifo send[kProtocols];
  int32_t peer;
};

// Algorithms are index structures: they name connections of their channel. A connection exists once
// however many algorithms use it. -1: none.
struct Ring {
  int32_t previous, next;
  const int32_t* order;  // order[i]: the rank i steps after this one; order[0] is this rank
  int32_t position;      // of this rank in the ring, 0 .. ranks - 1
};

inline constexpr int kMaxTreeChildren = 3;
struct Tree {
  int32_t up;
  int32_t down[kMaxTreeChildren];  // those that exist come first
};

// With CollNet the network combines what a rank of each node sends, and returns the result to all
// of them. For these ranks it is a peer with FIFOs of protocol Simple.
inline constexpr int kNetworkPeer = -1;        // of chains
inline constexpr int kHeadNetworkPeer = -2;    // of the heads of NVLS
inline constexpr int kDirectNetworkPeer = -3;  // of the heads of CollNet direct

// A channel from one rank's view. Its connections are those of a ring, a tree, a tree of the heads
// of nodes (device/multicast.h), a rail, a chain, and the networks.
inline constexpr int kMaxConnections = 2 + (1 + kMaxTreeChildren) + 2 * (1 + 2) + 2 + 3;
struct Channel {
  Ring ring;
  Tree tree;
  Tree chain;  // CollNet: the ranks of a node, of which the first has the network as its parent
  Tree rail;   // the ranks that have the same place on their nodes
  Connection connections[kMaxConnections];
};

struct Multicast;  // device/multicast.h

// A communicator in device memory. The tables grow as connections are made: entries of unconnected
// peers are null.
struct DeviceCommunicator {
  int32_t rank;
  int32_t ranks;
  uint32_t slotBytes[kProtocols];  // of connections for collectives
  uint32_t peerLineSlotBytes;      // of FIFOs for messages over LL; 0: there are none
  uint32_t slots;                  // of every FIFO: a power of two
  int32_t peerChannels;            // channels of the send and receive tables
  uint32_t stopped;                // set permanently when an abort has ended a launch
  const uint32_t* abortFlag;       // in host memory, so a waiting kernel looks at it rarely
  Channel* channels;
  Fifo* send;       // for messages: [peer * peerChannels + channel]
  Fifo* receive;    // for messages: [peer * peerChannels + channel]
  Fifo* sendLines;  // the same over LL; null where no message goes so
  Fifo* receiveLines;
  MappedWindow* windows;     // of the peers: [peer * kWindowSlots + index]; null if there are none
  Multicast* multicast;      // null until it is connected
  Multicast* collNetDirect;  // the same without multicast addresses

  // The buffers of an algorithm with heads.
  constexpr Multicast* headsOf(Algorithm algorithm) const {
    return algorithm == Algorithm::collNetDirect ? collNetDirect : multicast;
  }
};

// The host's part of a collective on one channel.
struct ChannelPart {
  uint64_t offset;
  uint64_t count;
  uint32_t lastChunk;
};

// One collective inside a launch. It covers the channels first .. first + channels - 1; channel i
// of these handles a contiguous part: `low` elements for the first, `middle` for each in between,
// `high` for the last. Counts are elements; for all-gather and reduce-scatter of one rank's share.
// The host has cut everything: device code does not divide.
struct alignas(16) CollectiveWork {
  Operation operation;
  Algorithm algorithm;
  Protocol protocol;
  bool offered;  // receivers of results offer their outputs, senders take the offers
  uint16_t firstChannel;
  uint16_t channels;
  int32_t root;
  bool addressIsOpen;  // senders of the same process can write to the output
  ReductionSpec reduction;
  const void* input;
  void* output;
  uint64_t count;
  uint64_t low, middle, high;
  uint32_t chunkElements;  // of every chunk but the last ones of a part
  uint32_t sliceElements;  // a chunk moves in slices of this size, one slot each
  // Of a ring's all-reduce: chunks of the last round of a part, for the three kinds of parts.
  uint32_t lastLow, lastMiddle, lastHigh;
  WindowReference window;  // of the output

  constexpr ChannelPart part(int channel) const {
    const int index = channel - firstChannel;
    if (index == 0) return {0, low, lastLow};
    const uint64_t offset = low + static_cast<uint64_t>(index - 1) * middle;
    if (index == channels - 1) return {offset, high, lastHigh};
    return {offset, middle, lastMiddle};
  }
};

// One end of a message of `bytes` bytes to or from a peer, split over `channels` channels, `part`
// bytes each but for the last.
struct Message {
  int32_t peer;  // < 0: no message
  uint16_t firstChannel, channels;
  std::byte* buffer;  // only read by the sender
  uint64_t bytes, part;
  uint32_t slice;  // bytes of a slot that are used
  bool offered;    // the receiver makes an offer, the sender takes it
  bool asLines;    // over protocol LL; never offered
};

// A round of sends and receives: a message to one peer and a message from another.
struct SendReceiveWork {
  Message send, receive;
  bool addressIsOpen;      // senders of the same process can write to the receive buffer
  WindowReference window;  // of the receive buffer
};

// When a block of a launch began and ended, in nanoseconds of a clock of the device; 0: it has not.
struct BlockTime {
  uint64_t began, ended;
};

// Where the thread groups of a kernel say what they do, for the CPU. Takes no part in any protocol.
struct LaunchMark {
  // [block][group] = twice the number of the launch, plus 1 when they are done; null in launches
  // that nobody watches. Launches that are captured into CUDA graphs have words of their own, in
  // which every replay has the same number.
  uint64_t* words;
  uint64_t number;
  // Of a captured launch: each group adds 1 when it begins, at every replay. Else null.
  uint64_t* replays;
  BlockTime* times;  // of each block, in memory of the host; null if nobody wants to know
};
inline constexpr int kMarkGroups = 3;
inline constexpr int kMarkBlocks = 144;  // channels, peers, blocks over LL128
inline constexpr int kMarkWords = kMarkBlocks * kMarkGroups;

// When the last replays of captured calls ran, in memory of the host, for a timeline. `number` is
// that of the entry among all that were ever written, from 1, and 0 while it is being written.
inline constexpr size_t kReplayTimes = 4096;
struct ReplayTime {
  uint64_t number, captured;  // the number of the captured calls
  uint64_t began, ended;      // nanoseconds of a clock of the device
};
struct ReplayTimes {
  uint64_t began, ended;  // the time of the replay that runs; how many have ended
  ReplayTime entry[kReplayTimes];
};
struct StampArguments {
  ReplayTimes* times;
  uint64_t captured;
  bool begins;
};

// The launches. Their arguments hold all that a replay of a CUDA graph needs, by value.
inline constexpr int kMaxCollectiveWorks = 31;
struct CollectiveArguments {
  DeviceCommunicator* communicator;
  Channel* channels;  // of the communicator: here, so that a kernel need not load the address first
  // Nonzero after an abort. Cheap to read on the device: every kernel looks at it before it touches
  // memory of the user, who may have freed it by then.
  const uint32_t* launchFlag;
  LaunchMark mark;
  int32_t works;
  CollectiveWork work[kMaxCollectiveWorks];  // all with the same algorithm and protocol

  // Thread groups of a block.
  constexpr int groups() const { return groupsOf(work[0].algorithm); }
  constexpr size_t bytesInUse() const {
    return sizeof(*this) - sizeof(work) + static_cast<size_t>(works) * sizeof(work[0]);
  }
};

inline constexpr int kMaxSendReceiveWorks = 32;
struct SendReceiveArguments {
  DeviceCommunicator* communicator;
  const uint32_t* launchFlag;
  LaunchMark mark;
  int32_t works;
  SendReceiveWork work[kMaxSendReceiveWorks];

  constexpr size_t bytesInUse() const {
    return sizeof(*this) - sizeof(work) + static_cast<size_t>(works) * sizeof(work[0]);
  }
};

// What every kernel may have but that of long groups of messages. Launches with fewer bytes are
// faster.
inline constexpr size_t kMaxArgumentBytes = 4096;
static_assert(sizeof(CollectiveArguments) <= kMaxArgumentBytes);
static_assert(sizeof(SendReceiveArguments) <= kMaxArgumentBytes);

}  // namespace unisono::device
