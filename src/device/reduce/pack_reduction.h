// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/reduce/any_reducer.h"

namespace unisono::device::UNISONO_TARGET {

// A rank's own pack as it takes part in the reduction. Only its rank can do this: every rank may
// have a factor of its own.
template <typename R>
UNISONO_DEVICE uint64_t preparePack(const R& reducer, uint64_t pack) {
  return R::kPrepares ? scalePack(reducer, pack) : pack;
}
UNISONO_DEVICE uint64_t preparePack(const AnyReducer& reducer, uint64_t pack) {
  uint64_t prepared[1] = {pack};
  reducer.prepare(prepared);
  return prepared[0];
}

// Vectors as packs.
template <int kVectors>
UNISONO_DEVICE void packsOf(const Vector16 (&vector)[kVectors], uint64_t (&pack)[2 * kVectors]) {
  memcpy(pack, vector, sizeof(vector));
}
template <int kVectors>
UNISONO_DEVICE void vectorsOf(const uint64_t (&pack)[2 * kVectors], Vector16 (&vector)[kVectors]) {
  memcpy(vector, pack, sizeof(vector));
}

// More operands than any reduction has.
inline constexpr int kAnyOperands = 1 << 10;

// The partial results for packs of 8 bytes, operand by operand: words where the operator works on
// whole words, else elements widened, which are rounded once. `kOperands`: their number, or the
// most.
template <typename R, int kOperands, int kPacks>
class PackReduction {
 public:
  // Adds an operand, whose elements are multiplied with `factor` if the operator prepares. `first`:
  // of all.
  UNISONO_DEVICE void add(const R&, const uint64_t (&pack)[kPacks], bool first,
                          typename R::Factor factor) {
    addPacks<R::kPrepares>(pack, first, factor);
  }
  // Adds an operand as it is.
  UNISONO_DEVICE void add(const R&, const uint64_t (&pack)[kPacks], bool first) {
    addPacks<false>(pack, first, {});
  }
  UNISONO_DEVICE void result(const R& reducer, bool finish, uint64_t (&pack)[kPacks]) {
    UNISONO_UNROLL
    for (int k = 0; k < kPacks; k++) {
      Word word[kWords];
      UNISONO_UNROLL
      for (int w = 0; w < kWords; w++) word[w] = resultOf(reducer, finish, k * kWords + w);
      memcpy(&pack[k], word, sizeof(word));
    }
  }

 private:
  using Element = typename R::Element;
  using Word = WordOf<Element>;
  static constexpr int kWords = 8 / sizeof(Word);
  static constexpr Packing kPacking = packingOf<Element, R::kReduction>();
  static constexpr bool kPacked =
      kPacking == Packing::any || (kPacking == Packing::pairs && kOperands <= 2);

  template <bool kMultiplies>
  UNISONO_DEVICE void addPacks(const uint64_t (&pack)[kPacks], bool first,
                               typename R::Factor factor) {
    UNISONO_UNROLL
    for (int k = 0; k < kPacks; k++) {
      Word word[kWords];
      memcpy(word, &pack[k], sizeof(word));
      UNISONO_UNROLL
      for (int w = 0; w < kWords; w++) {
        addWord<kMultiplies>(k * kWords + w, word[w], first, factor);
      }
    }
  }
  template <bool kMultiplies>
  UNISONO_DEVICE void addWord(int w, Word word, bool first, typename R::Factor factor) {
    if constexpr (kPacked) {
      word_[w] = first ? word : combineWord<Element, R::kReduction>(word_[w], word);
    } else {
      typename R::Accumulator value[kPerWord<Element>];
      R::Traits::widenWord(word, value);
      UNISONO_UNROLL
      for (int e = 0; e < kPerWord<Element>; e++) {
        if constexpr (kMultiplies) value[e] = R::multiply(value[e], factor);
        value_[w][e] = first ? value[e] : R::combine(value_[w][e], value[e]);
      }
    }
  }
  UNISONO_DEVICE Word resultOf(const R& reducer, bool finish, int w) {
    if constexpr (R::kFinishes) {
      if (finish) {
        if constexpr (kPacked) R::Traits::widenWord(word_[w], value_[w]);
        UNISONO_UNROLL
        for (auto& value : value_[w]) value = reducer.finish(value);
        return R::Traits::narrowWord(value_[w]);
      }
    }
    if constexpr (kPacked) {
      return word_[w];
    } else {
      return R::Traits::narrowWord(value_[w]);
    }
  }

  Word word_[kPacks * kWords]{};
  typename R::Accumulator value_[kPacks * kWords][kPerWord<Element>]{};
};

template <int kOperands, int kPacks>
class PackReduction<AnyReducer, kOperands, kPacks> {
 public:
  UNISONO_DEVICE void add(const AnyReducer& reducer, const uint64_t (&pack)[kPacks], bool first,
                          bool prepare) {
    uint64_t operand[kPacks];
    UNISONO_UNROLL
    for (int k = 0; k < kPacks; k++) operand[k] = pack[k];
    if (prepare) reducer.prepare(operand);
    add(reducer, operand, first);
  }
  UNISONO_DEVICE void add(const AnyReducer& reducer, const uint64_t (&pack)[kPacks], bool first) {
    if (!first) return reducer.combine(sum_, pack);
    UNISONO_UNROLL
    for (int k = 0; k < kPacks; k++) sum_[k] = pack[k];
  }
  UNISONO_DEVICE void result(const AnyReducer& reducer, bool finish, uint64_t (&pack)[kPacks]) {
    UNISONO_UNROLL
    for (int k = 0; k < kPacks; k++) pack[k] = sum_[k];
    if (finish) reducer.finish(pack);
  }

 private:
  uint64_t sum_[kPacks]{};
};

}  // namespace unisono::device::UNISONO_TARGET
