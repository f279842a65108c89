// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/multicast.h"
#include "device/reduce/any_reducer.h"
#include "device/simt/buffer_view.h"

// Loads from multicast addresses, which the NVSwitch reduces on the way. 16-bit floating-point
// types are added in float and rounded once.
namespace unisono::device::UNISONO_TARGET {

#if defined(__CUDACC__)
#define UNISONO_LOAD_FOUR(op)                                                             \
  UNISONO_MULTIMEM("multimem.ld_reduce.relaxed.sys.global." op " {%0, %1, %2, %3}, [%4];" \
                   : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]),       \
                     "=r"(value.word[3])                                                  \
                   : "l"(address)                                                         \
                   : "memory")
#define UNISONO_LOAD_EACH(Word, constraint, op)                                 \
  do {                                                                          \
    Word word[16 / sizeof(Word)] = {};                                          \
    UNISONO_UNROLL                                                              \
    for (unsigned i = 0; i < 16 / sizeof(Word); i++) {                          \
      UNISONO_MULTIMEM("multimem.ld_reduce.relaxed.sys.global." op " %0, [%1];" \
                       : "=" constraint(word[i])                                \
                       : "l"(address + i * sizeof(Word))                        \
                       : "memory");                                             \
    }                                                                           \
    value = bitsAs<Vector16>(word);                                             \
  } while (false)

// The vectors of all members at a multicast address, combined.
template <typename R>
UNISONO_DEVICE Vector16 loadReduced(const MulticastView& view, uint64_t offset) {
  using Element = typename R::Element;
  constexpr Reduction kReduction = R::kReduction;
  const std::byte* address = view.address() + offset;
  Vector16 value{};
  if constexpr (std::is_same_v<Element, float>) {
    UNISONO_LOAD_FOUR("add.v4.f32");
  } else if constexpr (std::is_same_v<Element, double>) {
    UNISONO_LOAD_EACH(double, "d", "add.f64");
  } else if constexpr (std::is_same_v<Element, Float16>) {
    if constexpr (kReduction == Reduction::sum) UNISONO_LOAD_FOUR("add.acc::f32.v4.f16x2");
    if constexpr (kReduction == Reduction::min) UNISONO_LOAD_FOUR("min.v4.f16x2");
    if constexpr (kReduction == Reduction::max) UNISONO_LOAD_FOUR("max.v4.f16x2");
  } else if constexpr (std::is_same_v<Element, BFloat16>) {
    if constexpr (kReduction == Reduction::sum) UNISONO_LOAD_FOUR("add.acc::f32.v4.bf16x2");
    if constexpr (kReduction == Reduction::min) UNISONO_LOAD_FOUR("min.v4.bf16x2");
    if constexpr (kReduction == Reduction::max) UNISONO_LOAD_FOUR("max.v4.bf16x2");
  } else if constexpr (sizeof(Element) == 4) {
    constexpr bool kSigned = std::is_signed_v<Element>;
    if constexpr (kReduction == Reduction::sum) UNISONO_LOAD_EACH(uint32_t, "r", "add.u32");
    if constexpr (kReduction == Reduction::min) {
      if constexpr (kSigned) UNISONO_LOAD_EACH(uint32_t, "r", "min.s32");
      if constexpr (!kSigned) UNISONO_LOAD_EACH(uint32_t, "r", "min.u32");
    }
    if constexpr (kReduction == Reduction::max) {
      if constexpr (kSigned) UNISONO_LOAD_EACH(uint32_t, "r", "max.s32");
      if constexpr (!kSigned) UNISONO_LOAD_EACH(uint32_t, "r", "max.u32");
    }
  } else {
    static_assert(sizeof(Element) == 8, "a type is missing here");
    constexpr bool kSigned = std::is_signed_v<Element>;
    if constexpr (kReduction == Reduction::sum) UNISONO_LOAD_EACH(uint64_t, "l", "add.u64");
    if constexpr (kReduction == Reduction::min) {
      if constexpr (kSigned) UNISONO_LOAD_EACH(uint64_t, "l", "min.s64");
      if constexpr (!kSigned) UNISONO_LOAD_EACH(uint64_t, "l", "min.u64");
    }
    if constexpr (kReduction == Reduction::max) {
      if constexpr (kSigned) UNISONO_LOAD_EACH(uint64_t, "l", "max.s64");
      if constexpr (!kSigned) UNISONO_LOAD_EACH(uint64_t, "l", "max.u64");
    }
  }
  return value;
}
#undef UNISONO_LOAD_EACH
#undef UNISONO_LOAD_FOUR
#else
template <typename R>
Vector16 loadReduced(const MulticastView& view, uint64_t offset) {
  using Element = typename R::Element;
  constexpr unsigned kElements = 16 / sizeof(Element);
  typename R::Accumulator combined[kElements] = {};
  for (int m = 0; m < view.members(); m++) {
    const Vector16 vector = loadVector(view.member(m) + offset);
    Element element[kElements];
    memcpy(element, &vector, sizeof(element));
    for (unsigned e = 0; e < kElements; e++) {
      const auto value = R::Traits::widen(element[e]);
      combined[e] = m == 0 ? value : R::combine(combined[e], value);
    }
  }
  Element result[kElements];
  for (unsigned e = 0; e < kElements; e++) result[e] = R::Traits::narrow(combined[e]);
  return bitsAs<Vector16>(result);
}
#endif

// Two vectors, combined.
template <typename R>
UNISONO_DEVICE Vector16 combineVectors(const Vector16& a, const Vector16& b) {
  uint64_t left[2], right[2];
  memcpy(left, &a, sizeof(left));
  memcpy(right, &b, sizeof(right));
  UNISONO_UNROLL
  for (int k = 0; k < 2; k++) left[k] = combinePacks<R>(left[k], right[k]);
  return bitsAs<Vector16>(left);
}

// The pairs that multicast has.
struct MulticastPairs {
  static constexpr bool contains(DataType type, Reduction reduction) {
    return isMulticastReduction(type, reduction);
  }
};

}  // namespace unisono::device::UNISONO_TARGET
