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

// Bytes `index * 8 ...` of a buffer of `bytes` bytes whose elements have `elementBytes`; what lies
// behind the end is zero. The buffer is aligned to its elements only.
UNISONO_DEVICE uint64_t loadPack(const void* buffer, uint64_t index, uint64_t bytes,
                                 int elementSize) {
  const uint64_t begin = index * 8;
  const std::byte* from = static_cast<const std::byte*>(buffer) + begin;
  if (begin + 8 <= bytes && reinterpret_cast<uint64_t>(from) % 8 == 0) {
    return *reinterpret_cast<const uint64_t*>(from);
  }
  uint64_t value = 0;
  for (int done = 0; done < 8 && begin + done < bytes; done += elementSize) {
    uint64_t element = 0;
    if (elementSize == 1) element = *reinterpret_cast<const uint8_t*>(from + done);
    if (elementSize == 2) element = *reinterpret_cast<const uint16_t*>(from + done);
    if (elementSize == 4) element = *reinterpret_cast<const uint32_t*>(from + done);
    if (elementSize == 8) element = *reinterpret_cast<const uint64_t*>(from + done);
    value |= element << (8 * done);
  }
  return value;
}

UNISONO_DEVICE void storePack(void* buffer, uint64_t index, uint64_t bytes, int elementSize,
                              uint64_t value) {
  const uint64_t begin = index * 8;
  std::byte* to = static_cast<std::byte*>(buffer) + begin;
  if (begin + 8 <= bytes && reinterpret_cast<uint64_t>(to) % 8 == 0) {
    *reinterpret_cast<uint64_t*>(to) = value;
    return;
  }
  for (int done = 0; done < 8 && begin + done < bytes; done += elementSize) {
    const uint64_t element = value >> (8 * done);
    if (elementSize == 1) *reinterpret_cast<uint8_t*>(to + done) = static_cast<uint8_t>(element);
    if (elementSize == 2) *reinterpret_cast<uint16_t*>(to + done) = static_cast<uint16_t>(element);
    if (elementSize == 4) *reinterpret_cast<uint32_t*>(to + done) = static_cast<uint32_t>(element);
    if (elementSize == 8) *reinterpret_cast<uint64_t*>(to + done) = element;
  }
}

// Packs that one reduction takes at most.
inline constexpr int kMaxPacks = 8;

template <typename Element>
UNISONO_DEVICE_CALL uint64_t preparePackAs(const ReductionSpec& spec, uint64_t pack) {
  const Reducer<Element, Reduction::preMulSum> reducer(spec);
  Element element[8 / sizeof(Element)];
  memcpy(element, &pack, sizeof(element));
  UNISONO_UNROLL
  for (auto& e : element) e = Arithmetic<Element>::narrow(reducer.prepare(e));
  memcpy(&pack, element, sizeof(pack));
  return pack;
}

// A rank's own pack as it takes part in the reduction. Only its rank can do this: every rank may
// have a factor of its own.
UNISONO_DEVICE uint64_t preparePack(const ReductionSpec& spec, uint64_t pack) {
  if (spec.reduction != Reduction::preMulSum) return pack;
  uint64_t result = 0;
  visitElement<Reduction::preMulSum>(spec.type, [&]<typename Element, Reduction>() {
    result = preparePackAs<Element>(spec, pack);
  });
  return result;
}

template <typename Element, Reduction kReduction>
UNISONO_DEVICE_CALL uint64_t reducePacksAs(const ReductionSpec& spec, int packs, uint64_t p0,
                                           uint64_t p1, uint64_t p2, uint64_t p3, uint64_t p4,
                                           uint64_t p5, uint64_t p6, uint64_t p7) {
  const uint64_t pack[kMaxPacks] = {p0, p1, p2, p3, p4, p5, p6, p7};
  const Reducer<Element, kReduction> reducer(spec);
  constexpr int kElements = 8 / sizeof(Element);
  typename Reducer<Element, kReduction>::Accumulator value[kElements] = {};
  UNISONO_UNROLL
  for (int p = 0; p < kMaxPacks; p++) {
    if (p >= packs) break;
    Element element[kElements];
    memcpy(element, &pack[p], sizeof(element));
    UNISONO_UNROLL
    for (int e = 0; e < kElements; e++) {
      auto operand = Arithmetic<Element>::widen(element[e]);
      value[e] = p == 0 ? operand : reducer.combine(value[e], operand);
    }
  }
  Element result[kElements];
  UNISONO_UNROLL
  for (int e = 0; e < kElements; e++) {
    result[e] = Arithmetic<Element>::narrow(reducer.finish(value[e]));
  }
  uint64_t packed;
  memcpy(&packed, result, sizeof(packed));
  return packed;
}

// The reduction of one prepared 8-byte pack of every rank, in rank order, so that all ranks get the
// same bits; narrow types accumulate in float and are rounded once. One body serves every number of
// ranks; the packs travel in registers, which an array would not.
UNISONO_DEVICE uint64_t reducePacks(const ReductionSpec& spec, int packs, uint64_t p0, uint64_t p1,
                                    uint64_t p2, uint64_t p3, uint64_t p4, uint64_t p5, uint64_t p6,
                                    uint64_t p7) {
  uint64_t result = 0;
  visitReducer(spec, [&]<typename Element, Reduction kReduction>() {
    constexpr Reduction kCombine = kReduction == Reduction::preMulSum ? Reduction::sum : kReduction;
    result = reducePacksAs<Element, kCombine>(spec, packs, p0, p1, p2, p3, p4, p5, p6, p7);
  });
  return result;
}

}  // namespace unisono::device::UNISONO_TARGET
