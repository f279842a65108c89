// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/simt/simt.h"

// Lines of the low-latency protocol: readiness travels in the data, so there is no fence and no
// counter. A line holds 8 bytes of data and, after each 4 of them, a flag. Whoever stores lines
// chooses flags that no older line at the same place can have (device/direct_work.h).
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

// The 8 bytes from `index * 8` on of a buffer of `bytes` bytes; bytes after the end are zero.
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

}  // namespace unisono::device::UNISONO_TARGET
