// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/collective/direct.h"
#include "device/protocol/window.h"
#include "device/reduce/copy.h"

// Zero copy in the direct algorithms over LL128: a rank stores into the outputs of its peers, or
// loads from their inputs, where it can (docs/decisions/0013-direct-algorithms-in-place.md).
namespace unisono::device::UNISONO_TARGET {

// The passes of a block: `first`, then every `step` passes before `end`.
struct PassRange {
  uint32_t first, end, step;
};
// Buffers are used in one piece; lines are faster (5 %) where blocks take turns.
UNISONO_DEVICE PassRange passesOf(const DirectLane& at, uint32_t passes, bool consecutive) {
  const auto block = static_cast<uint32_t>(at.block), blocks = static_cast<uint32_t>(at.blocks);
  if (!consecutive) return {block, passes, blocks};
  return {static_cast<uint32_t>(uint64_t{passes} * block / blocks),
          static_cast<uint32_t>(uint64_t{passes} * (block + 1) / blocks), 1};
}

// The part of the own share of a reduction, or of what all peers get, that a block moves.
struct BufferRange {
  const std::byte* input;  // where it begins
  std::byte* output;       // null: it stays where it is
  uint64_t place;          // of the output, in the outputs of peers
  uint64_t bytes;
};

// Visits the places of a range in the outputs of the peers `to`, of the next rank first, so that no
// two ranks begin with the same one.
template <typename Visit>
UNISONO_DEVICE void forEachOutput(int me, int peers, const PeerBuffers* buffers, DirectPeers to,
                                  const BufferRange& range, Visit visit) {
  UNISONO_NO_UNROLL
  for (int i = 0; i < peers; i++) {
    const int peer = peerFrom(me, i, peers);
    if (covers(to, peer)) visit(buffers[peer].address[kOutputBuffer] + range.place);
  }
}

// Reads the vectors of all ranks in the order of the ranks, and stores the result in the own output
// and in those of the peers `to`.
template <typename R>
UNISONO_DEVICE_CALL void reduceBuffers(const DirectLane& at, int me, int peers,
                                       const PeerBuffers* buffers, uint64_t inputPlace,
                                       DirectPeers to, const ReductionSpec& spec,
                                       const BufferRange& range) {
  using Word = UnsignedOf<typename R::Element>;
  // Narrow types need more registers for their sums.
  constexpr int kVectors = sizeof(typename R::Element) >= 4 ? 8 : 2 * sizeof(typename R::Element);
  const R reducer(spec);
  const auto sourceOf = [&](int rank) -> const std::byte* {
    return rank == me ? range.input
                      : buffers[peerOfRank(rank, me)].address[kInputBuffer] + inputPlace;
  };
  const auto forEachDestination = [&](auto visit) {
    visit(range.output);
    forEachOutput(me, peers, buffers, to, range, visit);
  };
  const uint64_t whole = range.bytes / 16 * 16;
  for (Rounds<kVectors> rounds(at.lane, at.lanes, whole); rounds.more(); rounds.next()) {
    PackReduction<R, kAnyOperands, 2 * kVectors> sum;
    uint64_t pack[2 * kVectors];
    Vector16 next[kVectors];
    const auto load = [&](int rank) {
      const std::byte* from = sourceOf(rank) + rounds.offset();
      UNISONO_UNROLL
      for (int u = 0; u < kVectors; u++) {
        if (rounds.has(u)) noteRead(from + Rounds<kVectors>::distance(u), 16);
        next[u] = loadVector(from + Rounds<kVectors>::distance(u), rounds.has(u));
      }
    };
    load(0);
    UNISONO_NO_UNROLL
    for (int rank = 0; rank <= peers; rank++) {
      packsOf(next, pack);
      if (rank < peers) load(rank + 1);
      sum.add(reducer, pack, rank == 0);
    }
    sum.result(reducer, true, pack);
    Vector16 result[kVectors];
    vectorsOf(pack, result);
    forEachDestination([&](std::byte* output) {
      UNISONO_UNROLL
      for (int u = 0; u < kVectors; u++) {
        std::byte* place = output + rounds.offset() + Rounds<kVectors>::distance(u);
        if (rounds.has(u)) noteWrite(place, 16);
        storeVector(place, result[u], rounds.has(u));
      }
    });
  }
  for (uint64_t index = whole / 8 + static_cast<uint64_t>(at.lane); index * 8 < range.bytes;
       index += static_cast<uint64_t>(at.lanes)) {
    PackReduction<R, kAnyOperands, 1> sum;
    for (int rank = 0; rank <= peers; rank++) {
      sum.add(reducer, {loadPack<Word>(sourceOf(rank), index, range.bytes)}, rank == 0);
    }
    uint64_t result[1];
    sum.result(reducer, true, result);
    forEachDestination(
        [&](std::byte* output) { storePack<Word>(output, index, range.bytes, result[0]); });
  }
}

// Stores the range in the own output, if there is one, and in those of the peers `to`.
UNISONO_DEVICE_CALL void copyBuffers(const DirectLane& at, int me, int peers,
                                     const PeerBuffers* buffers, DirectPeers to,
                                     const BufferRange& range) {
  const auto forEachDestination = [&](auto visit) {
    if (range.output != nullptr) visit(range.output);
    forEachOutput(me, peers, buffers, to, range, visit);
  };
  const uint64_t whole = range.bytes / 16 * 16;
  for (Rounds<kUnroll> rounds(at.lane, at.lanes, whole); rounds.more(); rounds.next()) {
    Vector16 value[kUnroll];
    UNISONO_UNROLL
    for (int u = 0; u < kUnroll; u++) {
      const std::byte* from = range.input + rounds.offset() + Rounds<kUnroll>::distance(u);
      if (rounds.has(u)) noteRead(from, 16);
      value[u] = loadVector(from, rounds.has(u));
    }
    forEachDestination([&](std::byte* output) {
      UNISONO_UNROLL
      for (int u = 0; u < kUnroll; u++) {
        std::byte* place = output + rounds.offset() + Rounds<kUnroll>::distance(u);
        if (rounds.has(u)) noteWrite(place, 16);
        storeVector(place, value[u], rounds.has(u));
      }
    });
  }
  for (uint64_t index = whole / 8 + static_cast<uint64_t>(at.lane); index * 8 < range.bytes;
       index += static_cast<uint64_t>(at.lanes)) {
    const uint64_t pack = loadPack<uint8_t>(range.input, index, range.bytes);
    forEachDestination(
        [&](std::byte* output) { storePack<uint8_t>(output, index, range.bytes, pack); });
  }
}

// The exchange of buffers in one launch, from the view of one lane. A rank offers its input to the
// ranks that reduce it and its output to those that store in it. A rank that has the offers of its
// peers uses their buffers at once, without waiting for anyone, and answers. If it is not offered
// what it needs, or cannot use it, it answers that it uses lines. So the words of one launch are
// free before the next one. Each lane takes care of some of the buffers.
template <bool kReduces>
class BufferExchange {
 public:
  // `buffers`: of the block, by peer.
  UNISONO_DEVICE BufferExchange(const WideArguments& arguments, const DirectLane& at,
                                PeerBuffers* buffers)
      : arguments_(arguments),
        work_(arguments.work),
        at_(at),
        buffers_(buffers),
        me_(arguments.rank),
        peers_(arguments.ranks - 1),
        offersTo_(kReduces ? work_.to : work_.from),
        takesFrom_(kReduces ? work_.from : work_.to),
        usesInput_(kReduces),
        usesOutput_(!kReduces || arguments.twoShot) {}

  // Calls move(peers) if this rank can use the buffers of some peers. False after an abort.
  template <typename Move, typename SyncBlock>
  UNISONO_DEVICE bool run(Move move, SyncBlock syncBlock) {
    forEachBuffer([&](int peer, int buffer) { offer(peer, buffer); });
    // Who has taken an offer must not wait for another one.
    if (peers_ > 1) {
      forEachBuffer([&](int peer, int buffer) { awaitOffer(peer, buffer); });
      syncBlock();
    }
    forEachBuffer([&](int peer, int buffer) { takeOffer(peer, buffer); });
    syncBlock();
    used_ = usablePeers();
    if (used_ != 0) {
      move(used_);
      syncBlock();  // every lane has moved its part
    }
    if (usesOutput_ && used_ != 0) releaseStores();
    forEachBuffer([&](int peer, int buffer) { finish(peer, buffer); });
    forEachBuffer([&](int peer, int buffer) { awaitAnswer(peer, buffer); });
    syncBlock();
    return readAnswers();
  }

  // The peers whose buffers this rank has used, and those that have used the buffers of this rank.
  UNISONO_DEVICE DirectPeers used() const { return used_; }
  UNISONO_DEVICE DirectPeers usedBy() const { return usedBy_; }

 private:
  // Those of the lane.
  template <typename Visit>
  UNISONO_DEVICE void forEachBuffer(Visit visit) const {
    UNISONO_NO_UNROLL
    for (int i = at_.lane; i < 2 * peers_; i += at_.lanes) {
      const int peer = i / 2, buffer = i % 2;
      if (uses(buffer)) visit(peer, buffer);
    }
  }
  UNISONO_DEVICE bool uses(int buffer) const {
    return buffer == kInputBuffer ? usesInput_ : usesOutput_;
  }
  // The one of a peer's buffers whose lane answers, and waits for answers.
  UNISONO_DEVICE bool isFirst(int buffer) const {
    return buffer == (usesInput_ ? kInputBuffer : kOutputBuffer);
  }
  UNISONO_DEVICE int rankOf(int peer) const { return rankOfPeer(peer, me_); }
  UNISONO_DEVICE BufferOffer* offerIn(std::byte* window, int rank) const {
    return reinterpret_cast<BufferOffer*>(window + wideOffersAt()) + at_.block * kDirectMaxRanks +
           rank;
  }
  // The offer of a peer to this rank, and the reverse.
  UNISONO_DEVICE BufferOffer* offerFrom(int peer) const {
    return offerIn(arguments_.memory.window, rankOf(peer));
  }
  UNISONO_DEVICE BufferOffer* offerTo(int peer) const {
    return offerIn(arguments_.memory.theirs[peer], me_);
  }

  UNISONO_DEVICE uint64_t offerFor(int peer, int buffer) const {
    const bool isInput = buffer == kInputBuffer;
    if (covers(arguments_.memory.byAddress, peer)) {
      const auto address = reinterpret_cast<uint64_t>(isInput ? work_.input : work_.output);
      const bool isOpen = isInput ? arguments_.inputIsOpen : arguments_.outputIsOpen;
      if (isOpen && address % 16 == 0) return makeOffer(OfferKind::address, address);
    } else if (covers(arguments_.memory.byWindow, peer)) {
      const WindowReference& place = isInput ? arguments_.ownInput : arguments_.ownOutput;
      if (canOffer(place)) return offerOf(place);
    }
    return makeOffer(OfferKind::nothing);
  }

  UNISONO_DEVICE void offer(int peer, int buffer) const {
    PeerBuffers& known = buffers_[peer];
    noteWrite(&known.address[buffer], sizeof(void*));
    noteWrite(&known.pinned[buffer], sizeof(void*));
    noteWrite(&known.taken[buffer], sizeof(uint64_t));
    noteWrite(&known.failed[buffer], sizeof(uint64_t));
    known.address[buffer] = nullptr;
    known.pinned[buffer] = nullptr;
    known.taken[buffer] = known.failed[buffer] = 0;
    if (isFirst(buffer)) {
      noteWrite(&known.answer, sizeof(uint64_t));
      known.answer = 0;
    }
    if (!covers(offersTo_, peer)) return;
    storeOrdered(&offerTo(peer)->buffer[buffer], offerFor(peer, buffer));
  }

  UNISONO_DEVICE WaitSubject subjectOf(int peer) const {
    return {"the buffers of a peer", me_, rankOf(peer), at_.block};
  }
  UNISONO_DEVICE void awaitOffer(int peer, int buffer) const {
    if (!covers(takesFrom_, peer)) return;
    const uint64_t* word = &offerFrom(peer)->buffer[buffer];
    if (!waitUntil(arguments_.abortFlag, subjectOf(peer),
                   [word] { return loadRelaxed(word) != 0; })) {
      fail(peer, buffer);
    }
  }
  UNISONO_DEVICE void fail(int peer, int buffer) const {
    noteWrite(&buffers_[peer].failed[buffer], sizeof(uint64_t));
    buffers_[peer].failed[buffer] = 1;
  }

  UNISONO_DEVICE void takeOffer(int peer, int buffer) const {
    PeerBuffers& known = buffers_[peer];
    noteRead(&known.failed[buffer], sizeof(uint64_t));
    if (!covers(takesFrom_, peer) || known.failed[buffer] != 0) return;
    uint64_t* word = &offerFrom(peer)->buffer[buffer];
    uint64_t taken = 0;  // stays so if the peer has withdrawn it
    if (!waitUntil(arguments_.abortFlag, subjectOf(peer), [&] {
          taken = exchange(word, uint64_t{0});
          return taken != 0;
        })) {
      fail(peer, buffer);
      return;
    }
    std::byte* address = nullptr;
    if (kindOf(taken) == OfferKind::address) {
      address = reinterpret_cast<std::byte*>(taken & ~kOfferKinds);
    } else if (kindOf(taken) == OfferKind::window && arguments_.windows != nullptr) {
      address = pin(peer, buffer, taken);
    }
    noteWrite(&known.taken[buffer], sizeof(uint64_t));
    noteWrite(&known.address[buffer], sizeof(void*));
    known.taken[buffer] = 1;
    known.address[buffer] = address;
  }
  // Returns null if this rank has not mapped the window.
  UNISONO_DEVICE std::byte* pin(int peer, int buffer, uint64_t taken) const {
    constexpr uint64_t kOffset = (uint64_t{1} << kOfferOffsetBits) - 1;
    const uint64_t window = taken >> kOfferOffsetBits;
    MappedWindow& entry = arguments_.windows[windowIndex(rankOf(peer), window)];
    constexpr uint64_t kBits = (uint64_t{1} << (64 - kOfferOffsetBits)) - 1;
    std::byte* address = pinWindow(entry, {window, taken & kOffset & ~kOfferKinds}, kBits);
    if (address == nullptr) return nullptr;
    noteWrite(&buffers_[peer].pinned[buffer], sizeof(void*));
    buffers_[peer].pinned[buffer] = &entry;
    return address;
  }

  // Only vectors are moved, and a sum takes the operands of all ranks.
  UNISONO_DEVICE DirectPeers usablePeers() const {
    uint64_t bits = work_.inputStride | work_.outputStride |
                    uint64_t{arguments_.passLines} * kWideLineData |
                    reinterpret_cast<uint64_t>(work_.input);
    if (kReduces || work_.own) bits |= reinterpret_cast<uint64_t>(work_.output);
    if (takesFrom_ == 0 || bits % 16 != 0) return 0;
    DirectPeers usable = 0;
    for (int peer = 0; peer < peers_; peer++) {
      if (!covers(takesFrom_, peer)) continue;
      if (has(peer, kInputBuffer) && has(peer, kOutputBuffer)) {
        usable = static_cast<DirectPeers>(usable | 1u << peer);
      }
    }
    return kReduces && usable != takesFrom_ ? DirectPeers{0} : usable;
  }
  UNISONO_DEVICE bool has(int peer, int buffer) const {
    if (!uses(buffer)) return true;
    noteRead(&buffers_[peer].address[buffer], sizeof(void*));
    return buffers_[peer].address[buffer] != nullptr;
  }

  UNISONO_DEVICE void finish(int peer, int buffer) const {
    if (!covers(takesFrom_, peer)) return;
    const bool used = covers(used_, peer);
    if (isFirst(buffer) && (used || wasTaken(peer))) {
      storeOrdered(&offerTo(peer)->answer, used ? kBuffersUsed : kBuffersLeft);
    }
    noteRead(&buffers_[peer].pinned[buffer], sizeof(void*));
    MappedWindow* pinned = buffers_[peer].pinned[buffer];
    if (pinned != nullptr) unpinOrdered(*pinned);
  }
  UNISONO_DEVICE bool wasTaken(int peer) const {
    bool any = false;
    for (int buffer = 0; buffer < 2; buffer++) {
      if (!uses(buffer)) continue;
      noteRead(&buffers_[peer].taken[buffer], sizeof(uint64_t));
      any = any || buffers_[peer].taken[buffer] != 0;
    }
    return any;
  }

  // After an abort no peer uses the buffers any more.
  UNISONO_DEVICE void awaitAnswer(int peer, int buffer) const {
    if (!covers(offersTo_, peer) || !isFirst(buffer)) return;
    uint64_t* answer = &offerFrom(peer)->answer;
    const WaitSubject subject{"the end of the use of its buffers", me_, rankOf(peer), at_.block};
    uint64_t seen = 0;
    const auto isThere = [&] {
      seen = loadAcquire(answer);
      return seen != 0;
    };
    if (!waitUntil(arguments_.abortFlag, subject, isThere)) {
      fail(peer, buffer);
      if (!canUseBuffers(peer) || withdraw(peer)) return;
      waitWhileAlive(arguments_.abortFlag, subject, isThere);
    }
    noteWrite(&buffers_[peer].answer, sizeof(uint64_t));
    buffers_[peer].answer = seen;
    storeRelaxed(answer, uint64_t{0});
  }
  // Links to other peers may lack the atomic operations that withdraw() needs.
  UNISONO_DEVICE bool canUseBuffers(int peer) const {
    return covers(arguments_.memory.byAddress, peer) || covers(arguments_.memory.byWindow, peer);
  }
  // Says whether the peer had taken nothing.
  UNISONO_DEVICE bool withdraw(int peer) const {
    bool all = true;
    for (int buffer = 0; buffer < 2; buffer++) {
      if (!uses(buffer)) continue;
      const bool wasLeft = exchange(&offerTo(peer)->buffer[buffer], uint64_t{0}) != 0;
      all = all && wasLeft;
    }
    return all;
  }
  // False after an abort.
  UNISONO_DEVICE bool readAnswers() {
    bool going = true;
    for (int peer = 0; peer < peers_; peer++) {
      const PeerBuffers& known = buffers_[peer];
      for (int buffer = 0; buffer < 2; buffer++) {
        if (!uses(buffer)) continue;
        noteRead(&known.failed[buffer], sizeof(uint64_t));
        going = going && known.failed[buffer] == 0;
      }
      noteRead(&known.answer, sizeof(uint64_t));
      if (covers(offersTo_, peer) && known.answer == kBuffersUsed) {
        usedBy_ = static_cast<DirectPeers>(usedBy_ | 1u << peer);
      }
    }
    return going;
  }

  const WideArguments& arguments_;
  const DirectWork& work_;
  DirectLane at_;
  PeerBuffers* buffers_;
  int me_, peers_;
  DirectPeers offersTo_, takesFrom_;
  bool usesInput_, usesOutput_;
  DirectPeers used_ = 0, usedBy_ = 0;
};

}  // namespace unisono::device::UNISONO_TARGET
