// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/simt/simt.h"

// Copies of bytes from one source to one or more destinations.
namespace unisono::device::UNISONO_TARGET {

inline constexpr int kMaxSources = 4;
inline constexpr int kMaxDestinations = 4;

// 16-byte vectors that one lane of a copy keeps in flight.
inline constexpr int kUnroll = 8;

// What moves from where to where, built from its first source and destination on.
struct ReduceCopy {
  const void* source[kMaxSources];
  void* destination[kMaxDestinations];
  int sources;
  int destinations;
  uint64_t elements;
  uint32_t prepare;  // bit s: source s is a rank's own input (Reducer::prepare)
  bool finish;       // the result is complete (Reducer::finish)

  // Without an index that is known at run time only, so that the pointers can be in registers.
  UNISONO_DEVICE void addSource(const void* from, bool prepared) {
    UNISONO_UNROLL
    for (int s = 0; s < kMaxSources; s++) {
      if (s != sources) continue;
      source[s] = from;
      if (prepared) prepare |= 1u << s;
    }
    sources++;
  }
  UNISONO_DEVICE void addDestination(void* to) {
    UNISONO_UNROLL
    for (int d = 0; d < kMaxDestinations; d++) {
      if (d == destinations) destination[d] = to;
    }
    destinations++;
  }
};

UNISONO_DEVICE uint32_t misalignmentOf(const void* address) {
  return static_cast<uint32_t>(reinterpret_cast<uint64_t>(address) % 16);
}

// How the bytes of a work are cut: single elements up to `begin` and from `end` on, and vectors in
// between, to which the first destination is aligned.
struct VectorRange {
  uint64_t begin, end;
  bool aligned;       // all operands are
  bool done = false;  // the vectors have been moved
};

UNISONO_DEVICE VectorRange vectorRangeOf(const ReduceCopy& work, uint64_t bytes) {
  const uint32_t first = misalignmentOf(work.destination[0]);
  bool aligned = true, windows = false;
  UNISONO_UNROLL
  for (int s = 0; s < kMaxSources; s++) {
    if (s < work.sources && misalignmentOf(work.source[s]) != first) windows = true;
  }
  UNISONO_UNROLL
  for (int d = 1; d < kMaxDestinations; d++) {
    if (d < work.destinations && misalignmentOf(work.destination[d]) != first) aligned = false;
  }
  aligned = aligned && !windows;
  VectorRange range{(16 - first) % 16, 0, aligned};
  // A source that is not aligned is read in windows, which must not leave its buffer.
  uint64_t after = 0;
  if (windows) {
    if (range.begin != 0) range.begin += 16;
    if (range.begin == 0) range.begin = 16;
    after = 16;
  }
  if (range.begin + after + 16 > bytes) return {bytes, bytes, aligned};
  range.end = range.begin + (bytes - range.begin - after) / 16 * 16;
  return range;
}

// The part of `bytes` bytes that lane `lane` of `lanes` moves in vectors: of every round of
// `kVectors` vectors a lane, each warp takes one stretch.
template <int kVectors>
class Rounds {
 public:
  UNISONO_DEVICE Rounds(int lane, int lanes, uint64_t bytes)
      : offset_(uint64_t{16} * (static_cast<uint32_t>(lane / kWarpSize) * kVectors * kWarpSize +
                                static_cast<uint32_t>(lane % kWarpSize))),
        step_(uint64_t{16} * static_cast<uint32_t>(lanes) * kVectors),
        bytes_(bytes) {}
  UNISONO_DEVICE bool more() const { return offset_ < bytes_; }
  UNISONO_DEVICE void next() { offset_ += step_; }
  // Of the lane's first vector in this round.
  UNISONO_DEVICE uint64_t offset() const { return offset_; }
  // Vector `u` is at offset() + distance(u); `has(u)` if it exists.
  UNISONO_DEVICE static constexpr uint64_t distance(int u) {
    return uint64_t{16} * static_cast<uint32_t>(u * kWarpSize);
  }
  UNISONO_DEVICE bool has(int u) const { return u == 0 || offset_ + distance(u) < bytes_; }

 private:
  uint64_t offset_, step_, bytes_;
};

UNISONO_DEVICE const std::byte* at(const void* base, uint64_t offset) {
  return static_cast<const std::byte*>(base) + offset;
}
UNISONO_DEVICE std::byte* at(void* base, uint64_t offset) {
  return static_cast<std::byte*>(base) + offset;
}

// Whether `work` is of the shapes that rings and binary trees have.
UNISONO_DEVICE bool isFew(const ReduceCopy& work) {
  return work.sources <= 3 && work.destinations <= 2;
}
// Whether a work of these shapes consists of whole vectors.
UNISONO_DEVICE bool isAligned(const ReduceCopy& work, uint64_t bytes) {
  uint64_t bits = reinterpret_cast<uint64_t>(work.source[0]) |
                  reinterpret_cast<uint64_t>(work.destination[0]) | bytes;
  if (work.sources > 1) bits |= reinterpret_cast<uint64_t>(work.source[1]);
  if (work.sources > 2) bits |= reinterpret_cast<uint64_t>(work.source[2]);
  if (work.destinations > 1) bits |= reinterpret_cast<uint64_t>(work.destination[1]);
  return bits % 16 == 0;
}

// Announces what a work reads and writes.
UNISONO_DEVICE void noteOperands(const ReduceCopy& work, uint64_t bytes) {
  UNISONO_UNROLL
  for (int s = 0; s < kMaxSources; s++) {
    if (s < work.sources) noteRead(work.source[s], bytes);
  }
  UNISONO_UNROLL
  for (int d = 0; d < kMaxDestinations; d++) {
    if (d < work.destinations) noteWrite(work.destination[d], bytes);
  }
}

// From one source to one destination or (`second` not null) two, all of them aligned.
UNISONO_DEVICE_CALL void copyAligned(int lane, int lanes, const std::byte* from, std::byte* first,
                                     std::byte* second, uint64_t bytes) {
  constexpr int kVectors = kUnroll;
  for (Rounds<kVectors> rounds(lane, lanes, bytes); rounds.more(); rounds.next()) {
    Vector16 value[kVectors];
    UNISONO_UNROLL
    for (int u = 0; u < kVectors; u++) {
      value[u] = loadVector(from + rounds.offset() + Rounds<kVectors>::distance(u), rounds.has(u));
    }
    UNISONO_UNROLL
    for (int u = 0; u < kVectors; u++) {
      storeVector(first + rounds.offset() + Rounds<kVectors>::distance(u), value[u], rounds.has(u));
    }
    if (second == nullptr) continue;
    UNISONO_UNROLL
    for (int u = 0; u < kVectors; u++) {
      storeVector(second + rounds.offset() + Rounds<kVectors>::distance(u), value[u],
                  rounds.has(u));
    }
  }
}

template <int kVectors>
UNISONO_DEVICE void copyVectors(int lane, int lanes, const ReduceCopy& work, VectorRange range) {
  const std::byte* from = at(work.source[0], range.begin);
  std::byte* to[kMaxDestinations];
  UNISONO_UNROLL
  for (int d = 0; d < kMaxDestinations; d++) {
    to[d] = d < work.destinations ? at(work.destination[d], range.begin) : nullptr;
  }
  for (Rounds<kVectors> rounds(lane, lanes, range.end - range.begin); rounds.more();
       rounds.next()) {
    Vector16 value[kVectors];
    UNISONO_UNROLL
    for (int u = 0; u < kVectors; u++) {
      value[u] = loadVector(from + rounds.offset() + Rounds<kVectors>::distance(u), rounds.has(u));
    }
    UNISONO_UNROLL
    for (int d = 0; d < kMaxDestinations; d++) {
      if (to[d] == nullptr) break;
      UNISONO_UNROLL
      for (int u = 0; u < kVectors; u++) {
        storeVector(to[d] + rounds.offset() + Rounds<kVectors>::distance(u), value[u],
                    rounds.has(u));
      }
    }
  }
}

// The same with operands of different alignments.
template <int kVectors>
UNISONO_DEVICE void copyWindows(int lane, int lanes, const ReduceCopy& work, VectorRange range) {
  const std::byte* from = at(work.source[0], range.begin);
  const uint32_t misalignment = misalignmentOf(from);
  for (Rounds<kVectors> rounds(lane, lanes, range.end - range.begin); rounds.more();
       rounds.next()) {
    Window window[kVectors];
    UNISONO_UNROLL
    for (int u = 0; u < kVectors; u++) {
      window[u] = loadWindow(from + rounds.offset() + Rounds<kVectors>::distance(u), rounds.has(u));
    }
    UNISONO_UNROLL
    for (int u = 0; u < kVectors; u++) {
      const Vector16 value = vectorOf(window[u], misalignment);
      const uint64_t offset = range.begin + rounds.offset() + Rounds<kVectors>::distance(u);
      if (!rounds.has(u)) break;
      storeVector(at(work.destination[0], offset), value);
      for (int d = 1; d < work.destinations; d++) {
        storeAnywhere(at(work.destination[d], offset), value);
      }
    }
  }
}

// Copies `bytes` bytes from the first source to all destinations, of any number and alignment.
UNISONO_DEVICE_CALL void copyBytes(int lane, int lanes, const ReduceCopy& work, uint64_t bytes) {
  const VectorRange range = vectorRangeOf(work, bytes);
  const uint64_t vectorBytes = range.end - range.begin;
  for (uint64_t i = static_cast<uint32_t>(lane); i < bytes - vectorBytes;
       i += static_cast<uint32_t>(lanes)) {
    const uint64_t index = i < range.begin ? i : i + vectorBytes;
    const std::byte value = *at(work.source[0], index);
    for (int d = 0; d < work.destinations; d++) *at(work.destination[d], index) = value;
  }
  if (range.aligned) {
    copyVectors<kUnroll>(lane, lanes, work, range);
  } else {
    copyWindows<4>(lane, lanes, work, range);
  }
}

// Moves `bytes` bytes of a work that needs no arithmetic. By workers.
UNISONO_DEVICE void copyOnly(const ThreadGroup& group, const ReduceCopy& work, uint64_t bytes) {
  if (bytes == 0 || work.destinations == 0) return;
  noteOperands(work, bytes);
  if (isFew(work) && isAligned(work, bytes)) {
    copyAligned(group.rank(), group.size(), at(work.source[0], 0), at(work.destination[0], 0),
                work.destinations > 1 ? at(work.destination[1], 0) : nullptr, bytes);
  } else {
    const ReduceCopy copy = work;  // whose address may be taken
    copyBytes(group.rank(), group.size(), copy, bytes);
  }
}

}  // namespace unisono::device::UNISONO_TARGET
