// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/reduce/element.h"

// Operators on all elements of a word at once, where that has the same result as widening each
// element, combining and narrowing:
//   - Integers wrap, and a maximum is one of its operands, whatever the number of operands.
//   - A sum of two Float16 or BFloat16 numbers, and a product of two Float16 numbers, rounds once
//     either way, because float has more than twice the precision (or is exact). A sum of three
//     would be rounded twice. The same holds for the 8-bit formats in Float16.
namespace unisono::device::UNISONO_TARGET {

enum class Packing {
  none,
  pairs,  // for two operands
  any,
};

template <typename Element, Reduction kReduction>
constexpr Packing packingOf() {
  constexpr bool kAdds = kReduction == Reduction::sum || kReduction == Reduction::sumPostDivide;
  if constexpr (std::is_integral_v<Element>) {
    return sizeof(Element) == 1 && kAdds ? Packing::any : Packing::none;
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (!std::is_arithmetic_v<Element>) {
    if (kReduction == Reduction::max || kReduction == Reduction::min) return Packing::any;
    // The product of two small BFloat16 numbers is subnormal in float and would round twice there.
    constexpr bool kMultiplies =
        kReduction == Reduction::prod && !std::is_same_v<Element, BFloat16>;
    return kAdds || kMultiplies ? Packing::pairs : Packing::none;
  }
#endif
  return Packing::none;
}

// Four sums of 8 bits, none of which carries into the next.
UNISONO_DEVICE uint32_t addBytes(uint32_t a, uint32_t b) {
  constexpr uint32_t kHighBits = 0x80808080u;
  return ((a & ~kHighBits) + (b & ~kHighBits)) ^ ((a ^ b) & kHighBits);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// A NaN in either operand becomes a NaN.
template <Reduction kReduction>
UNISONO_DEVICE uint32_t combineHalves(uint32_t a, uint32_t b) {
  uint32_t result;
  if constexpr (kReduction == Reduction::sum) {
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  } else if constexpr (kReduction == Reduction::prod) {
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  } else if constexpr (kReduction == Reduction::max) {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  } else {
    static_assert(kReduction == Reduction::min, "an operator is missing here");
    asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  }
  return result;
}
template <Reduction kReduction>
UNISONO_DEVICE uint32_t combineBFloats(uint32_t a, uint32_t b) {
  uint32_t result;
  if constexpr (kReduction == Reduction::sum) {
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  } else if constexpr (kReduction == Reduction::max) {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  } else {
    static_assert(kReduction == Reduction::min, "an operator is missing here");
    asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  }
  return result;
}
#endif

// Only for the pairs of type and operator that packingOf() names.
template <typename Element, Reduction kReduction>
UNISONO_DEVICE uint32_t combineWord(uint32_t a, uint32_t b) {
  if constexpr (std::is_integral_v<Element>) {
    return addBytes(a, b);
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  else if constexpr (std::is_same_v<Element, Float16>) {
    return combineHalves<kReduction>(a, b);
  } else if constexpr (std::is_same_v<Element, BFloat16>) {
    return combineBFloats<kReduction>(a, b);
  } else {
    uint32_t left[2], right[2];
    widenToHalves<Element>(a, left);
    widenToHalves<Element>(b, right);
    const uint32_t result[2] = {combineHalves<kReduction>(left[0], right[0]),
                                combineHalves<kReduction>(left[1], right[1])};
    return narrowFromHalves<Element>(result);
  }
#endif
}

}  // namespace unisono::device::UNISONO_TARGET
