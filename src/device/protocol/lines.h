// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/protocol/line_formats.h"
#include "device/protocol/protocol.h"
#include "device/protocol/user_words.h"
#include "device/reduce/reduce_copy.h"

// Protocols LL and LL128: a slot is filled with lines of data and flag, so that readiness arrives
// with the data and there is neither a tail nor a fence. The flag follows from the step, and every
// worker waits for its own lines. The head is posted as in protocol Simple, but relaxed: a worker
// has used what it loaded before the barrier that the poster waits for.
namespace unisono::device::UNISONO_TARGET {

// Combines a sum with the words of one more operand, by the reducer that is visited. `prepare`: the
// sum is the rank's own contribution; `combine`: there is such an operand; `finish`: the result is
// the complete reduction.
template <int kWords>
struct CombineWords {
  const ReductionSpec& spec;
  uint64_t (&sum)[kWords];
  const uint64_t (&word)[kWords];
  bool prepare, combine, finish;

  template <typename R>
  UNISONO_DEVICE void run() const {
    const R reducer(spec);
    const typename R::Factor factor = reducer.factorIf(prepare);
    UNISONO_UNROLL
    for (int k = 0; k < kWords; k++) {
      uint64_t one[1] = {sum[k]};
      PackReduction<R, 2, 1> partial;
      partial.add(reducer, one, true, factor);
      if (combine) partial.add(reducer, {word[k]}, false);
      partial.result(reducer, finish, one);
      sum[k] = one[0];
    }
  }
};
// All pairs have loops of their own, because a call or a switch per pack would cost more than the
// line. The number of the pair is found for each line: kept in a register, it makes rings slower.
template <int kWords>
UNISONO_DEVICE void combineWords(const ReductionSpec& spec, const CombineWords<kWords>& words) {
  visitPair<AllPairs>(reducedPairOf(spec), words);
}

// A slice with the slots that it comes from and goes to.
template <int kReceives, int kSends>
struct LineSlice {
  struct Source {
    std::byte* slot;
    uint64_t flag;
    int peer;
    bool clear;  // once it has been read
  };
  struct Destination {
    std::byte* slot;
    uint64_t flag;
  };
  Source source[kReceives];
  Destination destination[kSends];
  int sources, destinations;
  bool isProxied;  // a proxy reads or stores the lines of some peer
  const void* input;
  void* output;
  uint32_t bytes;
  bool prepare, finish;
};

// Whether the rank's own words of the next pass are on their way while it moves those of this one:
// where there are registers for both. An H200 then reduces up to a fifth faster.
template <typename Format>
constexpr bool loadsInputAhead(int receives) {
  return receives == 1 || Format::kWords <= kWordsPerPass;
}

// By all workers. `next`: with loadsInputAhead(), the words of the first pass of the input. Returns
// false after an abort. What does not change is in variables: polls and
// stores of lines make the compiler load all else again. With `kCopies` nothing is reduced.
template <typename Format, bool kCopies, int kReceives, int kSends>
UNISONO_DEVICE bool moveLines(const ThreadGroup& group, const Block& block,
                              const LineSlice<kReceives, kSends>& slice, const UserWords& input,
                              uint64_t (&next)[Format::kWords]) {
  const ReductionSpec spec =
      kCopies ? ReductionSpec{block.work.reduction.type, Reduction::sum, false, 0}
              : block.work.reduction;
  const uint32_t* const abortFlag = block.abortFlag;
  const int rank = block.rank, channel = block.channel;
  const uint32_t words = (slice.bytes + 7) / 8;
  const bool dependent = slice.isProxied || (!kCopies && groupsOf(block.work.algorithm) > 1);
  const int sources = slice.sources, destinations = slice.destinations;
  const bool hasInput = slice.input != nullptr, hasOutput = slice.output != nullptr;
  const UserWords output(slice.output, slice.bytes, elementBytes(spec.type));
  // A copy leaves all bits as they are.
  const bool prepares = hasInput && slice.prepare && spec.reduction == Reduction::preMulSum;
  const bool finishes = slice.finish && spec.reduction == Reduction::sumPostDivide;

  const int lane = group.rank(), lanes = group.size();
  const uint32_t passWords = Format::passWords(lanes);
  constexpr bool kLoadsAhead = loadsInputAhead<Format>(kReceives);
  // So are the lines of the parent in a tree with LL128, which is a tenth faster at 256 MB. Rings
  // only lose by it, up to 0.4 us at 8 KB.
  constexpr bool kLoadsLinesAhead =
      kReceives == 1 && kSends > 1 && Format::kProtocol == Protocol::ll128;
  typename Format::Loaded lines{};
  for (uint32_t pass = 0; pass * passWords < words; pass++) {
    const typename Format::Place place(pass, lane, lanes);
    uint64_t sum[Format::kWords] = {};
    if (kLoadsAhead) {
      UNISONO_UNROLL
      for (int k = 0; k < Format::kWords; k++) sum[k] = next[k];
      if (hasInput && (pass + 1) * passWords < words) {
        input.load(typename Format::Place(pass + 1, lane, lanes), next);
      }
    } else if (hasInput) {
      input.load(place, sum);
    }
    UNISONO_NO_UNROLL
    for (int s = 0; s < sources; s++) {
      const auto source = slice.source[kReceives == 1 ? 0 : s];
      uint64_t word[Format::kWords] = {};
      if (!waitForLines<Format>(abortFlag, {"lines", rank, source.peer, channel}, source.slot,
                                place, words, source.flag, word, dependent, lines,
                                kLoadsLinesAhead && pass > 0)) {
        return false;
      }
      if (kLoadsLinesAhead && (pass + 1) * passWords < words) {
        Format::load(source.slot, typename Format::Place(pass + 1, lane, lanes), words, dependent,
                     lines);
      }
      const bool finish = s + 1 == sources && finishes;
      const bool combine = s > 0 || hasInput;
      if (!combine) {
        UNISONO_UNROLL
        for (int k = 0; k < Format::kWords; k++) sum[k] = word[k];
      }
      if constexpr (!kCopies) {
        if (!combine && !finish) continue;
        const bool prepare = s == 0 && prepares;
        combineWords(spec, CombineWords<Format::kWords>{spec, sum, word, prepare, combine, finish});
      }
    }
    if constexpr (!kCopies) {
      if (sources == 0 && (prepares || finishes)) {
        combineWords(spec, CombineWords<Format::kWords>{spec, sum, sum, prepares, false, finishes});
      }
    }
    UNISONO_NO_UNROLL
    for (int d = 0; d < destinations; d++) {
      const auto to = slice.destination[kSends == 1 ? 0 : d];
      Format::store(to.slot, place, words, to.flag, sum, dependent);
    }
    if (hasOutput) output.store(place, sum);
  }
  UNISONO_NO_UNROLL
  for (int s = 0; s < sources; s++) {
    const auto source = slice.source[kReceives == 1 ? 0 : s];
    if (source.clear) Format::clear(source.slot, block.slotBytes, lane, lanes);
  }
  return true;
}

// Only for proxies. Out of line: in the loop over slices they made rings inside a node up to 7 %
// slower.
UNISONO_DEVICE_CALL bool awaitTail(FifoCursor cursor, const Block& block, const End& end) {
  return cursor.awaitData(block, end);
}
UNISONO_DEVICE_CALL void postTail(FifoCursor cursor, const End& end) {
  cursor.postData(end);
}
UNISONO_DEVICE_CALL void postCreditToProxy(FifoCursor cursor, const End& end) {
  cursor.postCredit(end);
}

template <typename Format, int kReceives, int kSends, bool kCopies = false>
class Lines : public FifoEnds<kReceives, kSends> {
 public:
  static constexpr Protocol kProtocol = Format::kProtocol;

  UNISONO_DEVICE Lines(ThreadGroup& group, Block& block)
      : FifoEnds<kReceives, kSends>(group, block),
        elementBytes_(elementBytes(block.work.reduction.type)) {
    UNISONO_UNROLL
    for (int i = 0; i < kReceives; i++) isProxied_ = isProxied_ || hasProxy(block.receive[i]);
    UNISONO_UNROLL
    for (int i = 0; i < kSends; i++) isProxied_ = isProxied_ || hasProxy(block.send[i]);
  }

  UNISONO_DEVICE void begin(Peers) {}

  UNISONO_DEVICE void move(const Slice& slice) {
    const uint32_t bytes = slice.elements * elementBytes_;
    const UserWords input(slice.input, bytes, elementBytes_);
    uint64_t next[Format::kWords] = {};
    // Before the waits, which then hide its latency.
    if (loadsInputAhead<Format>(kReceives) && slice.input != nullptr && group_.isWorker() &&
        !group_.aborted()) {
      input.load(typename Format::Place(0, group_.rank(), group_.size()), next);
    }
    if (kHasTails && isProxied_) awaitTails(slice.receive);
    this->waitForCredit(slice.send);
    if (!kHasTails && isProxied_) {
      this->forEachSend(slice.send, [&](int i) { this->reportLines(i, bytes); });
    }
    group_.syncReady();
    if (group_.isWorker() && !group_.aborted()) {
      LineSlice<kReceives, kSends> lines;
      lines.sources = lines.destinations = 0;
      this->forEachReceive(slice.receive, [&](int i) {
        lines.source[lines.sources++] = {receive_[i].slot(block_, block_.receive[i]),
                                         Format::flagOf(receive_[i].step()), block_.receive[i].peer,
                                         mustClear(i)};
      });
      this->forEachSend(slice.send, [&](int i) {
        lines.destination[lines.destinations++] = {send_[i].slot(block_, block_.send[i]),
                                                   Format::flagOf(send_[i].step())};
      });
      lines.isProxied = isProxied_;
      lines.input = slice.input;
      lines.output = slice.output;
      lines.bytes = bytes;
      lines.prepare = slice.prepare;
      lines.finish = slice.finish;
      if (!moveLines<Format, kCopies>(group_, block_, lines, input, next)) group_.setAborted();
    }
    group_.syncDone();
    if (kHasTails && isProxied_) {
      postTails(slice.send, bytes);
      postCredits(slice.receive, true);
    } else {
      postCredits(slice.receive, false);
    }
    this->advance(slice.receive, slice.send);
  }

 private:
  using FifoEnds<kReceives, kSends>::group_;
  using FifoEnds<kReceives, kSends>::block_;
  using FifoEnds<kReceives, kSends>::receive_;
  using FifoEnds<kReceives, kSends>::send_;

  // Whether a proxy passes slots on by their tails, as with protocol Simple.
  static constexpr bool kHasTails = kProtocol == Protocol::ll128;

  UNISONO_DEVICE static bool hasProxy(const End& end) {
    return end.origin != nullptr && end.fifo.hasProxy != 0;
  }
  UNISONO_DEVICE void awaitTails(Peers receive) {
    this->forEachReceive(receive, [&](int i) {
      if (!group_.isWaiter(i) || group_.aborted() || !hasProxy(block_.receive[i])) return;
      if (!awaitTail(receive_[i], block_, block_.receive[i])) group_.setAborted();
    });
  }
  UNISONO_DEVICE void postTails(Peers send, uint32_t bytes) {
    this->forEachSend(send, [&](int i) {
      if (!group_.isPoster(i) || group_.aborted() || !hasProxy(block_.send[i])) return;
      this->report(i, this->reportOf(occupiedBytesOf(kProtocol, bytes)));
      postTail(send_[i], block_.send[i]);
    });
  }
  // `overwritten`: by proxies, so that what they overwrite must have been read.
  UNISONO_DEVICE void postCredits(Peers receive, bool overwritten) {
    this->forEachReceive(receive, [&](int i) {
      if (!group_.isPoster(i) || group_.aborted()) return;
      if (mustClear(i)) {
        receive_[i].postCredit(block_.receive[i]);  // what was cleared goes first
      } else if (kHasTails && overwritten) {
        postCreditToProxy(receive_[i], block_.receive[i]);
      } else {
        receive_[i].postCreditRelaxed(block_.receive[i]);
      }
    });
  }
  UNISONO_DEVICE bool mustClear(int i) const {
    return Format::mustClear(receive_[i].step(), block_.slots);
  }

  uint32_t elementBytes_;
  bool isProxied_ = false;  // a proxy moves the data of some peer
};

}  // namespace unisono::device::UNISONO_TARGET
