// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/reduce/element.h"
#include "device/work.h"

// The innermost step: how two values of a type are combined. Data type and operator enter device
// code only here and in the loops that `visitReducer` instantiates.
namespace unisono::device::UNISONO_TARGET {

template <typename ElementType, Reduction kReduction>
struct Reducer {
  using Element = ElementType;
  using Traits = Arithmetic<Element>;
  using Accumulator = typename Traits::Accumulator;

  Accumulator factor{};  // preMulSum
  uint64_t divisor = 1;  // sumPostDivide

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

  // Whether prepare and finish do anything.
  static constexpr bool kPrepares = kReduction == Reduction::preMulSum;
  static constexpr bool kFinishes = kReduction == Reduction::sumPostDivide;

  // Applied once to every rank's own input.
  UNISONO_DEVICE Accumulator prepare(Element element) const {
    Accumulator value = Traits::widen(element);
    if constexpr (kReduction == Reduction::preMulSum) {
      return wrapping(value, factor, [](auto a, auto b) { return a * b; });
    } else {
      return value;
    }
  }

  UNISONO_DEVICE static Accumulator combine(Accumulator a, Accumulator b) {
    if constexpr (kReduction == Reduction::prod) {
      return wrapping(a, b, [](auto x, auto y) { return x * y; });
    } else if constexpr (kReduction == Reduction::max || kReduction == Reduction::min) {
      constexpr bool kMax = kReduction == Reduction::max;
      if constexpr (kInteger) {
        return (kMax ? a > b : a < b) ? a : b;
      } else {
        // A NaN on either side stays a NaN: data that went wrong must not vanish in a maximum.
        if (a != a) return a;  // NOLINT(misc-redundant-expression)
        if (b != b) return b;  // NOLINT(misc-redundant-expression)
        return (kMax ? a > b : a < b) ? a : b;
      }
    } else {
      return wrapping(a, b, [](auto x, auto y) { return x + y; });
    }
  }

  // Applied once to the sum of all ranks.
  UNISONO_DEVICE Accumulator finish(Accumulator value) const {
    if constexpr (kReduction == Reduction::sumPostDivide) {
      if constexpr (std::is_signed_v<Accumulator>) {
        return static_cast<Accumulator>(static_cast<int64_t>(value) /
                                        static_cast<int64_t>(divisor));
      } else {
        return static_cast<Accumulator>(static_cast<uint64_t>(value) / divisor);
      }
    } else {
      return value;
    }
  }
};

// Calls visit.template operator()<Element, kReduction>() for the pair that `spec` names.
template <Reduction kReduction, typename Visit>
UNISONO_DEVICE void visitElement(DataType type, const Visit& visit) {
  switch (type) {
    case DataType::int8:
      return visit.template operator()<int8_t, kReduction>();
    case DataType::uint8:
      return visit.template operator()<uint8_t, kReduction>();
    case DataType::int32:
      return visit.template operator()<int32_t, kReduction>();
    case DataType::uint32:
      return visit.template operator()<uint32_t, kReduction>();
    case DataType::int64:
      return visit.template operator()<int64_t, kReduction>();
    case DataType::uint64:
      return visit.template operator()<uint64_t, kReduction>();
    default:
      break;
  }
  if constexpr (kReduction != Reduction::sumPostDivide) {
    switch (type) {
      case DataType::float16:
        return visit.template operator()<Float16, kReduction>();
      case DataType::float32:
        return visit.template operator()<float, kReduction>();
      case DataType::float64:
        return visit.template operator()<double, kReduction>();
      case DataType::bfloat16:
        return visit.template operator()<BFloat16, kReduction>();
      case DataType::float8e4m3:
        return visit.template operator()<Float8E4M3, kReduction>();
      case DataType::float8e5m2:
        return visit.template operator()<Float8E5M2, kReduction>();
      default:
        break;
    }
  }
}

template <typename Visit>
UNISONO_DEVICE void visitReducer(const ReductionSpec& spec, const Visit& visit) {
  switch (spec.reduction) {
    case Reduction::sum:
      return visitElement<Reduction::sum>(spec.type, visit);
    case Reduction::prod:
      return visitElement<Reduction::prod>(spec.type, visit);
    case Reduction::max:
      return visitElement<Reduction::max>(spec.type, visit);
    case Reduction::min:
      return visitElement<Reduction::min>(spec.type, visit);
    case Reduction::preMulSum:
      return visitElement<Reduction::preMulSum>(spec.type, visit);
    case Reduction::sumPostDivide:
      return visitElement<Reduction::sumPostDivide>(spec.type, visit);
  }
}

}  // namespace unisono::device::UNISONO_TARGET
