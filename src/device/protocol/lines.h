// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include "device/protocol/low_latency.h"
#include "device/protocol/protocol.h"
#include "device/reduce/reduce_copy.h"

// Protocols LL and LL128: a slot is filled with lines of data and flag, so that readiness arrives
// with the data and there is neither a tail nor a fence. The flag follows from the step, and every
// worker waits for its own lines. The head is posted as in protocol Simple, but relaxed: a worker
// has used what it loaded before the barrier that the poster waits for.
namespace unisono::device::UNISONO_TARGET {

// A buffer of the user, of less than 2^32 bytes. It is aligned to its elements only. A
// Place names the words of a lane in one pass: word k is `distance(k)` after the first, and exists
// if `has(k)`. With `kHasVectors`, words 2v and 2v + 1 follow each other, and both exist or
// neither.
class UserWords {
 public:
  UNISONO_DEVICE UserWords(const void* address, uint32_t bytes, uint64_t elementSize)
      : address_(reinterpret_cast<uint64_t>(address)),
        bytes_(bytes),
        whole_(address_ % 8 == 0 ? bytes / 8 : 0),
        paired_(address_ % 16 == 0 ? bytes / 16 * 2 : 0),
        elementSize_(static_cast<uint32_t>(elementSize)) {}

  // Where words are not accessed as vectors or as a whole, calls keep the code for that out of the
  // way of the others.
  template <typename Place, int kWords>
  UNISONO_DEVICE void load(Place place, uint64_t (&word)[kWords]) const {
    UNISONO_UNROLL
    for (int k = 0; k < kWords; k++) word[k] = 0;
    if constexpr (Place::kHasVectors) {
      loadVectors(place, word);
      if (paired_ != words()) [[unlikely]] {
        take(loadRest(*this, place, Copied<kWords>(word)), word);
      }
    } else {
      loadWhole(place, word, 0);
      if (whole_ != words()) [[unlikely]] {
        take(loadParts(*this, place, Copied<kWords>(word)), word);
      }
    }
  }
  template <typename Place, int kWords>
  UNISONO_DEVICE void store(Place place, const uint64_t (&word)[kWords]) const {
    if constexpr (Place::kHasVectors) {
      storeVectors(place, word);
      if (paired_ != words()) [[unlikely]] {
        storeRest(*this, place, Copied<kWords>(word));
      }
    } else {
      storeWhole(place, word, 0);
      if (whole_ != words()) [[unlikely]] {
        storeParts(*this, place, Copied<kWords>(word));
      }
    }
  }

 private:
  // Words that are passed to a function by value, so that those of the caller stay in registers.
  template <int kWords>
  struct Copied {
    UNISONO_DEVICE explicit Copied(const uint64_t (&word)[kWords]) {
      UNISONO_UNROLL
      for (int k = 0; k < kWords; k++) of[k] = word[k];
    }
    uint64_t of[kWords];
  };
  template <int kWords>
  UNISONO_DEVICE static void take(const Copied<kWords>& copied, uint64_t (&word)[kWords]) {
    UNISONO_UNROLL
    for (int k = 0; k < kWords; k++) word[k] = copied.of[k];
  }

  template <typename Place, int kWords>
  UNISONO_DEVICE void loadVectors(Place place, uint64_t (&word)[kWords]) const {
    UNISONO_UNROLL
    for (int k = 0; k < kWords; k += 2) {
      const uint32_t index = place.first() + place.distance(k);
      const bool isThere = place.has(k) && index < paired_;
      if (isThere) noteRead(at(index), 16);
      const Vector16 loaded = loadVectorCached(at(index), isThere);
      memcpy(&word[k], &loaded, sizeof(loaded));
    }
  }
  template <typename Place, int kWords>
  UNISONO_DEVICE void storeVectors(Place place, const uint64_t (&word)[kWords]) const {
    UNISONO_UNROLL
    for (int k = 0; k < kWords; k += 2) {
      const uint32_t index = place.first() + place.distance(k);
      const bool isThere = place.has(k) && index < paired_;
      if (isThere) noteWrite(at(index), 16);
      Vector16 stored;
      memcpy(&stored, &word[k], sizeof(stored));
      storeVector(at(index), stored, isThere);
    }
  }

  // Words from `first` on that can be accessed as one.
  template <typename Place, int kWords>
  UNISONO_DEVICE void loadWhole(Place place, uint64_t (&word)[kWords], uint32_t first) const {
    UNISONO_UNROLL
    for (int k = 0; k < kWords; k++) {
      const uint32_t index = place.first() + place.distance(k);
      const bool isWhole = place.has(k) && index >= first && index < whole_;
      if (isWhole) noteRead(at(index), 8);
      word[k] = loadWord(at(index), isWhole, word[k]);
    }
  }
  template <typename Place, int kWords>
  UNISONO_DEVICE void storeWhole(Place place, const uint64_t (&word)[kWords],
                                 uint32_t first) const {
    UNISONO_UNROLL
    for (int k = 0; k < kWords; k++) {
      const uint32_t index = place.first() + place.distance(k);
      if (!place.has(k) || index < first || index >= whole_) continue;
      noteWrite(at(index), 8);
      *at(index) = word[k];
    }
  }
  // Words that cannot.
  template <typename Place, int kWords>
  UNISONO_DEVICE_CALL static Copied<kWords> loadParts(UserWords from, Place place,
                                                      Copied<kWords> word) {
    UNISONO_UNROLL
    for (int k = 0; k < kWords; k++) {
      const uint32_t index = place.first() + place.distance(k);
      if (place.has(k) && from.isInPart(index)) word.of[k] = from.loadPart(index);
    }
    return word;
  }
  template <typename Place, int kWords>
  UNISONO_DEVICE_CALL static void storeParts(UserWords to, Place place, Copied<kWords> word) {
    UNISONO_UNROLL
    for (int k = 0; k < kWords; k++) {
      const uint32_t index = place.first() + place.distance(k);
      if (place.has(k) && to.isInPart(index)) to.storePart(index, word.of[k]);
    }
  }
  // All words but those in vectors.
  template <typename Place, int kWords>
  UNISONO_DEVICE_CALL static Copied<kWords> loadRest(UserWords from, Place place,
                                                     Copied<kWords> word) {
    from.loadWhole(place, word.of, from.paired_);
    return from.whole_ == from.words() ? word : loadParts(from, place, word);
  }
  template <typename Place, int kWords>
  UNISONO_DEVICE_CALL static void storeRest(UserWords to, Place place, Copied<kWords> word) {
    to.storeWhole(place, word.of, to.paired_);
    if (to.whole_ != to.words()) storeParts(to, place, word);
  }

  UNISONO_DEVICE uint64_t* at(uint32_t index) const {
    return reinterpret_cast<uint64_t*>(address_) + index;
  }
  UNISONO_DEVICE uint32_t words() const { return (bytes_ + 7) / 8; }
  // Words that cannot be accessed as one.
  UNISONO_DEVICE bool isInPart(uint32_t index) const { return index >= whole_ && index < words(); }
  UNISONO_DEVICE uint64_t loadPart(uint64_t index) const {
    switch (elementSize_) {
      case 1:
        return loadPack<uint8_t>(at(0), index, bytes_);
      case 2:
        return loadPack<uint16_t>(at(0), index, bytes_);
      case 4:
        return loadPack<uint32_t>(at(0), index, bytes_);
      default:
        return loadPack<uint64_t>(at(0), index, bytes_);
    }
  }
  UNISONO_DEVICE void storePart(uint64_t index, uint64_t word) const {
    switch (elementSize_) {
      case 1:
        return storePack<uint8_t>(at(0), index, bytes_, word);
      case 2:
        return storePack<uint16_t>(at(0), index, bytes_, word);
      case 4:
        return storePack<uint32_t>(at(0), index, bytes_, word);
      default:
        return storePack<uint64_t>(at(0), index, bytes_, word);
    }
  }

  uint64_t address_;
  uint32_t bytes_;
  uint32_t whole_;   // words that can be accessed as one
  uint32_t paired_;  // of them, those that can be accessed as vectors of two
  uint32_t elementSize_;
};

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

// LL: a line of 16 bytes carries one word and twice the flag, 31 bits of the step and a bit that is
// always set. Lines that a short slice has not overwritten keep older flags, which would match
// again after 2^31 steps. Therefore the receiver clears each slot once in 2^31 steps, before it
// gives the slot back: flags of lines that are left are always younger than that.
struct LowLatencyFormat {
  static constexpr Protocol kProtocol = Protocol::ll;
  static constexpr int kWords = kWordsPerPass;

  // The words of a lane in one pass: kWords, as many apart as there are lanes.
  class Place {
   public:
    static constexpr bool kHasVectors = false;
    UNISONO_DEVICE Place(uint32_t pass, int lane, int lanes)
        : first_(pass * passWords(lanes) + static_cast<uint32_t>(lane)),
          stride_(static_cast<uint32_t>(lanes)) {}
    UNISONO_DEVICE uint32_t first() const { return first_; }
    UNISONO_DEVICE uint32_t distance(int k) const { return static_cast<uint32_t>(k) * stride_; }
    UNISONO_DEVICE static bool has(int) { return true; }

   private:
    uint32_t first_, stride_;
  };
  UNISONO_DEVICE static uint32_t passWords(int lanes) {
    return static_cast<uint32_t>(lanes) * kWords;
  }

  UNISONO_DEVICE static uint64_t flagOf(uint64_t step) { return lineFlagOf(step); }
  UNISONO_DEVICE static void store(std::byte* slot, Place place, uint32_t words, uint64_t flag,
                                   const uint64_t (&word)[kWords], bool dependent) {
    Line* line = reinterpret_cast<Line*>(slot) + place.first();
    UNISONO_UNROLL
    for (int k = 0; k < kWords; k++) {
      if (place.first() + place.distance(k) >= words) break;
      storeLine(line + place.distance(k), word[k], static_cast<uint32_t>(flag), dependent);
    }
  }
  // The lines of a lane in one pass, as they were loaded.
  struct Loaded {
    Line line[kWords];
  };
  UNISONO_DEVICE static void load(const std::byte* slot, Place place, uint32_t words,
                                  bool dependent, Loaded& loaded) {
    const Line* from = reinterpret_cast<const Line*>(slot) + place.first();
    UNISONO_UNROLL
    for (int k = 0; k < kWords; k++) {
      if (place.first() + place.distance(k) >= words) break;
      loaded.line[k] = loadLine(from + place.distance(k), dependent);
    }
  }
  // Returns whether the lines have the flag, and their words.
  UNISONO_DEVICE static bool take(const Loaded& loaded, Place place, uint32_t words, uint64_t flag,
                                  uint64_t (&word)[kWords]) {
    bool here = true;
    UNISONO_UNROLL
    for (int k = 0; k < kWords; k++) {
      if (place.first() + place.distance(k) >= words) break;
      here = here && lineHolds(loaded.line[k], static_cast<uint32_t>(flag));
      word[k] = lineData(loaded.line[k]);
    }
    return here;
  }
  template <typename Ready>
  UNISONO_DEVICE static bool wait(const uint32_t* abortFlag, const WaitSubject& subject,
                                  Ready ready) {
    return waitUntil(abortFlag, subject, ready);
  }

  UNISONO_DEVICE static bool mustClear(uint64_t step, uint32_t slots) {
    return mustClearLines(step, slots);
  }
  // Each lane clears the lines that it has read, and those that nobody has.
  UNISONO_DEVICE static void clear(std::byte* slot, uint32_t slotBytes, int lane, int lanes) {
    const uint64_t lines = slotBytes / sizeof(Line);
    for (uint64_t i = static_cast<uint64_t>(lane); i < lines; i += static_cast<uint64_t>(lanes)) {
      storeLine(reinterpret_cast<Line*>(slot) + i, 0, 0);
    }
  }
};

// The words of a lane in kLines lines of LL128, of which kLanes lanes share each. In lines of their
// own: each line has the words that follow those of the line before, and its last lane has the flag
// in place of the last word.
template <int kLanes, int kLines>
class LinePlace {
 public:
  static constexpr bool kHasVectors = false;
  static constexpr int kLaneWordsOfLine = kLineWords / kLanes;
  static constexpr int kWords = kLines * kLaneWordsOfLine;

  UNISONO_DEVICE LinePlace(uint32_t pass, int lane, int lanes)
      : stride_(static_cast<uint32_t>(lanes / kLanes)),
        line_(pass * kLines * stride_ + static_cast<uint32_t>(lane / kLanes)),
        lane_(lane % kLanes) {}
  UNISONO_DEVICE uint32_t first() const {
    return line_ * (kLineWords - 1) + static_cast<uint32_t>(lane_ * kLaneWordsOfLine);
  }
  UNISONO_DEVICE uint32_t distance(int k) const {
    return static_cast<uint32_t>(k / kLaneWordsOfLine) * stride_ * (kLineWords - 1) +
           static_cast<uint32_t>(k % kLaneWordsOfLine);
  }
  UNISONO_DEVICE bool has(int k) const {
    return !hasFlag() || k % kLaneWordsOfLine != kLaneWordsOfLine - 1;
  }
  UNISONO_DEVICE static void toLines(uint64_t (&)[kWords]) {}
  UNISONO_DEVICE static void toBuffer(uint64_t (&)[kWords]) {}
  UNISONO_DEVICE bool hasFlag() const { return lane_ == kLanes - 1; }
  UNISONO_DEVICE int lane() const { return lane_; }
  // Line i of those that this lane has a part of.
  UNISONO_DEVICE uint32_t line(int i) const { return line_ + static_cast<uint32_t>(i) * stride_; }

 private:
  uint32_t stride_, line_;
  int lane_;
};

// The same in pairs of lines, whose words lanes move to and from a buffer as vectors of two. Of the
// 30 words of a pair, the first line has words 0 to 14 and the flag, the second line words 16 to
// 29, word 15 and the flag. So each lane has two vectors, but the last one has words 14 and 15 and
// two flags.
template <int kLanes, int kLines>
class LinePairPlace {
 public:
  static constexpr bool kHasVectors = true;
  static constexpr int kWords = 2 * kLines;
  static_assert(kLineWords / kLanes == 2 && kLines % 2 == 0);

  UNISONO_DEVICE LinePairPlace(uint32_t pass, int lane, int lanes)
      : stride_(static_cast<uint32_t>(lanes / kLanes)),
        pair_(pass * (kLines / 2) * stride_ + static_cast<uint32_t>(lane / kLanes)),
        lane_(lane % kLanes) {}
  UNISONO_DEVICE uint32_t first() const {
    return pair_ * kPairWords + static_cast<uint32_t>(2 * lane_);
  }
  UNISONO_DEVICE uint32_t distance(int k) const {
    return static_cast<uint32_t>(k / 4) * stride_ * kPairWords +
           static_cast<uint32_t>(k % 4 < 2 ? k % 4 : kLineWords + k % 2);
  }
  UNISONO_DEVICE bool has(int k) const { return !hasFlag() || k % 4 < 2; }
  // Put words where they are in lines, or as they are in buffers. On a GPU both wait for loads that
  // are on their way.
  UNISONO_DEVICE void toLines(uint64_t (&word)[kWords]) const {
    UNISONO_UNROLL
    for (int k = 0; k < kWords; k += 4) {
      if (hasFlag()) word[k + 2] = word[k + 1];
    }
  }
  UNISONO_DEVICE void toBuffer(uint64_t (&word)[kWords]) const {
    UNISONO_UNROLL
    for (int k = 0; k < kWords; k += 4) {
      if (hasFlag()) word[k + 1] = word[k + 2];
    }
  }
  UNISONO_DEVICE bool hasFlag() const { return lane_ == kLanes - 1; }
  UNISONO_DEVICE int lane() const { return lane_; }
  UNISONO_DEVICE uint32_t line(int i) const {
    return 2 * (pair_ + static_cast<uint32_t>(i / 2) * stride_) + static_cast<uint32_t>(i % 2);
  }

 private:
  static constexpr uint32_t kPairWords = 2 * (kLineWords - 1);

  uint32_t stride_, pair_;  // the first pair of lines
  int lane_;
};

// LL128: a line of 128 bytes carries 15 words and the flag, the whole step plus one, which never
// repeats. Only where a line's store arrives as one, or a proxy tells when a whole slot is there. A
// lane has a part of kLines lines in a pass. Both ends have the same kind of places.
template <int kLines, template <int, int> class PlaceOf>
struct WideLinesFormat {
  static constexpr Protocol kProtocol = Protocol::ll128;
  static constexpr int kWords = kLines * kLaneWords;
  static constexpr uint32_t kData = kLineWords - 1;

  using Place = PlaceOf<kLineLanes, kLines>;
  // In words from the beginning of a slot.
  UNISONO_DEVICE static uint32_t offsetOf(Place place, int i) { return place.line(i) * kLineWords; }
  UNISONO_DEVICE static bool isUsed(Place place, int i, uint32_t words) {
    return place.line(i) * kData < words;
  }
  UNISONO_DEVICE static uint32_t passWords(int lanes) {
    return static_cast<uint32_t>(lanes / kLineLanes) * kLines * kData;
  }

  UNISONO_DEVICE static uint64_t flagOf(uint64_t step) { return step + 1; }
  UNISONO_DEVICE static void store(std::byte* slot, Place place, uint32_t words, uint64_t flag,
                                   const uint64_t (&word)[kWords], bool) {
    uint64_t inLines[kWords];
    UNISONO_UNROLL
    for (int k = 0; k < kWords; k++) inLines[k] = word[k];
    place.toLines(inLines);
    syncWarp();  // the lanes of a line store it in one instruction
    UNISONO_UNROLL
    for (int i = 0; i < kLines; i++) {
      if (place.hasFlag()) inLines[(i + 1) * kLaneWords - 1] = flag;
      if (!isUsed(place, i, words)) continue;
      storeLine128(reinterpret_cast<uint64_t*>(slot) + offsetOf(place, i), place.lane(),
                   &inLines[i * kLaneWords]);
    }
  }
  struct Loaded {
    uint64_t word[kWords];
  };
  UNISONO_DEVICE static void load(const std::byte* slot, Place place, uint32_t words, bool,
                                  Loaded& loaded) {
    UNISONO_UNROLL
    for (int i = 0; i < kLines; i++) {
      if (!isUsed(place, i, words)) continue;
      loadLine128(reinterpret_cast<const uint64_t*>(slot) + offsetOf(place, i), place.lane(),
                  &loaded.word[i * kLaneWords]);
    }
  }
  UNISONO_DEVICE static bool take(const Loaded& loaded, Place place, uint32_t words, uint64_t flag,
                                  uint64_t (&word)[kWords]) {
    bool here = true;
    UNISONO_UNROLL
    for (int i = 0; i < kLines; i++) {
      if (!place.hasFlag() || !isUsed(place, i, words)) continue;
      here = here && loaded.word[(i + 1) * kLaneWords - 1] == flag;
    }
    UNISONO_UNROLL
    for (int k = 0; k < kWords; k++) word[k] = loaded.word[k];
    place.toBuffer(word);
    return here;
  }
  template <typename Ready>
  UNISONO_DEVICE static bool wait(const uint32_t* abortFlag, const WaitSubject& subject,
                                  Ready ready) {
    return waitUntilAll(abortFlag, subject, ready);
  }

  UNISONO_DEVICE static bool mustClear(uint64_t, uint32_t) { return false; }
  UNISONO_DEVICE static void clear(std::byte*, uint32_t, int, int) {}
};
// For rings that reduce: with vectors they take up to a sixth longer from 256 MB on. Trees gain a
// tenth by vectors, the direct family 2 % (docs/results/2026-11-25-h100x2.md).
using RingLinesFormat = WideLinesFormat<kLinesPerPass, LinePlace>;
template <int kLanes, int kLines>
using VectorPlace =
    std::conditional_t<kLanes == 1, LinePlace<kLanes, kLines>, LinePairPlace<kLanes, kLines>>;
using VectorLinesFormat = WideLinesFormat<kLinesPerPass, VectorPlace>;

// Waits until the lines of a pass are there. `loaded`: whether they have been loaded before; loads
// them again until they have the flag. False after an abort.
template <typename Format>
UNISONO_DEVICE bool waitForLines(const uint32_t* abortFlag, const WaitSubject& subject,
                                 const std::byte* slot, typename Format::Place place,
                                 uint32_t words, uint64_t flag, uint64_t (&word)[Format::kWords],
                                 bool dependent, typename Format::Loaded& lines, bool loaded) {
  return Format::wait(abortFlag, subject, [&] {
    if (!loaded) Format::load(slot, place, words, dependent, lines);
    loaded = false;
    return Format::take(lines, place, words, flag, word);
  });
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
