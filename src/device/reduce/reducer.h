// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/reduce/element.h"
#include "device/work.h"

// The innermost step: how two values of a type are combined. Data type and operator enter device
// code only here and in what is instantiated for each pair of them (reductions.h).
namespace unisono::device::UNISONO_TARGET {

// The larger or smaller of two floating-point numbers. A NaN on either side stays a NaN: data that
// went wrong must not vanish in a maximum.
template <bool kMax, typename T>
UNISONO_DEVICE T extremeOf(T a, T b) {
  if (a != a) return a;  // NOLINT(misc-redundant-expression)
  if (b != b) return b;  // NOLINT(misc-redundant-expression)
  return (kMax ? a > b : a < b) ? a : b;
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
template <bool kMax>
UNISONO_DEVICE float extremeOf(float a, float b) {
  float result;
  if constexpr (kMax) {
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  } else {
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  }
  return result;
}
#endif

template <typename ElementType, Reduction kOperator>
struct Reducer {
  static constexpr Reduction kReduction = kOperator;
  using Element = ElementType;
  using Traits = Arithmetic<Element>;
  using Accumulator = typename Traits::Accumulator;
  using Factor = Accumulator;

  Accumulator factor{};  // preMulSum
  uint64_t divisor = 1;  // sumPostDivide, at most 2^31 - 1

  UNISONO_DEVICE explicit Reducer(const ReductionSpec& spec) {
    if constexpr (kReduction == Reduction::preMulSum) {
      const uint64_t bits = spec.scalar;
      if (spec.scalarIsPointer) {
        noteRead(reinterpret_cast<const void*>(bits), sizeof(Element));
        factor = Traits::widen(*reinterpret_cast<const Element*>(bits));
      } else {
        memcpy(&factor, &bits, sizeof(factor));
      }
    } else if constexpr (kReduction == Reduction::sumPostDivide) {
      divisor = spec.scalar;
    }
  }

  UNISONO_DEVICE static constexpr unsigned bytes() { return sizeof(Element); }

  // Unsigned types of at least 32 bits carry integer arithmetic, so that overflow wraps.
  static constexpr bool kInteger = !Traits::kFloating;

  template <typename Apply>
  UNISONO_DEVICE static Accumulator wrapping(Accumulator a, Accumulator b, Apply apply) {
    if constexpr (kInteger) {
      using Wide = std::conditional_t<sizeof(Accumulator) == 8, uint64_t, uint32_t>;
      return static_cast<Accumulator>(apply(static_cast<Wide>(a), static_cast<Wide>(b)));
    } else {
      return apply(a, b);
    }
  }

  static constexpr bool kSums = kReduction == Reduction::sum ||
                                kReduction == Reduction::preMulSum ||
                                kReduction == Reduction::sumPostDivide;
  // Whether prepare and finish do anything.
  static constexpr bool kPrepares = kReduction == Reduction::preMulSum;
  static constexpr bool kFinishes = kReduction == Reduction::sumPostDivide;

  UNISONO_DEVICE static Accumulator multiply(Accumulator a, Accumulator b) {
    return wrapping(a, b, [](auto x, auto y) { return x * y; });
  }
  // What an operand is multiplied with: a rank's own input with the factor, all else with 1.
  UNISONO_DEVICE Factor factorIf(bool prepare) const { return prepare ? factor : Accumulator{1}; }

  // Applied once to every rank's own input.
  UNISONO_DEVICE Accumulator prepare(Element element) const {
    const Accumulator value = Traits::widen(element);
    return kPrepares ? multiply(value, factor) : value;
  }

  UNISONO_DEVICE static Accumulator combine(Accumulator a, Accumulator b) {
    if constexpr (kSums) {
      return wrapping(a, b, [](auto x, auto y) { return x + y; });
    } else if constexpr (kReduction == Reduction::prod) {
      return multiply(a, b);
    } else {
      static_assert(kReduction == Reduction::max || kReduction == Reduction::min,
                    "an operator is missing here");
      constexpr bool kMax = kReduction == Reduction::max;
      if constexpr (kInteger) {
        return (kMax ? a > b : a < b) ? a : b;
      } else {
        return extremeOf<kMax>(a, b);
      }
    }
  }

  // Applied once to the sum of all ranks.
  UNISONO_DEVICE Accumulator finish(Accumulator value) const {
    if constexpr (kReduction == Reduction::sumPostDivide) {
      // A division of 64 bits is several times slower than one of 32.
      using Unsigned = std::conditional_t<sizeof(Accumulator) == 8, uint64_t, uint32_t>;
      using Wide =
          std::conditional_t<std::is_signed_v<Accumulator>, std::make_signed_t<Unsigned>, Unsigned>;
      return static_cast<Accumulator>(static_cast<Wide>(value) / static_cast<Wide>(divisor));
    } else {
      return value;
    }
  }
};

}  // namespace unisono::device::UNISONO_TARGET
