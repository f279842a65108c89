// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/direct_work.h"
#include "device/protocol/low_latency.h"
#include "device/reduce/reductions.h"

// Every operation between ranks that reach each other's memory, in one hop: a lane stores its packs
// into the peers' windows, then polls its own window for the packs that it takes. Nothing but
// latency: no barrier between ranks, no fence.
namespace unisono::device::UNISONO_TARGET {

// How many ranks a body is made for: exactly kRanks, or any number, kRanks at a time.
template <int kRanks, bool kExactly>
struct DirectRanks {
  static constexpr int kBatch = kRanks;
  static constexpr bool kIsExact = kExactly;
  UNISONO_DEVICE static int of(int32_t ranks) { return kExactly ? kRanks : ranks; }
};

// What takes the place of a reduction in a copy.
struct DirectCopy {
  using Element = uint8_t;
  static constexpr bool kPrepares = false;
  UNISONO_DEVICE explicit DirectCopy(const ReductionSpec&) {}
};

// Where a lane is in its launch.
struct DirectLane {
  int block, blocks;
  int lane, lanes;  // in the block
};

// The part of a lane in one work.
struct LaneShare {
  uint32_t first, step;
};

UNISONO_DEVICE bool covers(int peers, int rank) {
  return peers == kEveryPeer || peers == rank;
}
UNISONO_DEVICE uint32_t linesTo(const DirectWork& work, int peer) {
  return covers(work.to, peer) ? linesOf(work.inputBytes) : 0;
}
UNISONO_DEVICE uint32_t linesFrom(const DirectWork& work, int peer) {
  return covers(work.from, peer) ? linesOf(work.outputBytes) : 0;
}

// The streams to and from the ranks first .. first + kBatch - 1, as they are at the start of a
// work.
template <int kBatch>
struct Streams {
  DirectPosition position[kBatch];
  uint32_t acknowledged[kBatch];
};

// One launch of the direct family on one rank, from the view of one lane.
template <typename Ranks, typename Arguments>
class DirectLaunch {
 public:
  static constexpr int kBatch = Ranks::kBatch;
  static constexpr bool kIsCall = std::is_same_v<Arguments, DirectCallArguments>;
  using Batch = Streams<kBatch>;

  UNISONO_DEVICE DirectLaunch(const Arguments& arguments, const DirectLane& at)
      : arguments_(arguments), at_(at), me_(arguments.rank), ranks_(Ranks::of(arguments.ranks)) {}

  // Says whether the block has a part in a work.
  UNISONO_DEVICE bool takesPart(const DirectWork& work) const {
    return blockOf(work) < work.blocks;
  }

  // The streams of a batch at the start of the launch.
  UNISONO_DEVICE Batch load(int first) const {
    Batch batch{};
    UNISONO_UNROLL
    for (int i = 0; i < kBatch; i++) {
      const int peer = first + i;
      if (peer >= ranks_ || peer == me_) continue;
      const DirectPosition* position = row(at_.block) + peer;
      noteRead(position, sizeof(*position));
      batch.position[i] = *position;
      batch.acknowledged[i] = loadRelaxed(acknowledgments(me_) + peer);
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

  // Stores the own shares into the windows of the peers. False after an abort.
  template <typename Combine>
  UNISONO_DEVICE bool send(int w, const Batch& firstBatch) {
    const DirectWork& work = arguments_.work[w];
    if (work.to == kNoPeer) return true;
    const Combine combine(work.reduction);
    const LaneShare share = shareOf(work);
    const uint32_t lines = linesOf(work.inputBytes);
    for (int first = 0; first < ranks_; first += kBatch) {
      const Batch batch = first == 0 ? firstBatch : loadFor(w, first);
      if (!awaitRoom(work, batch, first)) return false;
      for (uint32_t index = share.first; index < lines; index += share.step) {
        const bool isCommon = work.inputStride == 0;
        const uint64_t common = isCommon ? loadInput(combine, work, 0, index) : 0;
        uint64_t pack[kBatch];
        UNISONO_UNROLL
        for (int i = 0; i < kBatch; i++) {
          pack[i] = isCommon || !sendsTo(work, first + i)
                        ? common
                        : loadInput(combine, work, first + i, index);
        }
        UNISONO_UNROLL
        for (int i = 0; i < kBatch; i++) {
          if (!sendsTo(work, first + i)) continue;
          const uint32_t place = batch.position[i].sent + index;
          storeLine(lineOf(first + i, me_, place), pack[i], flagOf(place));
        }
      }
    }
    return true;
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

  // Tells the peers what earlier launches have taken, if it is much. To be called before positions
  // advance; calling it again changes nothing.
  UNISONO_DEVICE void acknowledge() {
    if (at_.block != 0) return;
    for (int peer = at_.lane; peer < ranks_; peer += at_.lanes) {
      if (peer == me_) continue;
      uint32_t* last = arguments_.memory.acknowledged + peer;
      noteRead(row(0) + peer, sizeof(DirectPosition));
      noteRead(last, sizeof(*last));
      const uint32_t received = row(0)[peer].received;
      if (received - *last < (uint32_t{1} << arguments_.lineBits) / kDirectShares) continue;
      storeRelaxed(acknowledgments(peer) + me_, received);
      noteWrite(last, sizeof(*last));
      *last = received;
    }
  }

  // Advances the positions by what the launch moves. Every block has a row of them and advances
  // rows that no block of this launch reads, then, after all its lanes have read it, its own.
  template <typename SyncBlock>
  UNISONO_DEVICE void advance(SyncBlock syncBlock) {
    const int firstRow = at_.block + (at_.lane + 1) * at_.blocks;
    for (int r = firstRow; r < kDirectMaxBlocks; r += at_.lanes * at_.blocks) {
      noteRead(row(at_.block), sizeof(DirectPosition) * static_cast<unsigned>(ranks_));
      noteWrite(row(r), sizeof(DirectPosition) * static_cast<unsigned>(ranks_));
      UNISONO_UNROLL
      for (int peer = 0; peer < ranks_; peer++) row(r)[peer] = advanced(peer);
    }
    syncBlock();
    for (int peer = at_.lane; peer < ranks_; peer += at_.lanes) {
      noteWrite(row(at_.block) + peer, sizeof(DirectPosition));
      row(at_.block)[peer] = advanced(peer);
    }
  }

 private:
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

  UNISONO_DEVICE DirectPosition* row(int block) const {
    return arguments_.memory.positions + block * ranks_;
  }
  // What `rank` knows of how far its peers are, one counter each.
  UNISONO_DEVICE uint32_t* acknowledgments(int rank) const {
    return reinterpret_cast<uint32_t*>(arguments_.memory.windows[rank]);
  }
  UNISONO_DEVICE Line* lineOf(int receiver, int sender, uint32_t place) const {
    const uint32_t inStream = place & ((uint32_t{1} << arguments_.lineBits) - 1);
    return reinterpret_cast<Line*>(arguments_.memory.windows[receiver] + kDirectHeaderBytes) +
           ((static_cast<uint32_t>(sender) << arguments_.lineBits) + inStream);
  }
  UNISONO_DEVICE uint32_t flagOf(uint32_t place) const {
    return (place >> arguments_.lineBits) + 1;
  }

  UNISONO_DEVICE bool sendsTo(const DirectWork& work, int peer) const {
    return peer < ranks_ && peer != me_ && covers(work.to, peer);
  }
  UNISONO_DEVICE bool takesFrom(const DirectWork& work, int peer) const {
    return peer < ranks_ && peer != me_ && covers(work.from, peer);
  }

  UNISONO_DEVICE DirectPosition advanced(int peer) const {
    DirectPosition position = row(at_.block)[peer];
    for (int w = 0; w < works(); w++) {
      position.sent += linesTo(arguments_.work[w], peer);
      position.received += linesFrom(arguments_.work[w], peer);
    }
    return position;
  }
  UNISONO_DEVICE int works() const { return kIsCall ? 1 : arguments_.works; }

  // Waits until the peers have taken enough of earlier calls that the lines of this work overwrite
  // nothing.
  UNISONO_DEVICE bool awaitRoom(const DirectWork& work, const Batch& batch, int first) {
    const int32_t capacity = int32_t{1} << arguments_.lineBits;
    UNISONO_UNROLL
    for (int i = 0; i < kBatch; i++) {
      const int peer = first + i;
      if (!sendsTo(work, peer)) continue;
      const uint32_t end = batch.position[i].sent + linesOf(work.inputBytes);
      // The peer may be further: a lane without lines of its own can be late.
      if (static_cast<int32_t>(end - batch.acknowledged[i]) <= capacity) continue;
      acknowledge();  // the peer may be waiting too
      const uint32_t* counter = acknowledgments(me_) + peer;
      if (!waitUntil(arguments_.abortFlag, {"room in the window", me_, peer, at_.block}, [&] {
            return static_cast<int32_t>(end - loadRelaxed(counter)) <= capacity;
          })) {
        return false;
      }
    }
    return true;
  }

  template <typename Combine>
  UNISONO_DEVICE static uint64_t loadInput(const Combine& combine, const DirectWork& work,
                                           int share, uint32_t index) {
    const std::byte* from = work.input + static_cast<unsigned>(share) * work.inputStride;
    uint64_t pack;
    if (work.whole) {
      noteRead(from + index * uint64_t{8}, 8);
      pack = reinterpret_cast<const uint64_t*>(from)[index];
    } else {
      pack = loadPack<typename Combine::Element>(from, index, work.inputBytes);
    }
    if constexpr (Combine::kPrepares) pack = preparePack(combine, pack);
    return pack;
  }
  template <typename Combine>
  UNISONO_DEVICE static void storeOutput(const DirectWork& work, int share, uint32_t index,
                                         uint64_t pack) {
    std::byte* to = work.output + static_cast<unsigned>(share) * work.outputStride;
    if (work.whole) {
      noteWrite(to + index * uint64_t{8}, 8);
      reinterpret_cast<uint64_t*>(to)[index] = pack;
    } else {
      storePack<typename Combine::Element>(to, index, work.outputBytes, pack);
    }
  }

  // Polls for the lines `index` of a batch until all are there.
  UNISONO_DEVICE bool awaitLines(const DirectWork& work, const Batch& batch, int first,
                                 uint32_t index, uint64_t (&pack)[kBatch]) {
    Line line[kBatch] = {};
    auto allHere = [&] {
      UNISONO_UNROLL
      for (int i = 0; i < kBatch; i++) {
        if (takesFrom(work, first + i)) {
          line[i] = loadLine(lineOf(me_, first + i, batch.position[i].received + index));
        }
      }
      bool here = true;
      UNISONO_UNROLL
      for (int i = 0; i < kBatch; i++) {
        if (takesFrom(work, first + i)) {
          here = here && lineHolds(line[i], flagOf(batch.position[i].received + index));
        }
      }
      return here;
    };
    if (!waitUntil(arguments_.abortFlag, {"lines of its peers", me_, work.from, at_.block},
                   allHere)) {
      return false;
    }
    UNISONO_UNROLL
    for (int i = 0; i < kBatch; i++) pack[i] = lineData(line[i]);
    return true;
  }

  UNISONO_DEVICE bool receiveCopies(int w, const Batch& firstBatch) {
    const DirectWork& work = arguments_.work[w];
    const LaneShare share = shareOf(work);
    if (work.own) {
      const DirectCopy combine(work.reduction);
      const uint32_t lines = linesOf(work.inputBytes);
      for (uint32_t index = share.first; index < lines; index += share.step) {
        storeOutput<DirectCopy>(work, me_, index, loadInput(combine, work, me_, index));
      }
    }
    if (work.from == kNoPeer) return true;
    const uint32_t lines = linesOf(work.outputBytes);
    for (int first = 0; first < ranks_; first += kBatch) {
      const Batch batch = first == 0 ? firstBatch : loadFor(w, first);
      for (uint32_t index = share.first; index < lines; index += share.step) {
        uint64_t pack[kBatch];
        if (!awaitLines(work, batch, first, index, pack)) return false;
        UNISONO_UNROLL
        for (int i = 0; i < kBatch; i++) {
          if (takesFrom(work, first + i)) {
            storeOutput<DirectCopy>(work, first + i, index, pack[i]);
          }
        }
      }
    }
    return true;
  }

  template <typename R>
  UNISONO_DEVICE bool reduce(int w, const Batch& firstBatch) {
    const DirectWork& work = arguments_.work[w];
    if (work.from == kNoPeer) return true;
    const R reducer(work.reduction);
    const LaneShare share = shareOf(work);
    const uint32_t lines = linesOf(work.outputBytes);
    for (uint32_t index = share.first; index < lines; index += share.step) {
      const uint64_t own = loadInput(reducer, work, me_, index);
      PackReduction<R> sum;
      for (int first = 0; first < ranks_; first += kBatch) {
        const Batch batch = first == 0 ? firstBatch : loadFor(w, first);
        uint64_t pack[kBatch];
        if (!awaitLines(work, batch, first, index, pack)) return false;
        UNISONO_UNROLL
        for (int i = 0; i < kBatch; i++) {
          if (first + i < ranks_) sum.add(first + i == me_ ? own : pack[i], first + i == 0);
        }
      }
      storeOutput<R>(work, 0, index, sum.result(reducer));
    }
    return true;
  }

  const Arguments& arguments_;
  DirectLane at_;
  int me_;
  int ranks_;
};

// A launch of one work. Where all streams fit into registers, positions advance while the lines are
// on their way.
template <typename Ranks, typename Combine, typename Stopped, typename SyncBlock>
UNISONO_DEVICE void directCall(const DirectCallArguments& arguments, const DirectLane& at,
                               Stopped stopped, SyncBlock syncBlock) {
  DirectLaunch<Ranks, DirectCallArguments> launch(arguments, at);
  const Streams<Ranks::kBatch> streams = launch.load(0);
  // The loads above are on their way while the flag is read.
  if (stopped()) return;
  const bool sent = launch.template send<Combine>(0, streams);
  launch.acknowledge();
  if (Ranks::kIsExact) launch.advance(syncBlock);
  if (sent) launch.template receive<Combine>(0, streams);
  if (!Ranks::kIsExact) launch.advance(syncBlock);
}

// The halves of a work in a launch of several. They are called through tables, so that the compiler
// does not inline all of them into one kernel.
using DirectGroupLaunch = DirectLaunch<DirectRanks<4, false>, DirectArguments>;
using DirectHalf = bool (*)(const DirectArguments&, const DirectLane&, int);

template <typename Combine>
UNISONO_DEVICE_CALL bool sendWork(const DirectArguments& arguments, const DirectLane& at, int w) {
  DirectGroupLaunch launch(arguments, at);
  return launch.send<Combine>(w, launch.loadFor(w, 0));
}
template <typename Combine>
UNISONO_DEVICE_CALL bool receiveWork(const DirectArguments& arguments, const DirectLane& at,
                                     int w) {
  DirectGroupLaunch launch(arguments, at);
  return launch.receive<Combine>(w, launch.loadFor(w, 0));
}

struct MakeSendWork {
  template <typename R>
  constexpr DirectHalf operator()() const {
    using Combine = std::conditional_t<R::kPrepares, R, DirectCopy>;
    return &sendWork<Combine>;
  }
};
struct MakeReceiveWork {
  template <typename R>
  constexpr DirectHalf operator()() const {
    return &receiveWork<R>;
  }
};
UNISONO_DEVICE_TABLE ReductionTable<DirectHalf> kSendWork =
    makeReductionTable<DirectHalf>(MakeSendWork{});
UNISONO_DEVICE_TABLE ReductionTable<DirectHalf> kReceiveWork =
    makeReductionTable<DirectHalf>(MakeReceiveWork{});

// A launch of several works, which finds their types and operators when it runs. All lines are sent
// before the first is awaited, so that no order of the works can deadlock.
template <typename Stopped, typename SyncBlock>
UNISONO_DEVICE void directGroup(const DirectArguments& arguments, const DirectLane& at,
                                Stopped stopped, SyncBlock syncBlock) {
  if (stopped()) return;
  DirectGroupLaunch launch(arguments, at);
  launch.acknowledge();
  bool going = true;
  for (int w = 0; going && w < arguments.works; w++) {
    const DirectWork& work = arguments.work[w];
    if (!launch.takesPart(work)) continue;
    const DirectHalf send = work.reduces ? kSendWork.of(work.reduction) : &sendWork<DirectCopy>;
    going = send(arguments, at, w);
  }
  for (int w = 0; going && w < arguments.works; w++) {
    const DirectWork& work = arguments.work[w];
    if (!launch.takesPart(work)) continue;
    const DirectHalf receive =
        work.reduces ? kReceiveWork.of(work.reduction) : &receiveWork<DirectCopy>;
    going = receive(arguments, at, w);
  }
  launch.advance(syncBlock);
}

}  // namespace unisono::device::UNISONO_TARGET
