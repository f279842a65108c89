// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "plan/plan.h"

namespace unisono::comm {

// The numbers with which kernels mark the launches of a plan (device::LaunchMark). They consist of
// the number of the plan and of the launches of it that follow, so that they grow, and so that the
// number of the last launch that has begun tells whether the plan is done with it.
inline constexpr uint64_t kPlanLaunches = uint64_t{1} << 16;
constexpr uint64_t launchNumber(uint64_t plan, uint64_t following) {
  return (plan + 1) * kPlanLaunches - 1 - std::min(following, kPlanLaunches - 1);
}
constexpr uint64_t planOf(uint64_t launch) {
  return launch / kPlanLaunches;
}
constexpr bool isLastOfPlan(uint64_t launch) {
  return launch % kPlanLaunches == kPlanLaunches - 1;
}

// What a launch waits for, as a report of a hang needs it.
struct LaunchNote {
  uint64_t number = 0;     // launchNumber()
  uint32_t protocols = 0;  // of FIFOs: a bit for each device::Protocol

  // The rest is of the direct family.
  enum class Kind : uint32_t { other, lines, wide, messages };
  Kind kind = Kind::other;
  int32_t blocks = 0;
  // Where positions in the streams of lines advance before these are awaited, which depends on the
  // backend for some numbers of ranks.
  enum class Advance : uint32_t { first, last, unknown };
  Advance advance = Advance::last;
  uint32_t lines[device::kDirectMaxPeers] = {};  // to take from each peer

  // Of a collective over LL128.
  uint32_t passLines = 0, shareBytes = 0;
  uint64_t endBytes = 0, inputStride = 0, outputStride = 0;
  device::DirectPeers from = 0;
  bool reduces = false, twoShot = false, offers = false;

  // Of messages: the first blocks of those over LL and over LL128, and the streams of the latter.
  int32_t firstLineBlock = 0, firstWideBlock = 0, wideBlocks = 0, streams = 0;
  uint8_t stream[device::kMaxStreams] = {};
};

static_assert(std::is_trivially_copyable_v<LaunchNote>);

LaunchNote noteOf(uint64_t number, const plan::Launch& launch);

// The notes of the last launches. One thread adds, another one reads.
class LaunchNotes {
 public:
  void add(uint64_t number, const plan::Launch& launch);
  // Nothing once as many launches have been added after it.
  std::optional<LaunchNote> find(uint64_t number) const;

 private:
  static constexpr uint64_t kKept = 64;
  static_assert(sizeof(LaunchNote) % sizeof(uint64_t) == 0);
  static constexpr size_t kWords = sizeof(LaunchNote) / sizeof(uint64_t);
  // The note's number, 0 while it is written, and its bytes; those that its kind does not have may
  // be of an older one.
  struct Entry {
    std::atomic<uint64_t> number{0};
    std::array<std::atomic<uint64_t>, kWords> words{};
  };
  std::array<Entry, kKept> entries_;
  uint64_t added_ = 0;
};

}  // namespace unisono::comm
