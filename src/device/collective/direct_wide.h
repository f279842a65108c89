// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/collective/direct_buffers.h"
#include "device/collective/wide_fifos.h"

// The direct algorithms over LL128 (device/direct_work.h): every operation in one hop, and
// all-reduce in two.
namespace unisono::device::UNISONO_TARGET {

// One launch on one rank, from the view of one lane. `R`: the reducer, or DirectCopy.
template <typename R>
class WideExchange : WideFifos {
  static constexpr bool kReduces = !std::is_same_v<R, DirectCopy>;

 public:
  // Sums need registers for the accumulators of each word.
  using ReduceFormat = WideLinesFormat<kLinesPerReduction, VectorPlace>;
  // The accumulators of narrow elements leave registers for few operands.
  static constexpr bool kIsNarrow = sizeof(typename R::Element) == 1;
  using AnyRanks = DirectRanks<kIsNarrow ? 3 : 5, false>;

  // `buffers`: of the block, by peer.
  UNISONO_DEVICE WideExchange(const WideArguments& arguments, const DirectLane& at,
                              PeerBuffers* buffers)
      : WideFifos(arguments.memory, arguments.abortFlag, arguments.rank, arguments.ranks,
                  arguments.blocks, arguments.slotLines, at.block),
        arguments_(arguments),
        work_(arguments.work),
        at_(at),
        team_(teamLaneOf(arguments.teams, at)),
        buffers_(buffers),
        passWords_(arguments.passLines * (kLineWords - 1)),
        stepsPerPass_(arguments.twoShot ? 2 : 1),
        operandsTo_(work_.to),
        operandsFrom_(work_.from),
        resultsTo_(arguments.twoShot ? work_.to : DirectPeers{0}),
        resultsFrom_(arguments.twoShot ? work_.from : DirectPeers{0}),
        copiesOwn_(work_.own) {}

  // Sends each pass before the one before it is received, so that lines are on their way while this
  // rank waits for others. Two passes of two steps each fill the slots.
  template <typename SyncBlock>
  UNISONO_DEVICE void run(SyncBlock syncBlock) {
    const PassRange range = passesOf(at_, arguments_.passes, arguments_.offers);
    if (range.first >= range.end) return;
    if (arguments_.offers && !useBuffers(range, syncBlock)) return;
    bool going = sendShares(range.first, 0);
    uint32_t done = 0;
    UNISONO_NO_UNROLL
    for (uint32_t pass = range.first; pass < range.end; pass += range.step) {
      if (going) acknowledge(done);
      if (range.end - pass > range.step) going = going && sendShares(pass + range.step, done + 1);
      going = going && receive(pass, done);
      done++;
      syncBlock();  // every lane has taken its lines
    }
    advance(done);
  }

 private:
  // The part of a lane in the copies to and from peers. With 4 ranks small calls take a quarter
  // less time by teams (docs/results/2026-11-27-h100x4.md).
  struct TeamLane {
    int first, step;  // of the peers
    int lane, lanes;  // of the team
  };
  UNISONO_DEVICE static TeamLane teamLaneOf(const WarpDivisor& teams, const DirectLane& at) {
    const int warps = at.lanes / kWarpSize, warp = at.lane / kWarpSize;
    const int place = teams.divide(warp), team = warp - place * teams.count;
    return {team, teams.count < warps ? teams.count : warps,
            place * kWarpSize + at.lane % kWarpSize,
            teams.divide(warps - team + teams.count - 1) * kWarpSize};
  }

  // Returns whether anything is left for lines.
  template <typename SyncBlock>
  UNISONO_DEVICE bool useBuffers(const PassRange& range, SyncBlock syncBlock) {
    const uint32_t share = shareOf(me_, kReduces ? work_.inputStride : work_.outputStride);
    const auto place = [&](uint32_t pass) -> uint64_t {
      const uint32_t offset = pass * passWords_ * 8;
      return offset < share ? offset : share;
    };
    BufferExchange<kReduces> exchange(arguments_, at_, buffers_);
    const uint64_t begin = place(range.first), bytes = place(range.end) - begin;
    if (!exchange.run([&](DirectPeers peers) { moveShare(peers, begin, bytes); }, syncBlock)) {
      return false;
    }
    const DirectPeers used = exchange.used(), usedBy = exchange.usedBy();
    const DirectPeers inputs = kReduces ? usedBy : used;
    const DirectPeers outputs = kReduces ? used : usedBy;
    operandsTo_ = without(operandsTo_, inputs);
    operandsFrom_ = without(operandsFrom_, outputs);
    resultsTo_ = without(resultsTo_, used);
    resultsFrom_ = without(resultsFrom_, usedBy);
    if (!kReduces && used != 0) copiesOwn_ = false;
    return (operandsTo_ | operandsFrom_ | resultsTo_ | resultsFrom_) != 0 || copiesOwn_;
  }
  // Moves `bytes` bytes of the own share from `begin` on by the buffers of the peers `used`.
  UNISONO_DEVICE void moveShare(DirectPeers used, uint64_t begin, uint64_t bytes) const {
    // A copy, because the calls below take its address: this object stays in registers.
    const DirectLane at = at_;
    const auto me = static_cast<uint64_t>(me_);
    const uint64_t inputPlace = me * work_.inputStride + begin;
    const uint64_t outputPlace = me * work_.outputStride + begin;
    // A copy's input is the same for all peers.
    BufferRange range{work_.input + (kReduces ? inputPlace : begin), work_.output + outputPlace,
                      outputPlace, bytes};
    if constexpr (kReduces) {
      reduceBuffers<R>(at, me_, peers_, buffers_, inputPlace,
                       arguments_.twoShot ? used : DirectPeers{0}, work_.reduction, range);
    } else {
      if (!work_.own) range.output = nullptr;
      copyBuffers(at, me_, peers_, buffers_, used, range);
    }
  }
  UNISONO_DEVICE static DirectPeers without(DirectPeers all, DirectPeers some) {
    return static_cast<DirectPeers>(all & ~some);
  }
  UNISONO_DEVICE DirectPeers linesTo() const {
    return static_cast<DirectPeers>(operandsTo_ | resultsTo_);
  }
  UNISONO_DEVICE DirectPeers linesFrom() const {
    return static_cast<DirectPeers>(operandsFrom_ | resultsFrom_);
  }

  // The part of a rank's share that a pass moves.
  struct Part {
    uint32_t offset;  // in the share
    uint32_t bytes;
    UNISONO_DEVICE uint32_t words() const { return (bytes + 7) / 8; }
  };
  // The bytes of a rank's share. In two shots the last ones may be short.
  UNISONO_DEVICE uint32_t shareOf(int rank, uint64_t stride) const {
    const uint64_t begin = static_cast<uint64_t>(rank) * stride;
    const uint64_t left = begin < arguments_.endBytes ? arguments_.endBytes - begin : 0;
    return left < work_.inputBytes ? static_cast<uint32_t>(left) : work_.inputBytes;
  }
  UNISONO_DEVICE Part partOf(int rank, uint64_t stride, uint32_t pass) const {
    const uint32_t share = shareOf(rank, stride);
    const uint32_t whole = passWords_ * 8, offset = pass * whole;
    const uint32_t left = offset < share ? share - offset : 0;
    return {offset, left < whole ? left : whole};
  }
  UNISONO_DEVICE UserWords input(int rank, const Part& part) const {
    return {work_.input + static_cast<uint64_t>(rank) * work_.inputStride + part.offset, part.bytes,
            elementBytes(work_.reduction.type)};
  }
  UNISONO_DEVICE UserWords output(int rank, const Part& part) const {
    return {work_.output + static_cast<uint64_t>(rank) * work_.outputStride + part.offset,
            part.bytes, elementBytes(work_.reduction.type)};
  }

  // Sends a pass of the share of each peer; it is number `done` of this block. False after an
  // abort.
  UNISONO_DEVICE bool sendShares(uint32_t pass, uint32_t done) const {
    const R reducer(work_.reduction);
    UNISONO_NO_UNROLL
    for (int i = team_.first; i < peers_; i += team_.step) {
      const int peer = peerFrom(me_, i, peers_), rank = rankOf(peer);
      if (!covers(operandsTo_, peer)) continue;
      // On its way together with the data.
      uint64_t taken = loadRelaxed(takenBy(peer));
      const uint64_t step = sentTo(peer) + uint64_t{done} * stepsPerPass_;
      const Part part = partOf(rank, work_.inputStride, pass);
      const UserWords from = input(rank, part);
      std::byte* to = slotTo(peer, step);
      bool hasSlot = false;
      for (uint32_t q = 0; CopyFormat::hasPart(q, team_.lane, team_.lanes, part.words()); q++) {
        const CopyFormat::Place place(q, team_.lane, team_.lanes);
        uint64_t word[CopyFormat::kWords] = {};
        from.load(place, word);
        if (!hasSlot && !awaitSlot(peer, step, taken)) return false;
        hasSlot = true;
        if constexpr (R::kPrepares) {
          UNISONO_UNROLL
          for (uint64_t& one : word) one = preparePack(reducer, one);
        }
        CopyFormat::store(to, place, part.words(), CopyFormat::flagOf(step), word, false);
      }
    }
    return true;
  }

  // False after an abort.
  UNISONO_DEVICE bool receive(uint32_t pass, uint32_t done) const {
    if constexpr (kReduces) {
      const uint64_t steps = uint64_t{done} * stepsPerPass_;
      if (operandsFrom_ != 0 && !reduceShares(pass, steps)) return false;
      return !arguments_.twoShot || receiveShares(resultsFrom_, pass, steps + 1);
    } else {
      if (copiesOwn_) copyOwn(pass);
      return receiveShares(operandsFrom_, pass, uint64_t{done});
    }
  }
  UNISONO_DEVICE bool reduceShares(uint32_t pass, uint64_t steps) const {
    if (peers_ == 1) return reduceSharesOf<DirectRanks<2, true>>(pass, steps);
    if (!kIsNarrow && peers_ == 3) return reduceSharesOf<DirectRanks<4, true>>(pass, steps);
    return reduceSharesOf<AnyRanks>(pass, steps);
  }

  UNISONO_DEVICE void copyOwn(uint32_t pass) const {
    const Part part = partOf(me_, work_.outputStride, pass);
    const UserWords from = input(me_, part), to = output(me_, part);
    for (uint32_t q = 0; CopyFormat::hasPart(q, at_.lane, at_.lanes, part.words()); q++) {
      const CopyFormat::Place place(q, at_.lane, at_.lanes);
      uint64_t word[CopyFormat::kWords] = {};
      from.load(place, word);
      to.store(place, word);
    }
  }

  UNISONO_DEVICE bool receiveShares(DirectPeers peers, uint32_t pass, uint64_t steps) const {
    UNISONO_NO_UNROLL
    for (int i = team_.first; i < peers_; i += team_.step) {
      const int peer = peerFrom(me_, i, peers_), rank = rankOf(peer);
      if (!covers(peers, peer)) continue;
      const uint64_t step = receivedFrom(peer) + steps;
      const Part part = partOf(rank, work_.outputStride, pass);
      const UserWords to = output(rank, part);
      const std::byte* from = slotFrom(peer, step);
      for (uint32_t q = 0; CopyFormat::hasPart(q, team_.lane, team_.lanes, part.words()); q++) {
        const CopyFormat::Place place(q, team_.lane, team_.lanes);
        uint64_t word[CopyFormat::kWords] = {};
        if (!awaitLines(rank, from, place, part, step, word)) return false;
        to.store(place, word);
      }
    }
    return true;
  }
  UNISONO_DEVICE bool awaitLines(int rank, const std::byte* from, CopyFormat::Place place,
                                 const Part& part, uint64_t step,
                                 uint64_t (&word)[CopyFormat::kWords]) const {
    CopyFormat::Loaded lines{};
    return waitForLines<CopyFormat>(
        arguments_.abortFlag, {"lines of its peers", me_, rank, at_.block}, from, place,
        part.words(), CopyFormat::flagOf(step), word, false, lines, false);
  }

  // The lines of some peers that a lane waits for together, so that their loads overlap.
  template <int kBatch>
  struct Operands {
    const std::byte* from[kBatch];
    uint64_t flag[kBatch];
    ReduceFormat::Loaded lines[kBatch];
  };
  // Waits for those of `count` peers from `first` on. False after an abort.
  template <int kBatch>
  UNISONO_DEVICE bool awaitOperands(int first, int count, ReduceFormat::Place place, uint32_t words,
                                    uint64_t steps, Operands<kBatch>& operands) const {
    UNISONO_UNROLL
    for (int i = 0; i < kBatch; i++) {
      if (i >= count) break;
      const uint64_t step = receivedFrom(first + i) + steps;
      operands.from[i] = slotFrom(first + i, step);
      operands.flag[i] = ReduceFormat::flagOf(step);
    }
    const int rank = count == 1 ? rankOf(first) : -1;
    return ReduceFormat::wait(
        arguments_.abortFlag, {"lines of its peers", me_, rank, at_.block}, [&] {
          UNISONO_UNROLL
          for (int i = 0; i < kBatch; i++) {
            if (i >= count) break;
            ReduceFormat::load(operands.from[i], place, words, false, operands.lines[i]);
          }
          bool here = true;
          UNISONO_UNROLL
          for (int i = 0; i < kBatch; i++) {
            if (i >= count) break;
            uint64_t word[ReduceFormat::kWords];
            const bool isHere =
                ReduceFormat::take(operands.lines[i], place, words, operands.flag[i], word);
            here = here && isHere;
          }
          return here;
        });
  }

  // Reduces a pass of the own share in the order of the ranks. In two shots it sends the result to
  // all peers, with the next step. There is room for it: each peer has sent its operand of this
  // pass, so that it has taken all steps of the pass before the last and of earlier launches.
  template <typename Ranks>
  UNISONO_DEVICE bool reduceSharesOf(uint32_t pass, uint64_t steps) const {
    using Format = ReduceFormat;
    constexpr int kBatch = Ranks::kBatch;
    const int peers = Ranks::of(peers_ + 1) - 1;
    const R reducer(work_.reduction);
    const Part part = partOf(me_, work_.inputStride, pass);
    const UserWords from = input(me_, part), to = output(me_, part);
    const uint32_t words = part.words();
    for (uint32_t q = 0; Format::hasPart(q, at_.lane, at_.lanes, words); q++) {
      const Format::Place place(q, at_.lane, at_.lanes);
      uint64_t own[Format::kWords] = {};
      from.load(place, own);
      UNISONO_UNROLL
      for (int k = 0; k < Format::kWords; k++) own[k] = preparePack(reducer, own[k]);
      PackReduction<R, kAnyOperands, Format::kWords> sum;
      UNISONO_NO_UNROLL
      for (int first = 0; first < peers; first += kBatch) {
        const int count = Ranks::kIsExact || peers - first > kBatch ? kBatch : peers - first;
        Operands<kBatch> operands{};
        if (!awaitOperands(first, count, place, words, steps, operands)) return false;
        const int ownPlace = ownPlaceIn(first, count, me_, peers);
        const int end = count + (ownPlace <= count ? 1 : 0);
        UNISONO_UNROLL
        for (int i = 0; i <= kBatch; i++) {
          if (i >= end) break;
          // The lines of the peer before, if the own operand was among the ones before.
          uint64_t word[Format::kWords] = {};
          const int last = i < kBatch ? i : kBatch - 1;
          Format::take(operands.lines[last], place, words, operands.flag[last], word);
          if (i > 0) {
            uint64_t before[Format::kWords] = {};
            Format::take(operands.lines[i - 1], place, words, operands.flag[i - 1], before);
            UNISONO_UNROLL
            for (int k = 0; k < Format::kWords; k++) word[k] = i > ownPlace ? before[k] : word[k];
          }
          UNISONO_UNROLL
          for (int k = 0; k < Format::kWords; k++) word[k] = i == ownPlace ? own[k] : word[k];
          sum.add(reducer, word, first + i == 0);
        }
      }
      sum.result(reducer, true, own);
      to.store(place, own);
      if (!arguments_.twoShot) continue;
      UNISONO_NO_UNROLL
      for (int i = 0; i < peers; i++) {
        const int peer = peerFrom(me_, i, peers);
        const uint64_t step = sentTo(peer) + steps + 1;
        Format::store(slotTo(peer, step), place, words, Format::flagOf(step), own, false);
      }
    }
    return true;
  }

  // Tells the peers how many steps this block has taken before the pass number `done`. The steps of
  // the last pass are returned by the next launch, because a kernel ends only when its stores have
  // arrived. Relaxed: the lanes have used what they loaded before the barrier.
  UNISONO_DEVICE void acknowledge(uint32_t done) const {
    UNISONO_NO_UNROLL
    for (int peer = at_.lane; peer < peers_; peer += at_.lanes) {
      if (!covers(linesFrom(), peer)) continue;
      storeRelaxed(takenFrom(peer), receivedFrom(peer) + uint64_t{done} * stepsPerPass_);
    }
  }
  // By the lanes that acknowledge; the others have read the steps before the last barrier.
  UNISONO_DEVICE void advance(uint32_t done) const {
    const uint64_t steps = uint64_t{done} * stepsPerPass_;
    UNISONO_NO_UNROLL
    for (int peer = at_.lane; peer < peers_; peer += at_.lanes) {
      noteRead(stepsOf(peer), sizeof(WideSteps));
      WideSteps after = *stepsOf(peer);
      if (covers(linesTo(), peer)) after.sent += steps;
      if (covers(linesFrom(), peer)) after.received += steps;
      noteWrite(stepsOf(peer), sizeof(WideSteps));
      *stepsOf(peer) = after;
    }
  }

  const WideArguments& arguments_;
  const DirectWork& work_;
  DirectLane at_;
  TeamLane team_;
  PeerBuffers* buffers_;
  uint32_t passWords_, stepsPerPass_;
  // With whom lines are exchanged. Results: in two shots, after operands.
  DirectPeers operandsTo_, operandsFrom_, resultsTo_, resultsFrom_;
  bool copiesOwn_;
};

template <typename R, typename Stopped, typename SyncBlock>
UNISONO_DEVICE void directWide(const WideArguments& arguments, const DirectLane& at,
                               PeerBuffers* buffers, Stopped stopped, SyncBlock syncBlock) {
  if (stopped()) return;
  if (at.lane == 0) markStart(arguments.mark, at.block, 0);
  WideExchange<R>(arguments, at, buffers).run(syncBlock);
  if (at.lane == 0) markEnd(arguments.mark, at.block, 0);
}

}  // namespace unisono::device::UNISONO_TARGET
