// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/collective/direct_buffers.h"
#include "device/collective/wide_fifos.h"

// The direct algorithms over LL128 (device/direct_work.h): every operation in one hop, and
// all-reduce in two.
namespace unisono::device::UNISONO_TARGET {

// One launch on one rank, from the view of one lane.
template <WideReducers kReducers>
class WideExchange : WideFifos {
  static constexpr bool kReduces = kReducers != WideReducers::none;

 public:
  // Sums need registers for the accumulators of each word.
  using ReduceFormat = WideLinesFormat<kLinesPerReduction, VectorPlace>;

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
        passes_(((work_.inputBytes + 7) / 8 + passWords_ - 1) / passWords_),
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
    const PassRange range = passesOf(at_, passes_, arguments_.offers);
    if (range.first >= range.end) return;
    if (arguments_.offers && !useBuffers(range, syncBlock)) return;
    bool going = sendShares(range.first, 0);
    uint32_t done = 0;
    UNISONO_NO_UNROLL
    for (uint32_t pass = range.first; pass < range.end; pass += range.step) {
      if (range.end - pass > range.step) going = going && sendShares(pass + range.step, done + 1);
      going = going && receive(pass, done);
      done++;
      syncBlock();  // every lane has taken its lines
      if (going) acknowledge(done);
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
  UNISONO_DEVICE static TeamLane teamLaneOf(const WarpTeams& teams, const DirectLane& at) {
    const int warps = at.lanes / kWarpSize, warp = at.lane / kWarpSize;
    const int place = teams.divide(warp), team = warp - place * teams.count;
    return {team, teams.count < warps ? teams.count : warps,
            place * kWarpSize + at.lane % kWarpSize,
            teams.divide(warps - team + teams.count - 1) * kWarpSize};
  }

  // Returns whether anything is left for lines.
  template <typename SyncBlock>
  UNISONO_DEVICE bool useBuffers(const PassRange& range, SyncBlock syncBlock) {
    const uint64_t stride = kReduces ? work_.inputStride : work_.outputStride;
    const uint64_t share = shareOf(me_, stride);
    const auto place = [&](uint32_t pass) {
      const uint64_t offset = uint64_t{pass} * passWords_ * 8;
      return offset < share ? offset : share;
    };
    BufferExchange<kReducers> exchange(arguments_, at_, buffers_);
    const uint64_t begin = place(range.first);
    if (!exchange.run(begin, place(range.end) - begin, syncBlock)) {
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
  UNISONO_DEVICE static DirectPeers without(DirectPeers all, DirectPeers some) {
    return static_cast<DirectPeers>(all & ~some);
  }
  UNISONO_DEVICE DirectPeers linesTo() const {
    return static_cast<DirectPeers>(operandsTo_ | resultsTo_);
  }
  UNISONO_DEVICE DirectPeers linesFrom() const {
    return static_cast<DirectPeers>(operandsFrom_ | resultsFrom_);
  }

  // The part of a share that a pass moves.
  struct Part {
    uint64_t offset;  // in the share
    uint32_t bytes;
    UNISONO_DEVICE uint32_t words() const { return (bytes + 7) / 8; }
  };
  // The bytes of a rank's share. In two shots the last ones may be short.
  UNISONO_DEVICE uint64_t shareOf(int rank, uint64_t stride) const {
    const uint64_t begin = static_cast<uint64_t>(rank) * stride, end = arguments_.endBytes;
    if (begin + work_.inputBytes <= end) return work_.inputBytes;
    return begin < end ? end - begin : 0;
  }
  UNISONO_DEVICE Part partOf(int rank, uint64_t stride, uint32_t pass) const {
    const uint64_t offset = uint64_t{pass} * passWords_ * 8;
    const uint64_t share = shareOf(rank, stride);
    const uint64_t left = offset < share ? share - offset : 0;
    const uint64_t whole = uint64_t{passWords_} * 8;
    return {offset, static_cast<uint32_t>(left < whole ? left : whole)};
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
    const bool prepares = kReduces && work_.reduction.reduction == Reduction::preMulSum;
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
      for (uint32_t q = 0; q * CopyFormat::passWords(team_.lanes) < part.words(); q++) {
        const CopyFormat::Place place(q, team_.lane, team_.lanes);
        uint64_t word[CopyFormat::kWords] = {};
        from.load(place, word);
        if (!hasSlot && !awaitSlot(peer, step, taken)) return false;
        hasSlot = true;
        if (prepares) visit(PrepareWords{work_.reduction, word});
        CopyFormat::store(to, place, part.words(), CopyFormat::flagOf(step), word, false);
      }
    }
    return true;
  }

  struct PrepareWords {
    const ReductionSpec& spec;
    uint64_t (&word)[CopyFormat::kWords];
    template <typename R>
    UNISONO_DEVICE void run() const {
      const R reducer(spec);
      UNISONO_UNROLL
      for (uint64_t& one : word) one = preparePack(reducer, one);
    }
  };

  template <typename Visit>
  UNISONO_DEVICE void visit(const Visit& visitor) const {
    if constexpr (kReducers == WideReducers::own) {
      visitPair<PairsWithLoops>(reducedPairOf(work_.reduction), visitor);
    } else if constexpr (kReducers == WideReducers::shared) {
      visitor.template run<AnyReducer>();
    }
  }

  // False after an abort.
  UNISONO_DEVICE bool receive(uint32_t pass, uint32_t done) const {
    if constexpr (!kReduces) {
      if (copiesOwn_) copyOwn(pass);
      return receiveShares(operandsFrom_, pass, uint64_t{done});
    }
    bool going = true;
    if (operandsFrom_ != 0) {
      visit(ReduceShares{*this, pass, uint64_t{done} * stepsPerPass_, going});
    }
    if (!arguments_.twoShot) return going;
    return going && receiveShares(resultsFrom_, pass, uint64_t{done} * 2 + 1);
  }

  UNISONO_DEVICE void copyOwn(uint32_t pass) const {
    const Part part = partOf(me_, work_.outputStride, pass);
    const UserWords from = input(me_, part), to = output(me_, part);
    for (uint32_t q = 0; q * CopyFormat::passWords(at_.lanes) < part.words(); q++) {
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
      for (uint32_t q = 0; q * CopyFormat::passWords(team_.lanes) < part.words(); q++) {
        const CopyFormat::Place place(q, team_.lane, team_.lanes);
        uint64_t word[CopyFormat::kWords] = {};
        if (!awaitLines<CopyFormat>(rank, from, place, part, step, word)) return false;
        to.store(place, word);
      }
    }
    return true;
  }
  template <typename Format>
  UNISONO_DEVICE bool awaitLines(int rank, const std::byte* from, typename Format::Place place,
                                 const Part& part, uint64_t step,
                                 uint64_t (&word)[Format::kWords]) const {
    typename Format::Loaded lines{};
    return waitForLines<Format>(arguments_.abortFlag, {"lines of its peers", me_, rank, at_.block},
                                from, place, part.words(), Format::flagOf(step), word, false, lines,
                                false);
  }

  // Reduces a pass of the own share in the order of the ranks. In two shots it sends the result to
  // all peers, with the next step. There is room for it: each peer has sent its operand of this
  // pass, so that it has taken all steps of the pass before the last and of earlier launches.
  struct ReduceShares {
    const WideExchange& launch;
    uint32_t pass;
    uint64_t steps;
    bool& going;

    template <typename R>
    UNISONO_DEVICE void run() const {
      going = launch.reduceShares<R>(pass, steps);
    }
  };
  template <typename R>
  UNISONO_DEVICE bool reduceShares(uint32_t pass, uint64_t steps) const {
    using Format = ReduceFormat;
    const R reducer(work_.reduction);
    const Part part = partOf(me_, work_.inputStride, pass);
    const UserWords from = input(me_, part), to = output(me_, part);
    const uint32_t words = part.words();
    for (uint32_t q = 0; q * Format::passWords(at_.lanes) < words; q++) {
      const Format::Place place(q, at_.lane, at_.lanes);
      uint64_t own[Format::kWords] = {};
      from.load(place, own);
      UNISONO_UNROLL
      for (int k = 0; k < Format::kWords; k++) own[k] = preparePack(reducer, own[k]);
      PackReduction<R, kAnyOperands, Format::kWords> sum;
      UNISONO_NO_UNROLL
      for (int rank = 0; rank <= peers_; rank++) {
        uint64_t word[Format::kWords] = {};
        if (rank == me_) {
          UNISONO_UNROLL
          for (int k = 0; k < Format::kWords; k++) word[k] = own[k];
        } else {
          const int peer = peerOfRank(rank, me_);
          const uint64_t step = receivedFrom(peer) + steps;
          if (!awaitLines<Format>(rank, slotFrom(peer, step), place, part, step, word)) {
            return false;
          }
        }
        sum.add(reducer, word, rank == 0);
      }
      sum.result(reducer, true, own);
      to.store(place, own);
      if (!arguments_.twoShot) continue;
      UNISONO_NO_UNROLL
      for (int i = 0; i < peers_; i++) {
        const int peer = peerFrom(me_, i, peers_);
        const uint64_t step = sentTo(peer) + steps + 1;
        Format::store(slotTo(peer, step), place, words, Format::flagOf(step), own, false);
      }
    }
    return true;
  }

  // Tells the peers how many steps this block has taken. Relaxed: the lanes have used what they
  // loaded before the barrier.
  UNISONO_DEVICE void acknowledge(uint32_t done) const {
    for (int peer = at_.lane; peer < peers_; peer += at_.lanes) {
      if (!covers(linesFrom(), peer)) continue;
      storeRelaxed(takenFrom(peer), receivedFrom(peer) + uint64_t{done} * stepsPerPass_);
    }
  }
  // By the lanes that acknowledge; the others have read the steps before the last barrier.
  UNISONO_DEVICE void advance(uint32_t done) const {
    const uint64_t steps = uint64_t{done} * stepsPerPass_;
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
  uint32_t passWords_, passes_, stepsPerPass_;
  // With whom lines are exchanged. Results: in two shots, after operands.
  DirectPeers operandsTo_, operandsFrom_, resultsTo_, resultsFrom_;
  bool copiesOwn_;
};

template <WideReducers kReducers, typename Stopped, typename SyncBlock>
UNISONO_DEVICE void directWide(const WideArguments& arguments, const DirectLane& at,
                               PeerBuffers* buffers, Stopped stopped, SyncBlock syncBlock) {
  if (stopped()) return;
  if (at.lane == 0) markStart(arguments.mark, at.block, 0);
  WideExchange<kReducers>(arguments, at, buffers).run(syncBlock);
  if (at.lane == 0) markEnd(arguments.mark, at.block, 0);
}

}  // namespace unisono::device::UNISONO_TARGET
