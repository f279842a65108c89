// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include "device/protocol/low_latency.h"
#include "device/work.h"

// How words of a buffer are arranged in the lines of a slot, and which words and lines each lane
// moves.
namespace unisono::device::UNISONO_TARGET {

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
  // Says whether the warp of a lane has a part of `words` words in a pass. One that has none must
  // not take instruction slots from the others.
  UNISONO_DEVICE static bool hasPart(uint32_t pass, int lane, int lanes, uint32_t words) {
    return Place(pass, lane / kWarpSize * kWarpSize, lanes).first() < words;
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

}  // namespace unisono::device::UNISONO_TARGET
