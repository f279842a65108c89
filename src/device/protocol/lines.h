// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/protocol/low_latency.h"
#include "device/protocol/protocol.h"
#include "device/reduce/reductions.h"

// Protocols LL and LL128: a slot is filled with lines of data and flag, so that readiness arrives
// with the data and there is neither a tail nor a fence. The flag follows from the step, and every
// worker waits for its own lines. The head is posted as in protocol Simple, but relaxed: a worker
// has used what it loaded before the barrier that the poster waits for.
namespace unisono::device::UNISONO_TARGET {

// Words of 8 bytes that a lane handles at a time, reduced in pairs.
struct WordPair {
  uint64_t word[2];
};

// How a pair is combined with a rank's own operand or another partial result.
struct PairStep {
  bool first;    // there is nothing to combine with yet
  bool prepare;  // the operand is the rank's own contribution
  bool finish;   // the result is the complete reduction
};

template <typename R>
UNISONO_DEVICE_CALL WordPair reducePair(const ReductionSpec& spec, WordPair sum, WordPair operand,
                                        PairStep step) {
  using Element = typename R::Element;
  const R reducer(spec);
  constexpr int kElements = sizeof(WordPair) / sizeof(Element);
  Element a[kElements], b[kElements];
  memcpy(a, &sum, sizeof(a));
  memcpy(b, &operand, sizeof(b));
  UNISONO_UNROLL
  for (int e = 0; e < kElements; e++) {
    auto value = step.prepare ? reducer.prepare(b[e]) : R::Traits::widen(b[e]);
    if (!step.first) value = R::combine(R::Traits::widen(a[e]), value);
    if (step.finish) value = reducer.finish(value);
    a[e] = R::Traits::narrow(value);
  }
  memcpy(&sum, a, sizeof(a));
  return sum;
}

using PairFunction = WordPair (*)(const ReductionSpec&, WordPair, WordPair, PairStep);
struct MakePairFunction {
  template <typename R>
  constexpr PairFunction operator()() const {
    return &reducePair<R>;
  }
};
UNISONO_DEVICE_TABLE ReductionTable<PairFunction> kPairFunctions =
    makeReductionTable<PairFunction>(MakePairFunction{});

// Word `index` of a buffer with elements of `elementSize` bytes.
UNISONO_DEVICE uint64_t loadWord(const void* buffer, uint64_t index, uint64_t bytes,
                                 uint64_t elementSize) {
  switch (elementSize) {
    case 1:
      return loadPack<uint8_t>(buffer, index, bytes);
    case 2:
      return loadPack<uint16_t>(buffer, index, bytes);
    case 4:
      return loadPack<uint32_t>(buffer, index, bytes);
    default:
      return loadPack<uint64_t>(buffer, index, bytes);
  }
}
UNISONO_DEVICE void storeWord(void* buffer, uint64_t index, uint64_t bytes, uint64_t elementSize,
                              uint64_t word) {
  switch (elementSize) {
    case 1:
      return storePack<uint8_t>(buffer, index, bytes, word);
    case 2:
      return storePack<uint16_t>(buffer, index, bytes, word);
    case 4:
      return storePack<uint32_t>(buffer, index, bytes, word);
    default:
      return storePack<uint64_t>(buffer, index, bytes, word);
  }
}

// LL: a line of 16 bytes carries one word and twice the flag, 31 bits of the step and a bit that is
// always set. Lines that a short slice has not overwritten keep older flags, which would match
// again after 2^31 steps. Therefore the receiver clears each slot once in 2^31 steps, before it
// gives the slot back: flags of lines that are left are always younger than that.
struct LowLatencyFormat {
  static constexpr Protocol kProtocol = Protocol::ll;
  static constexpr int kWords = kWordsPerPass;

  // The words of a lane in one pass: kWords, `lanes` apart.
  struct Place {
    uint64_t first;
    uint64_t stride;
    UNISONO_DEVICE uint64_t index(int k) const { return first + static_cast<uint64_t>(k) * stride; }
  };
  UNISONO_DEVICE static uint64_t passWords(int lanes) {
    return static_cast<uint64_t>(lanes) * kWords;
  }
  UNISONO_DEVICE static Place placeOf(uint64_t pass, int lane, int lanes) {
    return {pass * passWords(lanes) + static_cast<uint64_t>(lane), static_cast<uint64_t>(lanes)};
  }

  UNISONO_DEVICE static uint64_t flagOf(uint64_t step) {
    return static_cast<uint32_t>(step) | uint32_t{1} << 31;
  }
  UNISONO_DEVICE static void store(std::byte* slot, Place place, uint64_t words, uint64_t flag,
                                   const uint64_t (&word)[kWords], bool dependent) {
    UNISONO_UNROLL
    for (int k = 0; k < kWords; k++) {
      if (place.index(k) >= words) break;
      storeLine(reinterpret_cast<Line*>(slot) + place.index(k), word[k],
                static_cast<uint32_t>(flag), dependent);
    }
  }
  UNISONO_DEVICE static bool waitAndLoad(const Block& block, const WaitSubject& subject,
                                         const std::byte* slot, Place place, uint64_t words,
                                         uint64_t flag, uint64_t (&word)[kWords], bool dependent) {
    return waitUntil(block.abortFlag, subject, [&] {
      Line line[kWords];
      UNISONO_UNROLL
      for (int k = 0; k < kWords; k++) {
        if (place.index(k) >= words) break;
        line[k] = loadLine(reinterpret_cast<const Line*>(slot) + place.index(k), dependent);
      }
      bool here = true;
      UNISONO_UNROLL
      for (int k = 0; k < kWords; k++) {
        if (place.index(k) >= words) break;
        here = here && lineHolds(line[k], static_cast<uint32_t>(flag));
        word[k] = lineData(line[k]);
      }
      return here;
    });
  }

  UNISONO_DEVICE static bool mustClear(uint64_t step, uint32_t slots) {
    return (step & 0x7fffffffu) < slots;
  }
  // Each lane clears the lines that it has read, and those that nobody has.
  UNISONO_DEVICE static void clear(std::byte* slot, uint32_t slotBytes, int lane, int lanes) {
    const uint64_t lines = slotBytes / sizeof(Line);
    for (uint64_t i = static_cast<uint64_t>(lane); i < lines; i += static_cast<uint64_t>(lanes)) {
      storeLine(reinterpret_cast<Line*>(slot) + i, 0, 0);
    }
  }
};

// LL128: a line of 128 bytes carries 15 words and the flag, the whole step plus one, which never
// repeats. Only where a line's store arrives as one.
struct LowLatency128Format {
  static constexpr Protocol kProtocol = Protocol::ll128;
  static constexpr int kWords = kLaneWords;
  static constexpr uint64_t kData = kLineWords - 1;

  // A lane's words of one line; the last lane has the flag in place of the last word.
  struct Place {
    uint64_t line;
    int lane;
    UNISONO_DEVICE uint64_t index(int k) const {
      const uint64_t place = static_cast<uint64_t>(lane * kWords + k);
      return place == kData ? ~uint64_t{0} : line * kData + place;
    }
    UNISONO_DEVICE bool isUsed(uint64_t words) const { return line * kData < words; }
    UNISONO_DEVICE bool hasFlag() const { return lane == kLineLanes - 1; }
  };
  UNISONO_DEVICE static uint64_t passWords(int lanes) {
    return static_cast<uint64_t>(lanes / kLineLanes) * kData;
  }
  UNISONO_DEVICE static Place placeOf(uint64_t pass, int lane, int lanes) {
    return {
        pass * static_cast<uint64_t>(lanes / kLineLanes) + static_cast<uint64_t>(lane / kLineLanes),
        lane % kLineLanes};
  }

  UNISONO_DEVICE static uint64_t flagOf(uint64_t step) { return step + 1; }
  UNISONO_DEVICE static void store(std::byte* slot, Place place, uint64_t words, uint64_t flag,
                                   uint64_t (&word)[kWords], bool) {
    if (place.hasFlag()) word[kWords - 1] = flag;
    syncWarp();  // the lanes of a line store it in one instruction
    if (!place.isUsed(words)) return;
    storeLine128(reinterpret_cast<uint64_t*>(slot) + place.line * kLineWords, place.lane, word);
  }
  UNISONO_DEVICE static bool waitAndLoad(const Block& block, const WaitSubject& subject,
                                         const std::byte* slot, Place place, uint64_t words,
                                         uint64_t flag, uint64_t (&word)[kWords], bool) {
    return waitUntilAll(block.abortFlag, subject, [&] {
      if (!place.isUsed(words)) return true;
      loadLine128(reinterpret_cast<const uint64_t*>(slot) + place.line * kLineWords, place.lane,
                  word);
      return !place.hasFlag() || word[kWords - 1] == flag;
    });
  }

  UNISONO_DEVICE static bool mustClear(uint64_t, uint32_t) { return false; }
  UNISONO_DEVICE static void clear(std::byte*, uint32_t, int, int) {}
};

// A slice with the slots that it comes from and goes to.
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
  Source source[kMaxFan];
  Destination destination[kMaxFan];
  int sources, destinations;
  const void* input;
  void* output;
  uint64_t bytes;
  bool prepare, finish;
};

// By all workers. Returns false after an abort.
template <typename Format>
UNISONO_DEVICE_CALL bool moveLines(const ThreadGroup& group, const Block& block,
                                   const LineSlice& slice) {
  const ReductionSpec& spec = block.work.reduction;
  const uint64_t bytes = slice.bytes;
  const uint64_t words = (bytes + 7) / 8;
  const uint64_t size = elementBytes(spec.type);
  const bool dependent = block.groups > 1;
  const bool hasInput = slice.input != nullptr;
  const PairFunction reduce = kPairFunctions.of(spec);
  // A copy leaves all bits as they are.
  const bool prepares = hasInput && slice.prepare && spec.reduction == Reduction::preMulSum;
  const bool finishes = slice.finish && spec.reduction == Reduction::sumPostDivide;

  const int lane = group.rank(), lanes = group.size();
  const uint64_t passWords = Format::passWords(lanes);
  for (uint64_t pass = 0; pass * passWords < words; pass++) {
    const typename Format::Place place = Format::placeOf(pass, lane, lanes);
    uint64_t own[Format::kWords] = {};
    if (hasInput) {
      UNISONO_UNROLL
      for (int k = 0; k < Format::kWords; k++) {
        if (place.index(k) < words) own[k] = loadWord(slice.input, place.index(k), bytes, size);
      }
    }
    uint64_t sum[Format::kWords] = {};
    int operands = 0;
    auto add = [&](const uint64_t(&word)[Format::kWords], bool prepare, bool last) {
      const bool finish = last && finishes;
      const bool copies = operands == 0 && !prepare && !finish;
      UNISONO_UNROLL
      for (int k = 0; k < Format::kWords; k += 2) {
        WordPair pair{{word[k], word[k + 1]}};
        if (!copies) {
          pair = reduce(spec, {{sum[k], sum[k + 1]}}, pair, {operands == 0, prepare, finish});
        }
        sum[k] = pair.word[0];
        sum[k + 1] = pair.word[1];
      }
      operands++;
    };
    for (int s = 0; s < slice.sources; s++) {
      const LineSlice::Source& source = slice.source[s];
      uint64_t word[Format::kWords] = {};
      if (!Format::waitAndLoad(block, {"lines", block.rank, source.peer, block.channel},
                               source.slot, place, words, source.flag, word, dependent)) {
        return false;
      }
      add(word, false, s + 1 == slice.sources && !hasInput);
    }
    if (hasInput) add(own, prepares, true);
    for (int d = 0; d < slice.destinations; d++) {
      const LineSlice::Destination& destination = slice.destination[d];
      Format::store(destination.slot, place, words, destination.flag, sum, dependent);
    }
    if (slice.output != nullptr) {
      UNISONO_UNROLL
      for (int k = 0; k < Format::kWords; k++) {
        if (place.index(k) < words) storeWord(slice.output, place.index(k), bytes, size, sum[k]);
      }
    }
  }
  for (int s = 0; s < slice.sources; s++) {
    if (slice.source[s].clear) Format::clear(slice.source[s].slot, block.slotBytes, lane, lanes);
  }
  return true;
}

template <typename Format, int kReceives, int kSends>
class Lines : public FifoEnds<kReceives, kSends> {
 public:
  static constexpr Protocol kProtocol = Format::kProtocol;

  using FifoEnds<kReceives, kSends>::FifoEnds;

  UNISONO_DEVICE void begin(Peers) {}

  UNISONO_DEVICE void move(const Slice& slice) {
    this->waitForCredit(slice.send);
    group_.syncReady();
    if (group_.isWorker() && !group_.aborted()) {
      LineSlice lines;
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
      lines.input = slice.input;
      lines.output = slice.output;
      lines.bytes = slice.elements * elementBytes(block_.work.reduction.type);
      lines.prepare = slice.prepare;
      lines.finish = slice.finish;
      if (!moveLines<Format>(group_, block_, lines)) group_.setAborted();
    }
    group_.syncDone();
    this->forEachReceive(slice.receive, [&](int i) {
      if (!group_.isPoster(i) || group_.aborted()) return;
      if (mustClear(i)) {
        receive_[i].postCredit(block_.receive[i]);  // what was cleared goes first
      } else {
        receive_[i].postCreditRelaxed(block_.receive[i]);
      }
    });
    this->advance(slice.receive, slice.send);
  }

 private:
  using FifoEnds<kReceives, kSends>::group_;
  using FifoEnds<kReceives, kSends>::block_;
  using FifoEnds<kReceives, kSends>::receive_;
  using FifoEnds<kReceives, kSends>::send_;

  UNISONO_DEVICE bool mustClear(int i) const {
    return Format::mustClear(receive_[i].step(), block_.slots);
  }
};

}  // namespace unisono::device::UNISONO_TARGET
