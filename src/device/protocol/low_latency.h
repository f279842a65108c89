// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/reduce/reducer.h"

// Lines of the low-latency protocol: readiness travels in the data, so there is no fence and no
// counter. A line holds 8 bytes of data and, beside each 4 of them, the flag of the call (its
// epoch).
//
// Reuse: scratch has two halves, used by even and odd epochs. Every rank sends to and hears from
// every peer in every call, so data of epoch e from a peer shows that this peer has left the kernel
// of epoch e - 1, and with it every read of the half that e + 1 will write. A flag never repeats
// within 2^32 calls; memory starts at zero and epochs at one, so stale lines never match.
namespace unisono::device::UNISONO_TARGET {

UNISONO_DEVICE bool lineHolds(const Line& line, uint32_t flag) {
  return line.flag0 == flag && line.flag1 == flag;
}
UNISONO_DEVICE uint64_t lineData(const Line& line) {
  return uint64_t{line.data0} | uint64_t{line.data1} << 32;
}

// The bytes of a buffer of `bytes` bytes that its pack `index` holds.
UNISONO_DEVICE uint64_t packBytes(uint64_t index, uint64_t bytes) {
  return bytes - index * 8 < 8 ? bytes - index * 8 : 8;
}

// The 8 bytes from `index * 8` on of a buffer of `bytes` bytes; what lies behind the end is zero.
// The buffer is aligned to its elements only.
template <typename Element>
UNISONO_DEVICE uint64_t loadPack(const void* buffer, uint64_t index, uint64_t bytes) {
  const uint64_t begin = index * 8;
  const std::byte* from = static_cast<const std::byte*>(buffer) + begin;
  noteRead(from, packBytes(index, bytes));
  if (begin + 8 <= bytes && reinterpret_cast<uint64_t>(from) % 8 == 0) {
    return *reinterpret_cast<const uint64_t*>(from);
  }
  Element element[8 / sizeof(Element)] = {};
  UNISONO_UNROLL
  for (unsigned e = 0; e < 8 / sizeof(Element); e++) {
    if (begin + e * sizeof(Element) < bytes) element[e] = reinterpret_cast<const Element*>(from)[e];
  }
  uint64_t pack;
  memcpy(&pack, element, sizeof(pack));
  return pack;
}

template <typename Element>
UNISONO_DEVICE void storePack(void* buffer, uint64_t index, uint64_t bytes, uint64_t pack) {
  const uint64_t begin = index * 8;
  std::byte* to = static_cast<std::byte*>(buffer) + begin;
  noteWrite(to, packBytes(index, bytes));
  if (begin + 8 <= bytes && reinterpret_cast<uint64_t>(to) % 8 == 0) {
    *reinterpret_cast<uint64_t*>(to) = pack;
    return;
  }
  Element element[8 / sizeof(Element)];
  memcpy(element, &pack, sizeof(pack));
  UNISONO_UNROLL
  for (unsigned e = 0; e < 8 / sizeof(Element); e++) {
    if (begin + e * sizeof(Element) < bytes) reinterpret_cast<Element*>(to)[e] = element[e];
  }
}

// A rank's own pack as it takes part in the reduction. Only its rank can do this: every rank may
// have a factor of its own.
template <typename R>
UNISONO_DEVICE uint64_t preparePack(const R& reducer, uint64_t pack) {
  if constexpr (R::kPrepares) {
    typename R::Element element[8 / sizeof(typename R::Element)];
    memcpy(element, &pack, sizeof(pack));
    UNISONO_UNROLL
    for (auto& e : element) e = R::Traits::narrow(reducer.prepare(e));
    memcpy(&pack, element, sizeof(pack));
  }
  return pack;
}

// The reduction of one prepared 8-byte pack of every rank, in rank order, so that all ranks get the
// same bits; narrow types accumulate in float and are rounded once.
template <int kRanks, typename R>
UNISONO_DEVICE uint64_t reducePacks(const R& reducer, const uint64_t (&pack)[kRanks], int ranks) {
  using Element = typename R::Element;
  constexpr int kElements = 8 / sizeof(Element);
  typename R::Accumulator value[kElements] = {};
  UNISONO_UNROLL
  for (int r = 0; r < kRanks; r++) {
    if (r >= ranks) break;
    Element element[kElements];
    memcpy(element, &pack[r], sizeof(element));
    UNISONO_UNROLL
    for (int e = 0; e < kElements; e++) {
      auto operand = R::Traits::widen(element[e]);
      value[e] = r == 0 ? operand : R::combine(value[e], operand);
    }
  }
  Element result[kElements];
  UNISONO_UNROLL
  for (int e = 0; e < kElements; e++) result[e] = R::Traits::narrow(reducer.finish(value[e]));
  uint64_t packed;
  memcpy(&packed, result, sizeof(packed));
  return packed;
}

}  // namespace unisono::device::UNISONO_TARGET
