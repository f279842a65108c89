// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>

#include "device/reduce/packed.h"
#include "device/reduce/reducer.h"

// Every pair of a data type and an operator. Sums of each type have loops of their own, and so do
// products of narrow floating-point types, which accumulate in float. All other pairs share one
// instance of most loops, with AnyReducer, which finds the pair when it runs: they are rare, and
// with loops for each the library would take minutes longer to compile.
namespace unisono::device::UNISONO_TARGET {

struct AllPairs {
  static constexpr bool contains(DataType type, Reduction reduction) {
    return isReduction(type, reduction);
  }
};
struct PairsWithLoops {
  static constexpr bool contains(DataType type, Reduction reduction) {
    return hasOwnLoops(type, reduction);
  }
};
struct PairsThatShare {
  static constexpr bool contains(DataType type, Reduction reduction) {
    return isReduction(type, reduction) && !hasOwnLoops(type, reduction);
  }
};
// Of these, the ones that change operands or results: sums of integers.
struct PairsThatPrepare {
  static constexpr bool contains(DataType type, Reduction reduction) {
    return PairsThatShare::contains(type, reduction) && reduction == Reduction::preMulSum;
  }
};
struct PairsThatFinish {
  static constexpr bool contains(DataType type, Reduction reduction) {
    return PairsThatShare::contains(type, reduction) && reduction == Reduction::sumPostDivide;
  }
};

// The number of a pair, and of the one that it is reduced as.
constexpr int pairOf(DataType type, Reduction reduction) {
  return static_cast<int>(type) * kReductions + static_cast<int>(reduction);
}
UNISONO_DEVICE int reducedPairOf(const ReductionSpec& spec) {
  return pairOf(reducedAs(spec.type, spec.reduction), spec.reduction);
}

// Calls visit.template run<R>() for the Reducer R of the pair that is reduced as itself and has
// this number, if `Pairs` contains it, and returns whether it does. Everything is inlined, which
// nvcc does not do to lambdas of this size. Compilers turn the comparisons into a search.
template <typename Pairs, int kPair = 0, typename Visit>
UNISONO_DEVICE bool visitPair(int pair, const Visit& visit) {
  if constexpr (kPair < kDataTypes * kReductions) {
    constexpr auto kType = static_cast<DataType>(kPair / kReductions);
    constexpr auto kReduction = static_cast<Reduction>(kPair % kReductions);
    if constexpr (Pairs::contains(kType, kReduction) && reducedAs(kType, kReduction) == kType) {
      if (pair == kPair) {
        visit.template run<Reducer<typename ElementOf<kType>::type, kReduction>>();
        return true;
      }
    }
    return visitPair<Pairs, kPair + 1>(pair, visit);
  }
  return false;
}

// Combines the elements of two packs of 8 bytes, and rounds them to their type.
template <typename R>
UNISONO_DEVICE uint64_t combinePacks(uint64_t a, uint64_t b) {
  using Element = typename R::Element;
  using Word = WordOf<Element>;
  constexpr int kWords = 8 / sizeof(Word);
  Word left[kWords], right[kWords];
  memcpy(left, &a, sizeof(left));
  memcpy(right, &b, sizeof(right));
  UNISONO_UNROLL
  for (int w = 0; w < kWords; w++) {
    if constexpr (packingOf<Element, R::kReduction>() != Packing::none) {
      left[w] = combineWord<Element, R::kReduction>(left[w], right[w]);
    } else {
      typename R::Accumulator value[kPerWord<Element>], other[kPerWord<Element>];
      R::Traits::widenWord(left[w], value);
      R::Traits::widenWord(right[w], other);
      UNISONO_UNROLL
      for (int e = 0; e < kPerWord<Element>; e++) value[e] = R::combine(value[e], other[e]);
      left[w] = R::Traits::narrowWord(value);
    }
  }
  return bitsAs<uint64_t>(left);
}

// Multiplies the elements of a pack with the factor of `reducer`, or divides them by its divisor.
template <typename R>
UNISONO_DEVICE uint64_t scalePack(const R& reducer, uint64_t pack) {
  typename R::Element element[8 / sizeof(typename R::Element)];
  memcpy(element, &pack, sizeof(element));
  UNISONO_UNROLL
  for (auto& e : element) e = R::Traits::narrow(reducer.finish(reducer.prepare(e)));
  return bitsAs<uint64_t>(element);
}

// A Reducer that finds its pair when it runs. It works on packs of 8 bytes.
class AnyReducer {
 public:
  using Element = uint8_t;  // by which buffers are accessed where they are not aligned
  using Factor = bool;      // whether an operand is multiplied
  static constexpr bool kPrepares = true, kFinishes = true;

  UNISONO_DEVICE explicit AnyReducer(const ReductionSpec& spec)
      : pair_(reducedPairOf(spec)),
        bytes_(static_cast<unsigned>(elementBytes(spec.type))),
        multiplies_(spec.reduction == Reduction::preMulSum),
        divides_(spec.reduction == Reduction::sumPostDivide),
        scalar_(spec.scalar) {
    if (multiplies_ && spec.scalarIsPointer) {
      const auto* factor = reinterpret_cast<const void*>(spec.scalar);
      noteRead(factor, bytes_);
      scalar_ = loadElement(factor, 0);
    }
  }

  UNISONO_DEVICE Factor factorIf(bool prepare) const { return prepare && multiplies_; }
  template <int kPacks>
  UNISONO_DEVICE void prepare(uint64_t (&pack)[kPacks]) const {
    if (multiplies_) visitPair<PairsThatPrepare>(pair_, Scale<kPacks>{scalar_, pack});
  }
  template <int kPacks>
  UNISONO_DEVICE void finish(uint64_t (&pack)[kPacks]) const {
    if (divides_) visitPair<PairsThatFinish>(pair_, Scale<kPacks>{scalar_, pack});
  }
  // Combines packs into `sum`.
  template <int kPacks>
  UNISONO_DEVICE void combine(uint64_t (&sum)[kPacks], const uint64_t (&pack)[kPacks]) const {
    visitPair<PairsThatShare>(pair_, Combine<kPacks>{sum, pack});
  }

  // Access element `index` of a buffer.
  UNISONO_DEVICE uint64_t loadElement(const void* buffer, uint64_t index) const {
    const auto* from = static_cast<const uint8_t*>(buffer) + index * bytes_;
    uint64_t element = 0;
    UNISONO_NO_UNROLL
    for (unsigned i = 0; i < bytes_; i++) element |= uint64_t{from[i]} << 8 * i;
    return element;
  }
  UNISONO_DEVICE void storeElement(void* buffer, uint64_t index, uint64_t element) const {
    auto* to = static_cast<uint8_t*>(buffer) + index * bytes_;
    UNISONO_NO_UNROLL
    for (unsigned i = 0; i < bytes_; i++) to[i] = static_cast<uint8_t>(element >> 8 * i);
  }
  UNISONO_DEVICE unsigned bytes() const { return bytes_; }

 private:
  template <int kPacks>
  struct Combine {
    uint64_t (&sum)[kPacks];
    const uint64_t (&pack)[kPacks];
    template <typename R>
    UNISONO_DEVICE void run() const {
      UNISONO_UNROLL
      for (int k = 0; k < kPacks; k++) sum[k] = combinePacks<R>(sum[k], pack[k]);
    }
  };

  template <int kPacks>
  struct Scale {
    uint64_t scalar;
    uint64_t (&pack)[kPacks];
    template <typename R>
    UNISONO_DEVICE void run() const {
      const R reducer(ReductionSpec{{}, {}, false, scalar});
      UNISONO_UNROLL
      for (int k = 0; k < kPacks; k++) pack[k] = scalePack(reducer, pack[k]);
    }
  };

  int pair_;
  unsigned bytes_;
  bool multiplies_, divides_;
  uint64_t scalar_;
};

}  // namespace unisono::device::UNISONO_TARGET
