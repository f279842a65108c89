// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/direct_work.h"
#include "device/protocol/launch_mark.h"
#include "device/protocol/low_latency.h"
#include "device/reduce/pack_reduction.h"
#include "device/reduce/reductions.h"

// Every operation between ranks that reach each other's memory, in one hop: a lane stores its packs
// into the peers' windows, then polls its own window for the packs that it takes. Nothing but
// latency: no barrier between ranks, no fence.
namespace unisono::device::UNISONO_TARGET {

// How many ranks a body is made for: exactly kRanks, or any number, with kRanks - 1 peers at a
// time.
template <int kRanks, bool kExactly>
struct DirectRanks {
  static constexpr int kBatch = kRanks - 1;
  static constexpr bool kIsExact = kExactly;
  static constexpr bool kIsPair = kExactly && kRanks == 2;
  UNISONO_DEVICE static int of(int32_t ranks) { return kExactly ? kRanks : ranks; }
};

// What takes the place of a reduction in a copy.
struct DirectCopy {
  using Element = uint8_t;
  static constexpr bool kPrepares = false;
  UNISONO_DEVICE explicit DirectCopy(const ReductionSpec&) {}
};

// The widest word, of 4 bytes at most, that buffers of such a size at such an address consist of.
template <typename Word, typename Use>
UNISONO_DEVICE auto withWidestWord(const void* buffer, uint32_t bytes, Use use) {
  const uint64_t bits = reinterpret_cast<uint64_t>(buffer) | bytes;
  if (sizeof(Word) < 4 && bits % 4 == 0) return use(uint32_t{});
  if (sizeof(Word) < 2 && bits % 2 == 0) return use(uint16_t{});
  return use(Word{});
}
// Packs at the ends of shares, or of buffers that are not aligned. Calls keep this rare code out of
// the instructions that every launch fetches.
template <typename Word>
UNISONO_DEVICE_CALL uint64_t loadPartOfPack(const std::byte* buffer, uint32_t index,
                                            uint32_t bytes) {
  return withWidestWord<Word>(
      buffer, bytes, [&](auto word) { return loadPack<decltype(word)>(buffer, index, bytes); });
}
template <typename Word>
UNISONO_DEVICE_CALL void storePartOfPack(std::byte* buffer, uint32_t index, uint32_t bytes,
                                         uint64_t pack) {
  withWidestWord<Word>(buffer, bytes,
                       [&](auto word) { storePack<decltype(word)>(buffer, index, bytes, pack); });
}
template <typename Element, size_t kBytes = sizeof(Element)>
using UnsignedOf = std::conditional_t<
    kBytes == 1, uint8_t,
    std::conditional_t<kBytes == 2, uint16_t, std::conditional_t<kBytes == 4, uint32_t, uint64_t>>>;

// Where a lane is in its launch.
struct DirectLane {
  int block, blocks;
  int lane, lanes;  // in the block
};

#ifdef __CUDACC__
__device__ __forceinline__ DirectLane thisLane() {
  return {static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), static_cast<int>(threadIdx.x),
          static_cast<int>(blockDim.x)};
}
#endif

// The part of a lane in one work.
struct LaneShare {
  uint32_t first, step;
};

UNISONO_DEVICE bool covers(DirectPeers peers, int peer) {
  return (peers >> peer & 1) != 0;
}
UNISONO_DEVICE uint32_t linesTo(const DirectWork& work, int peer) {
  return covers(work.to, peer) ? linesOf(work.inputBytes) : 0;
}
UNISONO_DEVICE uint32_t linesFrom(const DirectWork& work, int peer) {
  return covers(work.from, peer) ? linesOf(work.outputBytes) : 0;
}

// The streams to and from the peers first .. first + kBatch - 1, as they are at the start of a
// work.
template <int kBatch>
struct Streams {
  DirectPosition position[kBatch];
  uint32_t taken[kBatch];  // of what was sent, as far as the peer has acknowledged
};

// Where a rank's own operand comes among those of `count` peers from `first` on: before the peer
// with its number, or last. Beyond `count` if it comes among those of other peers.
UNISONO_DEVICE int ownPlaceIn(int first, int count, int me, int peers) {
  const int place = me - first;
  const bool isHere = place >= 0 && (place < count || (place == count && first + count == peers));
  return isHere ? place : count + 1;
}

// One launch of the direct family on one rank, from the view of one lane.
template <typename Ranks, typename Arguments>
class DirectLaunch {
 public:
  static constexpr int kBatch = Ranks::kBatch;
  static constexpr bool kIsCall = std::is_same_v<Arguments, DirectCallArguments>;
  using Batch = Streams<kBatch>;

  UNISONO_DEVICE DirectLaunch(const Arguments& arguments, const DirectLane& at)
      : arguments_(arguments),
        at_(at),
        me_(arguments.rank),
        peers_(Ranks::of(arguments.ranks) - 1) {}

  // Says whether the block has a part in a work.
  UNISONO_DEVICE bool takesPart(const DirectWork& work) const {
    return blockOf(work) < work.blocks;
  }
  // Says whether one batch holds the streams of all peers.
  UNISONO_DEVICE bool isOneBatch() const { return peers_ <= kBatch; }

  // The streams of a batch at the start of the launch.
  UNISONO_DEVICE Batch load(int first) const {
    Batch batch{};
    UNISONO_UNROLL
    for (int i = 0; i < kBatch; i++) {
      if (first + i >= peers_) break;
      batch.position[i] = positionOf(first + i);
      batch.taken[i] = loadRelaxed(acknowledgmentBy(first + i));
    }
    return batch;
  }
  // The same at the start of work `w`.
  UNISONO_DEVICE Batch loadFor(int w, int first) const {
    Batch batch = load(first);
    for (int before = 0; before < w; before++) {
      UNISONO_UNROLL
      for (int i = 0; i < kBatch; i++) {
        batch.position[i].sent += linesTo(arguments_.work[before], first + i);
        batch.position[i].received += linesFrom(arguments_.work[before], first + i);
      }
    }
    return batch;
  }

  // Stores the own shares into the windows of the peers. False after an abort. The buffers of a
  // launch that does not run belong to the user. `isMarked`: whether the start was marked; a wait
  // marks it.
  template <typename Combine>
  UNISONO_DEVICE bool send(int w, const Batch& firstBatch, bool runs, bool& isMarked) {
    const DirectWork& work = arguments_.work[w];
    ReductionSpec reduction = work.reduction;
    reduction.scalarIsPointer = reduction.scalarIsPointer && runs;
    const Combine combine(reduction);
    const LaneShare share = shareOf(work);
    const uint32_t lines = work.to != 0 ? linesOf(work.inputBytes) : 0;
    for (int first = 0; first < peers_; first += kBatch) {
      const Batch batch = first == 0 ? firstBatch : loadFor(w, first);
      // Without branches as far as possible: what does not depend on loads is then computed while
      // they are on their way.
      uint32_t index = share.first;
      bool hasLine = index < lines && runs;
      do {
        // The inputs are on their way while the room is checked.
        const Inputs inputs = loadInputs<Combine>(work, first, index, hasLine);
        if (hasLine && lacksRoom(work, batch, first)) [[unlikely]] {
          const bool marks = !isMarked;
          isMarked = true;
          if (!markAndAwaitRoom(arguments_, at_, w, marks)) return false;
        }
        UNISONO_UNROLL
        for (int i = 0; i < kBatch; i++) {
          const uint32_t place = batch.position[i].sent + index;
          Line* line = streamTo(first + i) + inStream(place);
          uint64_t pack = inputs.isCommon ? inputs.common : inputs.own[i];
          if constexpr (Combine::kPrepares) pack = preparePack(combine, pack);
          storeLineIf(hasLine && sendsTo(work, first + i), line, pack, flagOf(place));
        }
        index += share.step;
        hasLine = index < lines && runs;
      } while (hasLine);
    }
    return runs;
  }

  // Takes the shares of the peers out of the own window. False after an abort.
  template <typename Combine>
  UNISONO_DEVICE bool receive(int w, const Batch& firstBatch) {
    if constexpr (std::is_same_v<Combine, DirectCopy>) {
      return receiveCopies(w, firstBatch);
    } else {
      return reduce<Combine>(w, firstBatch);
    }
  }

  // Waits until the peers have taken enough of earlier calls that the lines of work `w` overwrite
  // nothing. False after an abort.
  UNISONO_DEVICE bool awaitRoom(int w) const {
    acknowledge();  // a peer may be waiting too
    const DirectWork& work = arguments_.work[w];
    for (int first = 0; first < peers_; first += kBatch) {
      const Batch batch = loadFor(w, first);
      UNISONO_UNROLL
      for (int i = 0; i < kBatch; i++) {
        if (!sendsTo(work, first + i)) continue;
        if (!waitForRoom(first + i, batch.position[i].sent + linesOf(work.inputBytes))) {
          return false;
        }
      }
    }
    return true;
  }

  // Tells the peers what earlier launches have taken, if it is much. To be called before positions
  // advance; calling it again changes nothing.
  UNISONO_DEVICE void acknowledge() const {
    if (at_.block != 0) return;
    for (int peer = at_.lane; peer < peers_; peer += at_.lanes) {
      const DirectPosition position = positionOf(peer);
      if (isAcknowledged(position)) tell(peer, position);
    }
  }
  // The same for all peers, with what one batch has loaded.
  UNISONO_DEVICE void acknowledge(const Batch& all) const {
    if (at_.block != 0 || at_.lane != 0) return;
    UNISONO_UNROLL
    for (int i = 0; i < kBatch; i++) {
      if (i < peers_ && isAcknowledged(all.position[i])) tell(i, all.position[i]);
    }
  }

  // Advances the positions by what the launch moves. Every block has a row of them and advances
  // rows that no block of this launch reads, then, after all its lanes have read it, its own.
  template <typename SyncBlock>
  UNISONO_DEVICE void advance(SyncBlock syncBlock) const {
    forEachOtherRow([&](int r) {
      for (int peer = 0; peer < peers_; peer++) store(r, peer, advanced(positionOf(peer), peer));
    });
    syncBlock();
    for (int peer = at_.lane; peer < peers_; peer += at_.lanes) {
      store(at_.block, peer, advanced(positionOf(peer), peer));
    }
  }
  // The same for all peers, with what one batch has loaded.
  template <typename SyncBlock>
  UNISONO_DEVICE void advance(const Batch& all, SyncBlock syncBlock) const {
    DirectPosition after[kBatch];
    UNISONO_UNROLL
    for (int i = 0; i < kBatch; i++) after[i] = advanced(all.position[i], i);
    const auto storeRow = [&](int r) {
      UNISONO_UNROLL
      for (int i = 0; i < kBatch; i++) {
        if (i < peers_) store(r, i, after[i]);
      }
    };
    forEachOtherRow(storeRow);
    syncBlock();
    if (at_.lane == 0) storeRow(at_.block);
  }

 protected:
  // Calls awaitRoom(). `marks`: marks the start of the launch before.
  UNISONO_DEVICE_CALL static bool markAndAwaitRoom(const Arguments& arguments, DirectLane at, int w,
                                                   bool marks) {
    if (marks && at.lane == 0) markStart(arguments.mark, at.block, 0);
    return DirectLaunch<DirectRanks<2, false>, Arguments>(arguments, at).awaitRoom(w);
  }

  // The number of this block among those of a work.
  UNISONO_DEVICE uint32_t blockOf(const DirectWork& work) const {
    if (kIsCall) return static_cast<uint32_t>(at_.block);
    return static_cast<uint32_t>(at_.block + at_.blocks - work.firstBlock) %
           static_cast<uint32_t>(at_.blocks);
  }
  UNISONO_DEVICE LaneShare shareOf(const DirectWork& work) const {
    const auto lanes = static_cast<uint32_t>(at_.lanes);
    const auto blocks = kIsCall ? static_cast<uint32_t>(at_.blocks) : uint32_t{work.blocks};
    return {blockOf(work) * lanes + static_cast<uint32_t>(at_.lane), blocks * lanes};
  }

  UNISONO_DEVICE int rankOf(int peer) const { return peer < me_ ? peer : peer + 1; }
  UNISONO_DEVICE DirectPosition* position(int row, int peer) const {
    return arguments_.memory.positions + (row * peers_ + peer);
  }
  UNISONO_DEVICE DirectPosition positionOf(int peer) const {
    noteRead(position(at_.block, peer), sizeof(DirectPosition));
    return *position(at_.block, peer);
  }
  UNISONO_DEVICE void store(int row, int peer, const DirectPosition& value) const {
    noteWrite(position(row, peer), sizeof(DirectPosition));
    *position(row, peer) = value;
  }
  template <typename Visit>
  UNISONO_DEVICE void forEachOtherRow(Visit visit) const {
    UNISONO_NO_UNROLL
    for (int r = at_.block + (at_.lane + 1) * at_.blocks; r < kDirectMaxBlocks;
         r += at_.lanes * at_.blocks) {
      visit(r);
    }
  }
  // What a peer has acknowledged to this rank, and the reverse.
  UNISONO_DEVICE const uint32_t* acknowledgmentBy(int peer) const {
    return reinterpret_cast<const uint32_t*>(arguments_.memory.window) + rankOf(peer);
  }
  UNISONO_DEVICE void tell(int peer, const DirectPosition& position) const {
    storeRelaxed(reinterpret_cast<uint32_t*>(arguments_.memory.theirs[peer]) + me_,
                 position.received);
  }
  UNISONO_DEVICE bool isAcknowledged(const DirectPosition& position) const {
    return position.received - position.acknowledged >= capacity() / kDirectShares;
  }
  UNISONO_DEVICE uint32_t capacity() const { return uint32_t{1} << arguments_.lineBits; }

  // The stream from rank `sender` in the window of its receiver.
  UNISONO_DEVICE Line* streamIn(std::byte* window, int sender) const {
    return reinterpret_cast<Line*>(window + kDirectHeaderBytes) +
           (static_cast<uint64_t>(sender) << arguments_.lineBits);
  }
  UNISONO_DEVICE Line* streamTo(int peer) const {
    return streamIn(arguments_.memory.theirs[peer], me_);
  }
  UNISONO_DEVICE const Line* streamFrom(int peer) const {
    return streamIn(arguments_.memory.window, rankOf(peer));
  }
  UNISONO_DEVICE uint32_t inStream(uint32_t place) const { return place & (capacity() - 1); }
  UNISONO_DEVICE uint32_t flagOf(uint32_t place) const {
    return (place >> arguments_.lineBits) + 1;
  }

  // Asked about works with lines only, which the only peer of two ranks has part in.
  UNISONO_DEVICE bool sendsTo(const DirectWork& work, int peer) const {
    if (Ranks::kIsPair) return true;
    return peer < peers_ && covers(work.to, peer);
  }
  UNISONO_DEVICE bool takesFrom(const DirectWork& work, int peer) const {
    if (Ranks::kIsPair) return true;
    return peer < peers_ && covers(work.from, peer);
  }

  // What becomes of a position in this launch.
  UNISONO_DEVICE DirectPosition advanced(DirectPosition position, int peer) const {
    if (isAcknowledged(position)) position.acknowledged = position.received;
    for (int w = 0; w < works(); w++) {
      position.sent += linesTo(arguments_.work[w], peer);
      position.received += linesFrom(arguments_.work[w], peer);
    }
    return position;
  }
  UNISONO_DEVICE int works() const { return kIsCall ? 1 : arguments_.works; }

  // Whether the lines of a work would overwrite some that a peer of a batch has yet to take.
  // Without branches, as nearly always no peer has.
  UNISONO_DEVICE bool lacksRoom(const DirectWork& work, const Batch& batch, int first) const {
    bool lacks = false;
    UNISONO_UNROLL
    for (int i = 0; i < kBatch; i++) {
      const uint32_t end = batch.position[i].sent + linesOf(work.inputBytes);
      lacks |= sendsTo(work, first + i) & (end - batch.taken[i] > capacity());
    }
    return lacks;
  }
  // Waits until a peer has taken so much that the lines before `end` overwrite nothing.
  UNISONO_DEVICE bool waitForRoom(int peer, uint32_t end) const {
    const uint32_t* counter = acknowledgmentBy(peer);
    return waitUntil(arguments_.abortFlag, {"room in the window", me_, rankOf(peer), at_.block},
                     [&] { return end - loadRelaxed(counter) <= capacity(); });
  }

  // What a lane sends to the peers of a batch: one pack to all, or one of its own to each.
  struct Inputs {
    bool isCommon;
    uint64_t common;
    uint64_t own[kBatch];
  };
  // Loads packs `index` of the shares of a batch, if they are wanted. Nothing uses a result in
  // between: the loads would wait for each other.
  template <typename Combine>
  UNISONO_DEVICE Inputs loadInputs(const DirectWork& work, int first, uint32_t index,
                                   bool wanted) const {
    Inputs inputs{kBatch > 1 && work.inputStride == 0, 0, {}};
    if (work.whole) [[likely]] {
      inputs.common = loadWhole(work, 0, index, wanted && inputs.isCommon);
      UNISONO_UNROLL
      for (int i = 0; i < kBatch; i++) {
        const bool isOwn = !inputs.isCommon && sendsTo(work, first + i);
        inputs.own[i] = loadWhole(work, rankOf(first + i), index, wanted && isOwn);
      }
    } else if (wanted) {
      using Word = UnsignedOf<typename Combine::Element>;
      if (inputs.isCommon) {
        inputs.common = loadPartOfPack<Word>(work.input, index, work.inputBytes);
      }
      UNISONO_UNROLL
      for (int i = 0; i < kBatch; i++) {
        if (inputs.isCommon || !sendsTo(work, first + i)) continue;
        inputs.own[i] =
            loadPartOfPack<Word>(inputOf(work, rankOf(first + i)), index, work.inputBytes);
      }
    }
    return inputs;
  }
  UNISONO_DEVICE static const std::byte* inputOf(const DirectWork& work, int share) {
    return work.input + static_cast<unsigned>(share) * work.inputStride;
  }
  UNISONO_DEVICE static uint64_t loadWhole(const DirectWork& work, int share, uint32_t index,
                                           bool wanted) {
    const std::byte* from = inputOf(work, share) + index * uint64_t{8};
    if (wanted) noteRead(from, 8);
    return loadWord(reinterpret_cast<const uint64_t*>(from), wanted, 0);
  }
  // Pack `index` of a share.
  template <typename Combine>
  UNISONO_DEVICE static uint64_t loadInput(const Combine& combine, const DirectWork& work,
                                           int share, uint32_t index) {
    uint64_t pack = loadShare<typename Combine::Element>(inputOf(work, share), work.inputBytes,
                                                         work.whole, index, true);
    if constexpr (Combine::kPrepares) pack = preparePack(combine, pack);
    return pack;
  }
  template <typename Combine>
  UNISONO_DEVICE static void storeOutput(const DirectWork& work, int share, uint32_t index,
                                         uint64_t pack) {
    std::byte* to = work.output + static_cast<unsigned>(share) * work.outputStride;
    storeShare<typename Combine::Element>(to, work.outputBytes, work.whole, index, pack);
  }

  // Pack `index` of a share at `from`, if it is wanted.
  template <typename Element>
  UNISONO_DEVICE static uint64_t loadShare(const std::byte* from, uint32_t bytes, bool whole,
                                           uint32_t index, bool wanted) {
    uint64_t pack = 0;
    if (!whole && wanted) [[unlikely]] {
      pack = loadPartOfPack<UnsignedOf<Element>>(from, index, bytes);
    }
    const bool isWhole = whole && wanted;
    if (isWhole) noteRead(from + index * uint64_t{8}, 8);
    return loadWord(reinterpret_cast<const uint64_t*>(from) + index, isWhole, pack);
  }
  template <typename Element>
  UNISONO_DEVICE static void storeShare(std::byte* to, uint32_t bytes, bool whole, uint32_t index,
                                        uint64_t pack) {
    if (whole) [[likely]] {
      noteWrite(to + index * uint64_t{8}, 8);
      reinterpret_cast<uint64_t*>(to)[index] = pack;
    } else {
      storePartOfPack<UnsignedOf<Element>>(to, index, bytes, pack);
    }
  }

  // Polls for the lines `index` of a batch until all are there.
  UNISONO_DEVICE bool awaitLines(const DirectWork& work, const Batch& batch, int first,
                                 uint32_t index, uint64_t (&pack)[kBatch]) const {
    Line line[kBatch] = {};
    const Line* from[kBatch];
    uint32_t flag[kBatch];
    UNISONO_UNROLL
    for (int i = 0; i < kBatch; i++) {
      const uint32_t place = batch.position[i].received + index;
      from[i] = takesFrom(work, first + i) ? streamFrom(first + i) + inStream(place) : nullptr;
      flag[i] = flagOf(place);
    }
    auto allHere = [&] {
      UNISONO_UNROLL
      for (int i = 0; i < kBatch; i++) {
        if (takesFrom(work, first + i)) line[i] = loadLine(from[i]);
      }
      bool here = true;
      UNISONO_UNROLL
      for (int i = 0; i < kBatch; i++) {
        here = here && (!takesFrom(work, first + i) || lineHolds(line[i], flag[i]));
      }
      return here;
    };
    if (!waitUntil(arguments_.abortFlag,
                   {"lines of its peers", me_, onlyRankOf(work.from), at_.block}, allHere)) {
      return false;
    }
    UNISONO_UNROLL
    for (int i = 0; i < kBatch; i++) pack[i] = lineData(line[i]);
    return true;
  }
  // For reports: -1 for several.
  UNISONO_DEVICE int onlyRankOf(DirectPeers peers) const {
    int only = -1;
    for (int peer = 0; peer < peers_; peer++) {
      if (peers == 1 << peer) only = rankOf(peer);
    }
    return only;
  }

  UNISONO_DEVICE bool receiveCopies(int w, const Batch& firstBatch) const {
    const DirectWork& work = arguments_.work[w];
    const LaneShare share = shareOf(work);
    if (work.own) {
      const DirectCopy combine(work.reduction);
      const uint32_t lines = linesOf(work.inputBytes);
      for (uint32_t index = share.first; index < lines; index += share.step) {
        storeOutput<DirectCopy>(work, me_, index, loadInput(combine, work, me_, index));
      }
    }
    const uint32_t lines = work.from != 0 ? linesOf(work.outputBytes) : 0;
    for (int first = 0; first < peers_; first += kBatch) {
      const Batch batch = first == 0 ? firstBatch : loadFor(w, first);
      for (uint32_t index = share.first; index < lines; index += share.step) {
        uint64_t pack[kBatch];
        if (!awaitLines(work, batch, first, index, pack)) return false;
        UNISONO_UNROLL
        for (int i = 0; i < kBatch; i++) {
          if (takesFrom(work, first + i)) {
            storeOutput<DirectCopy>(work, rankOf(first + i), index, pack[i]);
          }
        }
      }
    }
    return true;
  }

  template <typename R>
  UNISONO_DEVICE bool reduce(int w, const Batch& firstBatch) const {
    const DirectWork& work = arguments_.work[w];
    const R reducer(work.reduction);
    const LaneShare share = shareOf(work);
    const uint32_t lines = work.from != 0 ? linesOf(work.outputBytes) : 0;
    for (uint32_t index = share.first; index < lines; index += share.step) {
      const uint64_t own = loadInput(reducer, work, me_, index);
      PackReduction<R, kAnyOperands, 1> sum;
      for (int first = 0; first < peers_; first += kBatch) {
        const Batch batch = first == 0 ? firstBatch : loadFor(w, first);
        uint64_t pack[kBatch];
        if (!awaitLines(work, batch, first, index, pack)) return false;
        const int count = kBatch < peers_ - first ? kBatch : peers_ - first;
        const int ownPlace = ownPlaceIn(first, count, me_, peers_);
        const int end = count + (ownPlace <= count ? 1 : 0);
        UNISONO_UNROLL
        for (int i = 0; i <= kBatch; i++) {
          if (i >= end) break;
          const uint64_t of = i > ownPlace ? pack[i > 0 ? i - 1 : 0] : pack[i < kBatch ? i : 0];
          sum.add(reducer, {i == ownPlace ? own : of}, first + i == 0);
        }
      }
      uint64_t result[1];
      sum.result(reducer, true, result);
      storeOutput<R>(work, 0, index, result[0]);
    }
    return true;
  }

  const Arguments& arguments_;
  DirectLane at_;
  int me_;
  int peers_;
};

// A launch of one work. Where all streams fit into registers, positions advance while the lines are
// on their way.
template <typename Ranks, typename Combine, typename Stopped, typename SyncBlock>
UNISONO_DEVICE void directCall(const DirectCallArguments& arguments, const DirectLane& at,
                               Stopped stopped, SyncBlock syncBlock) {
  DirectLaunch<Ranks, DirectCallArguments> launch(arguments, at);
  const Streams<Ranks::kBatch> streams = launch.load(0);
  // If it can, after the lines are on their way, for which the peers wait.
  bool isMarked = kLoadsMayHang;
  if (isMarked && at.lane == 0) markStart(arguments.mark, at.block, 0);
  const bool sent = launch.template send<Combine>(0, streams, !stopped(), isMarked);
  if (!isMarked && at.lane == 0) markStart(arguments.mark, at.block, 0);
  if (launch.isOneBatch()) {
    launch.acknowledge(streams);
    launch.advance(streams, syncBlock);
    if (sent) launch.template receive<Combine>(0, streams);
  } else {
    launch.acknowledge();
    if (sent) launch.template receive<Combine>(0, streams);
    launch.advance(syncBlock);
  }
  if (at.lane == 0) markEnd(arguments.mark, at.block, 0);
}

}  // namespace unisono::device::UNISONO_TARGET
