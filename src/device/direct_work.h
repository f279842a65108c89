// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/window.h"
#include "device/work.h"

// The direct algorithms: every rank stores what a peer needs into that peer's window, in one hop.
namespace unisono::device {

inline constexpr int kDirectMaxRanks = 16;
inline constexpr int kDirectMaxBlocks = 64;
inline constexpr int kDirectMaxThreads = 512;

// From each rank to each other one runs a stream of lines of 8 bytes of data and 8 of flag
// (protocol/low_latency.h). Both ends count its lines modulo 2^32; line p is stored at place
// p mod 2^lineBits of the receiver's window, with the lap p / 2^lineBits + 1 as its flag. There are
// no gaps: each place is written once in every lap. So a line that is not there yet has the flag of
// the lap before (0 before the first), whatever number of lines has passed, and counters may wrap.
//
// The sender may be 2^lineBits lines ahead of the receiver's acknowledgment. A rank acknowledges at
// the start of a launch what its earlier launches took, once this is a quarter of the stream. A
// launch moves a quarter at most in each direction (unless it acknowledges on the way:
// MessagesArguments). Hence a launch whose peers have taken
// everything before it never waits for room, and a receiver that has started the matching launch
// lets the sender finish.
struct alignas(16) DirectPosition {
  uint32_t sent, received;  // lines to and from one peer
  uint32_t acknowledged;    // of `received`, what the peer has been told
  uint32_t unused;
};

// Shares of a stream that may be on their way unacknowledged, and that one launch may move.
inline constexpr uint32_t kDirectShares = 4;

// A window begins with the acknowledgments of the peers: one counter for each rank, of the lines
// that it has taken from the streams of the window's owner. The counts of barriers follow.
inline constexpr size_t kDirectHeaderBytes = 4096;
inline constexpr size_t kBarrierCountsAt = 1024;

constexpr size_t directWindowBytes(int ranks, int lineBits) {
  return kDirectHeaderBytes + (static_cast<size_t>(ranks) << lineBits) * 16;
}

// The peers of a rank are all other ranks, in their order. So that kernels find a peer at a
// constant place, everything about peers is indexed by their place in this order.
constexpr int rankOfPeer(int peer, int rank) {
  return peer < rank ? peer : peer + 1;
}
constexpr int peerOfRank(int other, int rank) {
  return other < rank ? other : other - 1;
}
// Peer `i` of `peers`, counted from the next rank on. For each `i`, ranks have different peers, so
// that ranks in step do not share the link of one.
constexpr int peerFrom(int rank, int i, int peers) {
  return rank + i < peers ? rank + i : rank + i - peers;
}
inline constexpr int kDirectMaxPeers = kDirectMaxRanks - 1;

// What a rank shares with the other ranks, and what it keeps for itself between launches.
struct DirectMemory {
  std::byte* window;                   // the header, then [source rank][line]
  std::byte* theirs[kDirectMaxPeers];  // the windows of the peers
  DirectPosition* positions;           // [kDirectMaxBlocks][peer]; rows equal between launches
};

// By rank: at how many barriers it has arrived, which it stores, and how many the owner of the
// window has passed together with it.
struct BarrierCounts {
  uint64_t arrived[kDirectMaxRanks], passed[kDirectMaxRanks];
};
static_assert(kBarrierCountsAt + sizeof(BarrierCounts) <= kDirectHeaderBytes);

// A barrier of all ranks, by one block with a thread for each peer.
inline constexpr int kBarrierThreads = 32;
static_assert(kBarrierThreads >= kDirectMaxPeers);
struct BarrierArguments {
  DirectMemory memory;
  const uint32_t* abortFlag;
  LaunchMark mark;
  int32_t rank;
  int32_t ranks;
};

// Peers, a bit each.
using DirectPeers = uint16_t;

// What this rank sends to and takes from whom in one call. A share is what goes from one rank to
// another. Buffers are arrays of shares by rank, or hold one share for all ranks (stride 0).
//
//   copies:     output[s] = share of s, for every s in `from`; `own` copies the own share
//   reductions: output = the shares of all ranks, combined in rank order, if `from` has any
struct DirectWork {
  const std::byte* input;
  std::byte* output;
  uint32_t inputBytes, outputBytes;  // of a share
  uint64_t inputStride, outputStride;
  DirectPeers to, from;
  bool reduces;
  bool own;
  bool whole;  // every share begins and ends at a multiple of 8 bytes
  uint8_t blocks;
  uint8_t firstBlock;  // blocks are counted modulo those of the launch
  ReductionSpec reduction;
};

constexpr uint32_t linesOf(uint32_t bytes) {
  return (bytes + 7) / 8;
}

inline constexpr int kMaxDirectWorks = 48;
// The works of one launch. Their lines follow each other in every stream.
template <int kWorks>
struct DirectLaunchArguments {
  DirectMemory memory;
  const uint32_t* abortFlag;
  const uint32_t* launchFlag;
  LaunchMark mark;
  int32_t rank;
  int32_t ranks;
  int32_t lineBits;
  int32_t works;
  DirectWork work[kWorks];
};
using DirectArguments = DirectLaunchArguments<kMaxDirectWorks>;
// A launch of one work passes only the beginning.
using DirectCallArguments = DirectLaunchArguments<1>;
static_assert(sizeof(DirectArguments) <= kMaxArgumentBytes);

// The direct algorithms over LL128. From each block of a rank to the block of the same number of
// each peer runs a FIFO of slots, each with up to `slotLines` lines of 120 bytes of data and 8 of
// flag. A slot takes one step, and its flag is the step plus one, which never repeats. The receiver
// returns the number of steps that it has taken. So sizes are not limited, and blocks of one rank
// do not wait for each other.
inline constexpr int kWideMaxBlocks = 128;
inline constexpr uint32_t kWideSlots = 4;
inline constexpr uint32_t kWideLineBytes = 128;
inline constexpr uint32_t kWideLineData = 120;

// What a rank offers to a peer for one launch, so that the peer uses its buffers instead of lines.
// In the memory of that peer, which takes the words by setting them to 0, as does the rank to
// withdraw them.
struct alignas(32) BufferOffer {
  uint64_t buffer[2];  // the input and the output, as words of makeOffer()
  uint64_t answer;     // to what the rank whose memory this is offered; it sets it to 0
};
inline constexpr int kInputBuffer = 0, kOutputBuffer = 1;
inline constexpr uint64_t kBuffersUsed = 1, kBuffersLeft = 2;  // answers

// A buffer in one word: its address, or its window and its offset there. Addresses and offsets are
// multiples of 16; the window is told apart from 2^28 others. The lowest bits say which it is, or
// that there is nothing to use.
enum class OfferKind : uint64_t { none, nothing, address, window };
inline constexpr uint64_t kOfferKinds = 15;
inline constexpr int kOfferOffsetBits = 36;
constexpr uint64_t makeOffer(OfferKind kind, uint64_t value = 0) {
  return value | static_cast<uint64_t>(kind);
}
constexpr OfferKind kindOf(uint64_t offer) {
  return static_cast<OfferKind>(offer & kOfferKinds);
}
constexpr bool canOffer(const WindowReference& place) {
  return place.window != 0 && place.offset % 16 == 0 && place.offset >> kOfferOffsetBits == 0;
}
constexpr uint64_t offerOf(const WindowReference& place) {
  return makeOffer(OfferKind::window, place.window << kOfferOffsetBits | place.offset);
}

// A window begins with the steps that peers have taken and their offers, both [block][rank], and
// continues with slots, [peer that stores them][block][slot].
constexpr size_t wideOffersAt() {
  return sizeof(uint64_t) * kWideMaxBlocks * kDirectMaxRanks;
}
constexpr size_t wideHeaderBytes() {
  return wideOffersAt() + sizeof(BufferOffer) * kWideMaxBlocks * kDirectMaxRanks;
}
constexpr size_t wideWindowBytes(int ranks, int blocks, uint32_t slotLines) {
  return wideHeaderBytes() + static_cast<size_t>(ranks - 1) * static_cast<size_t>(blocks) *
                                 kWideSlots * slotLines * kWideLineBytes;
}

// Steps to and from one peer.
struct alignas(16) WideSteps {
  uint64_t sent, received;
};
// What a block knows of a peer's buffers during a launch.
struct PeerBuffers {
  std::byte* address[2];    // if this rank may use them
  MappedWindow* pinned[2];  // for it
  uint64_t taken[2];        // 1: the peer waits for an answer
  uint64_t answer;          // of the peer; 0: none yet
  uint64_t failed[2];       // 1: a wait for the peer ended with an abort
};
struct WideMemory {
  std::byte* window;
  std::byte* theirs[kDirectMaxPeers];
  WideSteps* steps;      // [block][peer]
  PeerBuffers* buffers;  // [block][peer]; for the host target
  // Which peers can be offered addresses, and which places in windows.
  DirectPeers byAddress, byWindow;
};

// What numbers of warps are divided by, without a division, which takes kernels a tenth of a
// microsecond.
struct WarpDivisor {
  uint16_t count = 1;
  uint16_t reciprocal = 1024;  // 1024 / count, rounded up

  static constexpr WarpDivisor of(int count) {
    return {static_cast<uint16_t>(count), static_cast<uint16_t>((1023 + count) / count)};
  }
  // Of up to twice as many warps as a block of the direct family has.
  constexpr int divide(int warps) const { return warps * reciprocal >> 10; }
};
static_assert([] {
  for (int count = 1; count <= kDirectMaxPeers; count++) {
    for (int warps = 0; warps < 2 * kDirectMaxThreads / kWarpThreads; warps++) {
      if (WarpDivisor::of(count).divide(warps) != warps / count) return false;
    }
  }
  return true;
}());

// One work over LL128. Share r of a buffer begins at r times its stride, and ends at `endBytes` at
// the latest. `passes` passes of `passLines` lines of each share are dealt to the blocks.
// `twoShot`: an all-reduce whose shares are the parts of the buffer, as many as there are ranks:
// rank r reduces part r and sends the result to all peers.
// `offers`: ranks may use each other's buffers instead of lines (collective/direct_buffers.h); all
// ranks agree on this.
// `teams`: the number of teams that the warps of a block are dealt to; each takes care of some of
// the peers. One for each peer, so that no lane sends to one peer after another, unless the output
// may take the place of an input that goes to all peers: a lane then reads what it overwrites.
struct WideArguments {
  WideMemory memory;
  const uint32_t* abortFlag;
  const uint32_t* launchFlag;
  LaunchMark mark;
  int32_t rank;
  int32_t ranks;
  int32_t blocks;  // of the window; a launch may have fewer
  uint32_t slotLines;
  uint32_t passLines, passes;
  bool twoShot;
  bool offers;
  WarpDivisor teams;
  uint64_t endBytes;
  MappedWindow* windows;                // of peers; null: none
  WindowReference ownInput, ownOutput;  // offered to peers of other processes
  bool inputIsOpen, outputIsOpen;       // to peers of this process
  DirectWork work;
};
static_assert(sizeof(WideArguments) <= kMaxArgumentBytes);

// A message to or from a peer: over LL, of at most the lines that a launch may move, or over LL128.
// Passes over LL128 are dealt to the first `blocks` blocks, as those of a work are, so that both
// ends know from the size of a message which steps of which FIFOs it takes.
struct DirectMessage {
  std::byte* buffer;
  uint32_t bytes;
  uint8_t peer;
  bool sends;
  uint8_t blocks;    // 0: over LL
  uint8_t lastLine;  // of a pass over LL128, from 0

  constexpr uint32_t passBytes() const { return (uint32_t{lastLine} + 1) * kWideLineData; }
};
inline constexpr uint32_t kMaxPassLines = 256;

// Messages over LL128 (collective/wide_messages.h). Each stream, the messages to a peer or from it,
// has a team of threads in every block, so that none waits for another. What a rank sends to itself
// is a stream too, to peer `ranks - 1`: a message that sends is followed by the one that receives
// it.
inline constexpr int kMaxStreams = 2 * kDirectMaxPeers + 1;
inline constexpr int kMaxTeams = kChannelThreads / kWarpThreads;  // of a block of the launch
static_assert(kMaxStreams <= 2 * kMaxTeams);
inline constexpr int kMaxTeamWarps = 8;
inline constexpr int kTeamBarriers = 15;  // for teams of several warps, besides that of the block
struct WideStreams {
  WideMemory memory;
  int32_t windowBlocks;  // of the window
  uint32_t slotLines;
  int32_t blocks;  // that the messages use
  int32_t streams;
  WarpDivisor teamWarps;        // of a team
  uint8_t stream[kMaxStreams];  // twice the peer, plus 1 if it sends

  constexpr int teams() const { return streams < kMaxTeams ? streams : kMaxTeams; }
  // Of the launch: where there are many streams, two for each block of the FIFOs.
  constexpr int launchBlocks() const { return blocks * ((streams + kMaxTeams - 1) / kMaxTeams); }
};

// A launch of few messages over LL128 and nothing else.
inline constexpr int kMaxWideMessages = 32;
inline constexpr int kMaxWideMessageThreads = 3 * kMaxTeamWarps * kWarpThreads;
struct WideMessagesArguments {
  WideStreams wide;
  const uint32_t* abortFlag;
  const uint32_t* launchFlag;
  LaunchMark mark;
  int32_t rank;
  int32_t ranks;
  int32_t messages;
  DirectMessage message[kMaxWideMessages];

  // Of a block.
  constexpr int threads() const { return wide.teamWarps.count * wide.teams() * kWarpThreads; }
};
static_assert(sizeof(WideMessagesArguments) <= kMaxArgumentBytes);

// Messages in any number and order, direct ones and those through the FIFOs of channels, in one
// launch: none waits for one of another peer, of the other direction or of another kind. Blocks:
// one for each channel; if there are messages over LL, one for each peer, whose streams it serves;
// and those of the messages over LL128. In a block of the first two kinds one group sends, and the
// other receives.
inline constexpr int kMaxMessageWorks = 128;
inline constexpr int kMaxDirectMessages = 1024;
struct MessagesArguments {
  DirectMemory memory;
  WideStreams wide;
  DeviceCommunicator* communicator;
  const uint32_t* abortFlag;
  const uint32_t* launchFlag;
  LaunchMark mark;
  int32_t rank;
  int32_t ranks;
  int32_t lineBits;
  int32_t channels;
  int32_t peers;  // that have a block; 0: no messages over LL
  int32_t works;
  int32_t messages;
  SendReceiveWork work[kMaxMessageWorks];
  DirectMessage message[kMaxDirectMessages];

  constexpr int firstWideBlock() const { return channels + peers; }
};
// Of the GPUs that CUDA 13 supports.
inline constexpr size_t kMostArgumentBytes = 32764;
static_assert(sizeof(MessagesArguments) <= kMostArgumentBytes);

}  // namespace unisono::device
